"""Published shapes with random tensors, which PyTorch and volup both can compute."""

import math
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

import volup

ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}


class Block:
    """A case of `volup._native` with random parameters and a random input.

    The input is normal, and so are the weights, scaled so that outputs are of the order of 1.
    """

    def __init__(
        self,
        case: dict[str, Any],
        batch: int | None = None,
        dtype: torch.dtype = torch.float32,
        device: str = "cpu",
    ) -> None:
        block = case["block"]
        options: dict[str, Any] = {"dtype": dtype, "device": device}
        self.name: str = case["name"]
        self.sizes: dict[str, Any] = {
            name: block[name]
            for name in ("stride", "padding", "output_padding", "groups", "dilation")
        }
        self.kernel: tuple[int, int, int] = tuple(block["kernel_size"])
        channels = block["out_channels"]
        weight = torch.randn(
            block["in_channels"], channels // block["groups"], *self.kernel, **options
        )
        taps = math.prod(-(-k // s) for k, s in zip(self.kernel, block["stride"], strict=True))
        weight /= (block["in_channels"] // block["groups"] * taps) ** 0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.randn(channels, **options) if block["bias"] else None
        self.activation, self.post = block["activation"], block["post_activation"]
        self.norm_groups, self.eps = block["norm_groups"], block["eps"]
        self.gamma = torch.rand(channels, **options) + 0.5 if self.norm_groups else None
        self.beta = torch.randn(channels, **options) if self.norm_groups else None
        batch = case["batch"] if batch is None else batch
        self.input = torch.randn(batch, block["in_channels"], *case["input"], **options)

    @property
    def op(self) -> str:
        return "block" if self.activation or self.norm_groups or self.post else "conv"

    @property
    def output_shape(self) -> list[int]:
        sizes = self.sizes
        space = [
            (self.input.shape[2 + a] - 1) * sizes["stride"][a]
            - 2 * sizes["padding"][a]
            + sizes["dilation"][a] * (self.kernel[a] - 1)
            + sizes["output_padding"][a]
            + 1
            for a in range(3)
        ]
        return [self.input.shape[0], self.weight.shape[1] * sizes["groups"], *space]

    def run_torch(self, input: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """PyTorch's result, in the parameters' type or in another."""

        def cast(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        dtype = dtype or self.weight.dtype
        y = functional.conv_transpose3d(
            input.to(dtype), self.weight.to(dtype), cast(self.bias), **self.sizes
        )
        return self.finish(y, cast(self.gamma), cast(self.beta))

    def finish(
        self, y: Tensor, gamma: Tensor | None, beta: Tensor | None, inplace: bool = False
    ) -> Tensor:
        """What follows the convolution, by PyTorch's operators."""
        if self.activation:
            y = ACTIVATIONS[self.activation](y, inplace=inplace)
        if self.norm_groups:
            y = functional.group_norm(y, self.norm_groups, gamma, beta, self.eps)
        return ACTIVATIONS[self.post](y, inplace=inplace) if self.post else y

    def run_volup(
        self,
        input: Tensor,
        precision: str | None = None,
        memory: str | None = None,
        weight: Tensor | None = None,
    ) -> Tensor:
        weight = self.weight if weight is None else weight
        if self.op == "conv":
            return volup.conv_transpose3d(
                input, weight, self.bias, **self.sizes, precision=precision
            )
        return volup.conv_transpose3d_block(
            input,
            weight,
            self.bias,
            **self.sizes,
            activation=self.activation,
            norm_groups=self.norm_groups,
            norm_weight=self.gamma,
            norm_bias=self.beta,
            eps=self.eps,
            post_activation=self.post,
            precision=precision,
            memory=memory,
        )

    def train(self) -> list[Tensor]:
        """Makes input and parameters require grad, and returns them."""
        given = (self.input, self.weight, self.bias, self.gamma, self.beta)
        return [tensor.requires_grad_() for tensor in given if tensor is not None]

    def flops(self) -> float:
        """Additions and multiplications that reach the output."""
        together = float(self.weight[..., 0, 0, 0].numel() * self.input.shape[0])
        for a in range(3):
            together *= pairs(
                self.input.shape[2 + a],
                self.output_shape[2 + a],
                self.kernel[a],
                self.sizes["stride"][a],
                self.sizes["padding"][a],
                self.sizes["dilation"][a],
            )
        return 2 * together

    def bytes(self) -> int:
        """Input, parameters and output, once each."""
        elements = self.input.numel() + self.weight.numel() + torch.Size(self.output_shape).numel()
        for tensor in (self.bias, self.gamma, self.beta):
            elements += 0 if tensor is None else tensor.numel()
        return elements * self.input.element_size()


def pairs(input: int, output: int, kernel: int, stride: int, padding: int, dilation: int) -> int:
    """How many pairs of an input voxel and a tap land in the output, along one axis."""
    return sum(
        0 <= i * stride - padding + t * dilation < output
        for i in range(input)
        for t in range(kernel)
    )


def commit() -> str:
    """The commit of this checkout, or the one that a bundle was made of."""
    root = Path(__file__).parents[1]
    if (root / "commit").exists():
        return (root / "commit").read_text().strip()
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()
