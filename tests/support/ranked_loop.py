"""One rank of a host with two, in a process of its own.

    python -m tests.support.ranked_loop RANK FOLDER

It trains anew in each mode. It saves its parameters, and says what happened. The fake node of rank
0 gives averages of its own.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed
from safetensors.torch import save_file
from torch import nn

from decod.errors import DecodError
from tests.support.fake_node import FakeNode, Fields, alone
from tests.support.loops import (
    BATCH,
    adamw,
    backward,
    batches,
    collaborate,
    falling,
    flat,
    make_model,
    values,
)

NUM_STEPS = 6


def averaging(node: FakeNode, message: Fields) -> None:
    """Each second step ends a round, whose average is 0.01 everywhere."""
    if message["kind"] != "step":
        return
    if message["step"] % 2 == 0:
        size = node.hello["num_elements"]
        ones = torch.full((size,), 0.01, dtype=node.wide)
        node.average(message["step"] // 2, ones, included=False)
    node.go(message)


def dying(node: FakeNode, message: Fields) -> None:
    node.end()


POLICIES = {
    "alone": alone(BATCH),
    "average": averaging,
    "local": averaging,
    "local-alone": alone(BATCH),
    "dead": dying,
}


def load_into(path: Path) -> Any:
    """A policy: the first answer is a state."""

    def answer(node: FakeNode, message: Fields) -> None:
        if message["kind"] == "step":
            if message["step"] == 1:
                state = json.loads((path / "state.json").read_text(encoding="utf-8"))
                node.send("load_state", request=1, **state)
            node.go(message)

    return answer


def train(rank: int, folder: Path, mode: str) -> None:
    """Train in one mode."""
    model = make_model()
    ranked = nn.parallel.DistributedDataParallel(model)
    node = FakeNode(load_into(folder) if mode == "load" else POLICIES[mode])
    said: dict[str, Any] = {}
    is_local = mode.startswith("local")
    wrapped = adamw(model.parameters())
    optimizer = collaborate(node, wrapped, scheduler=falling, use_local_updates=is_local)
    try:
        optimizer.load_state_dict(optimizer.state_dict())
        for inputs, targets in batches(NUM_STEPS):
            half = slice(rank * BATCH // 2, (rank + 1) * BATCH // 2)
            optimizer.zero_grad()
            backward(ranked, (inputs[half], targets[half]))
            optimizer.step()
        said["round"] = optimizer.round
        said["lr"] = optimizer.param_groups[0]["lr"]
    except DecodError as error:
        said["error"] = error.code
    save_file({"values": flat(values(model))}, folder / f"{mode}-{rank}.safetensors")
    (folder / f"{mode}-{rank}.json").write_text(json.dumps(said), encoding="utf-8")
    optimizer.close()


def main(rank: int, folder: Path) -> None:
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2
    )
    for mode in (*POLICIES, "load"):
        train(rank, folder, mode)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
    # All is written. Threads of torch may still run, and would abort a process that ends in order.
    os._exit(0)
