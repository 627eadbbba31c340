"""KernelBench level 1 on volup: its 3D transposed convolutions. Set `PROBLEM` to the one wanted."""

from typing import Any

import torch
from torch import Tensor, nn

import volup.nn

PROBLEM = 58

# The input's shape, the arguments of the layer, and the names of those after the kernel's size,
# whose order differs between the problems.
GENERAL = ("stride", "padding", "output_padding", "groups", "bias")
DILATED = ("stride", "padding", "output_padding", "dilation", "groups", "bias")
PROBLEMS: dict[int, tuple[tuple[int, ...], tuple, tuple[str, ...]]] = {
    58: ((16, 32, 16, 32, 64), (32, 16, (3, 5, 7)), GENERAL),
    61: ((8, 48, 64, 64, 64), (48, 48, 3), GENERAL),
    68: ((16, 32, 64, 64, 64), (32, 64, (3, 5, 5)), GENERAL),
    70: ((8, 48, 96, 96, 96), (48, 24, 3), DILATED),
    72: ((8, 32, 12, 24, 48), (32, 32, (3, 5, 7), (2,) * 3, (1, 2, 3), (1,) * 3, 4), GENERAL),
    # The reference ignores its output_padding, which is where its 4 ends up: it has one group.
    73: ((4, 32, 32, 64, 128), (32, 32, 3, 2, 1, 4), ("stride", "padding", "", "groups", "bias")),
    77: ((16, 32, 16, 32, 32), (32, 64, 3, 2, 1, 2), ("stride", "padding", "dilation", "bias")),
}
INPUT, INIT, ARGUMENTS = PROBLEMS[PROBLEM]


class ModelNew(nn.Module):
    """Takes the reference's arguments and has its parameters under its names."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: Any, *args: Any, **options: Any
    ) -> None:
        super().__init__()
        options = {"bias": False, **dict(zip(ARGUMENTS, args, strict=False)), **options}
        options.pop("", None)
        self.conv_transpose3d = volup.nn.ConvTranspose3d(
            in_channels, out_channels, kernel_size, **options
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.conv_transpose3d(x)


def get_inputs() -> list[Tensor]:
    """The benchmark's input."""
    return [torch.rand(INPUT)]


def get_init_inputs() -> list:
    """The arguments of `ModelNew`."""
    return list(INIT)
