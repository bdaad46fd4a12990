"""Model and data of the study: a small ResNet18, and pictures that are drawn.

Legend: B batch, C channels, H height, W width.
"""

import torch
from torch import Tensor, nn
from typing_extensions import override

NUM_KINDS, SIZE = 20, 16
_WIDTHS = (8, 16, 32, 64)
"""Of the four stages. ResNet18 has 64 to 512."""
_NOISE = 1.2


def pictures(num_pictures: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw pictures: a smooth pattern for each kind, moved, with noise.

    Args:
        num_pictures: How many.
        seed: Draws kinds, places and noise. The patterns are always the same.

    Returns:
        Pictures (B, 3, H, W), and their kinds (B,).
    """
    coarse = torch.randn(NUM_KINDS, 3, 4, 4, generator=torch.Generator().manual_seed(1))
    patterns = nn.functional.interpolate(coarse, size=SIZE, mode="bilinear", align_corners=False)
    draws = torch.Generator().manual_seed(seed)
    kinds = torch.randint(NUM_KINDS, (num_pictures,), generator=draws)
    moves = torch.randint(SIZE, (num_pictures, 2, 1), generator=draws)
    places = (torch.arange(SIZE) + moves) % SIZE  # (B, 2, SIZE)
    numbers = torch.arange(num_pictures)[:, None, None]
    moved = patterns[kinds].permute(0, 2, 3, 1)[
        numbers, places[:, 0, :, None], places[:, 1, None, :]
    ]
    noise = torch.randn(num_pictures, 3, SIZE, SIZE, generator=draws)
    return moved.permute(0, 3, 1, 2) + _NOISE * noise, kinds


class _Block(nn.Module):
    """Two convolutions, and a way past them.

    Source: K. He et al., *Deep Residual Learning for Image Recognition*, 2015, figure 5, left.
    """

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(after)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(after)
        self.past: nn.Module = nn.Identity()
        if stride != 1:
            self.past = nn.Sequential(
                nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after)
            )

    @override
    def forward(self, inputs_BCHW: Tensor) -> Tensor:
        inner = self.first_norm(self.first(inputs_BCHW)).relu()
        both: Tensor = self.second_norm(self.second(inner)) + self.past(inputs_BCHW)
        return both.relu()


def make_model(seed: int = 0) -> nn.Module:
    """Make the model, with the same parameters for the same seed."""
    torch.manual_seed(seed)
    width = _WIDTHS[0]
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 3, padding=1, bias=False),
        nn.BatchNorm2d(width),
        nn.ReLU(),
    ]
    for stage, after in enumerate(_WIDTHS):
        layers += [_Block(width, after, 1 if stage == 0 else 2), _Block(after, after, 1)]
        width = after
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, NUM_KINDS)]
    return nn.Sequential(*layers)
