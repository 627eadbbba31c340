"""The ways in which PyTorch can compute a block, as an expert would try them.

Weights are brought into the form that a way wants beforehand, and so is the input's memory format:
only the computation counts.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from blocks import Block

FORMATS = {"ncdhw": torch.contiguous_format, "ndhwc": torch.channels_last_3d}


@dataclass(frozen=True)
class Peer:
    """One way: its name, the layout it wants its input in, and how it computes."""

    name: str
    layout: str
    compute: Callable[[Tensor], Tensor]


def peers(block: Block) -> Iterator[Peer]:
    """All ways that fit, with what follows the convolution done by PyTorch's own operators."""
    for layout in FORMATS:
        yield _with_tail(block, transposed(block, layout))
    if is_plain_correlation(block):
        for layout in FORMATS:
            yield _with_tail(block, flipped(block, layout))
    if is_matrix_product(block):
        yield _with_tail(block, matmul_ncdhw(block))
        yield _with_tail(block, matmul_ndhwc(block))


def compiled(block: Block) -> Iterator[Peer]:
    """PyTorch's operators as `torch.compile` fuses them; compiled at the first call."""
    for layout in FORMATS:
        peer = _with_tail(block, transposed(block, layout))
        yield Peer(f"compiled {peer.name}", layout, torch.compile(peer.compute, dynamic=False))


def _with_tail(block: Block, peer: Peer) -> Peer:
    if block.op == "conv":
        return peer

    def compute(x: Tensor) -> Tensor:
        return block.finish(peer.compute(x), block.gamma, block.beta, inplace=True)

    return Peer(peer.name, peer.layout, compute)


def transposed(block: Block, layout: str) -> Peer:
    """The operator itself."""
    weight = block.weight.detach().contiguous(memory_format=FORMATS[layout])

    def compute(x: Tensor) -> Tensor:
        return functional.conv_transpose3d(x, weight, block.bias, **block.sizes)

    return Peer(f"conv_transpose3d {layout}", layout, compute)


def is_plain_correlation(block: Block) -> bool:
    """Whether a convolution with the flipped kernel does the same."""
    sizes = block.sizes
    return (
        all(s == 1 for s in sizes["stride"])
        and all(op == 0 for op in sizes["output_padding"])
        and all(p >= 0 for p in _flipped_padding(block))
    )


def _flipped_padding(block: Block) -> list[int]:
    dilation, padding = block.sizes["dilation"], block.sizes["padding"]
    return [dilation[a] * (block.kernel[a] - 1) - padding[a] for a in range(3)]


def flipped(block: Block, layout: str) -> Peer:
    """For stride 1: the forward convolution, for which cuDNN has more kernels."""
    groups, dilation = block.sizes["groups"], block.sizes["dilation"]
    inputs, outputs = block.weight.shape[0] // groups, block.weight.shape[1]
    weight = block.weight.detach().view(groups, inputs, outputs, *block.kernel).transpose(1, 2)
    weight = weight.reshape(groups * outputs, inputs, *block.kernel).flip(2, 3, 4)
    weight = weight.contiguous(memory_format=FORMATS[layout])
    padding = _flipped_padding(block)

    def compute(x: Tensor) -> Tensor:
        return functional.conv3d(x, weight, block.bias, 1, padding, dilation, groups)

    return Peer(f"conv3d {layout}", layout, compute)


def is_matrix_product(block: Block) -> bool:
    """Whether each output voxel is one input voxel times a matrix."""
    sizes = block.sizes
    return (
        tuple(sizes["stride"]) == block.kernel
        and sizes["groups"] == 1
        and all(size == 0 for size in (*sizes["padding"], *sizes["output_padding"]))
        and all(d == 1 for d in sizes["dilation"])
    )


def matmul_ncdhw(block: Block) -> Peer:
    """For a kernel as large as the stride: a matrix product, then a shuffle."""
    inputs, outputs = block.weight.shape[:2]
    weight = block.weight.detach().reshape(inputs, -1).t().contiguous()
    bias = None
    if block.bias is not None:
        bias = block.bias.repeat_interleave(math.prod(block.kernel))[:, None]
    kd, kh, kw = block.kernel

    def compute(x: Tensor) -> Tensor:
        n, _, d, h, w = x.shape
        x, many = x.flatten(2), weight.expand(n, -1, -1)
        y = torch.bmm(many, x) if bias is None else torch.baddbmm(bias, many, x)
        y = y.view(n, outputs, kd, kh, kw, d, h, w).permute(0, 1, 5, 2, 6, 3, 7, 4)
        return y.reshape(n, outputs, d * kd, h * kh, w * kw)

    return Peer("matmul ncdhw", "ncdhw", compute)


def matmul_ndhwc(block: Block) -> Peer:
    """The same on volumes whose channels are fastest."""
    inputs, outputs = block.weight.shape[:2]
    weight = block.weight.detach().permute(0, 2, 3, 4, 1).reshape(inputs, -1).contiguous()
    bias = None if block.bias is None else block.bias.repeat(math.prod(block.kernel))
    kd, kh, kw = block.kernel

    def compute(x: Tensor) -> Tensor:
        n, _, d, h, w = x.shape
        x = x.permute(0, 2, 3, 4, 1).reshape(-1, inputs)
        y = torch.mm(x, weight) if bias is None else torch.addmm(bias, x, weight)
        y = y.view(n, d, h, w, kd, kh, kw, outputs).permute(0, 1, 4, 2, 5, 3, 6, 7)
        return y.reshape(n, d * kd, h * kh, w * kw, outputs).permute(0, 4, 1, 2, 3)

    return Peer("matmul ndhwc", "ndhwc", compute)
