"""KernelBench level 2, problem 61, on volup: ConvTranspose3d, ReLU and GroupNorm as one block."""

import torch
from torch import Tensor, nn

import volup

INPUT = (16, 64, 32, 32, 32)
# in_channels, out_channels, kernel_size, groups of the norm, bias of the convolution
INIT = (64, 128, 3, 8, False)


class ModelNew(nn.Module):
    """Takes the reference's arguments and has its parameters, in its order and under its names."""

    def __init__(
        self, in_channels: int, out_channels: int, kernel_size: int, groups: int, bias: bool = False
    ) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.group_norm = nn.GroupNorm(groups, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        conv, norm = self.conv_transpose, self.group_norm
        return volup.conv_transpose3d_block(
            x,
            conv.weight,
            conv.bias,
            activation="relu",
            norm_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            eps=norm.eps,
        )


def get_inputs() -> list[Tensor]:
    """The benchmark's input."""
    return [torch.rand(INPUT)]


def get_init_inputs() -> list:
    """The arguments of `ModelNew`."""
    return list(INIT)
