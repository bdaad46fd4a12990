"""A training loop of one's own: hosts learn to tell ten pictures of 28x28 pixels apart.

In one terminal:  python examples/plain_loop.py
In another:       python examples/plain_loop.py --join JOIN_STRING
"""

import argparse

import torch
from torch import Tensor, nn

import decod

BATCH_SIZE = 32


def pictures(num_pictures: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Make pictures of ten kinds: smooth blots that are moved, with noise.

    Args:
        num_pictures: How many.
        draws: Which kinds, and the noise.

    Returns:
        Pictures, (num_pictures, 1, 28, 28), and their kinds, (num_pictures,).
    """
    coarse = torch.randn(10, 1, 7, 7, generator=torch.Generator().manual_seed(0))
    blots = nn.functional.interpolate(coarse, size=28, mode="bilinear")
    kinds = torch.randint(10, (num_pictures,), generator=draws)
    moves = torch.randint(-3, 4, (num_pictures, 2), generator=draws).tolist()
    moved = [blots[kind].roll(move, (1, 2)) for kind, move in zip(kinds, moves, strict=True)]
    noise = torch.randn(num_pictures, 1, 28, 28, generator=draws)
    return torch.stack(moved) + noise, kinds


def make_model() -> nn.Module:
    """Make a small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


def train(optimizer: decod.CollaborativeOptimizer, model: nn.Module, num_steps: int) -> None:
    """Train, and show each new round."""
    draws = torch.Generator()
    draws.seed()  # Each host draws pictures of its own.
    shown = optimizer.round
    for _ in range(num_steps):
        inputs, targets = pictures(BATCH_SIZE, draws)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        if optimizer.round > shown:
            shown = optimizer.round
            print(f"round {shown}: loss {loss.item():.3f}, {optimizer.num_peers} hosts", flush=True)


def main() -> None:
    """Train with other hosts until all steps are done, or until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_AsWritten)
    parser.add_argument("--join", help="join string of the first host; absent: this is the first")
    parser.add_argument("--listen", default="127.0.0.1:0", help="0.0.0.0:7700 to let others in")
    parser.add_argument("--steps", type=int, default=100_000, help="steps of this host")
    options = parser.parse_args()
    model = make_model()
    with decod.CollaborativeOptimizer(
        torch.optim.Adam(model.parameters(), lr=1e-3),
        run=None if options.join else "pictures",
        join=options.join,
        target_batch_size=512,
        batch_size_per_step=BATCH_SIZE,
        listen=options.listen,
        verbose=False,
    ) as optimizer:
        if optimizer.join_string:
            print(f"join string: {optimizer.join_string}", flush=True)
        optimizer.watch(model)
        try:
            train(optimizer, model, options.steps)
        except KeyboardInterrupt:
            print("leaving the run")
        print(f"contributed {optimizer.samples_contributed} samples, round {optimizer.round}")


_AsWritten = argparse.RawDescriptionHelpFormatter

if __name__ == "__main__":
    main()
