"""The operators that PyTorch knows: its dispatcher, autograd, autocast and compiler.

Every operator takes batched volumes. ``conv_transpose3d`` and the gradients of its two factors are
closed under differentiation: the gradient of each is made of the others. A block's gradient is one
fused operator; the gradient of that is composed of the convolution's operators and PyTorch's.

Kernels are in ``_cpu`` and ``_cuda_operators``, gradients in ``_autograd``. ``precision`` is what
float32 is multiplied in on a GPU; None follows PyTorch's flags, those of the moment in the backward
pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from volup import _autograd, _cpu, _cuda_operators, _memory
from volup._calls import KERNELS, Call
from volup._cpu import NO_STEPS, Conv, Steps

_CONV = (
    "SymInt[3] stride, SymInt[3] padding, SymInt[3] output_padding, SymInt groups,"
    " SymInt[3] dilation"
)
_STEPS = (
    "str? activation, float slope, int? norm_groups, float eps, str? post_activation,"
    " float post_slope"
)
_PARAMETERS = "Tensor input, Tensor weight, Tensor? bias, Tensor? norm_weight, Tensor? norm_bias"
_BLOCK = f"{_PARAMETERS}, {_CONV}, {_STEPS}, str? precision, bool channels_last"

_library: Any = torch.library.Library("volup", "DEF")  # type: ignore[no-untyped-call]
for _schema in (
    f"conv_transpose3d(Tensor input, Tensor weight, Tensor? bias, {_CONV}, str? precision,"
    " bool channels_last) -> Tensor",
    f"conv_transpose3d_input_grad(Tensor grad_output, Tensor weight, {_CONV}, str? precision,"
    " bool channels_last) -> Tensor",
    "conv_transpose3d_weight_grad(Tensor input, Tensor grad_output, SymInt[3] kernel_size,"
    f" {_CONV}, str? precision) -> Tensor",
    f"conv_transpose3d_block({_BLOCK}) -> Tensor",
    # The output and what is saved: the convolution's output, means, 1/deviations.
    f"conv_transpose3d_block_training({_BLOCK}) -> (Tensor, Tensor, Tensor, Tensor)",
    # An empty tensor stands for a gradient that is not wanted.
    f"conv_transpose3d_block_grad(Tensor grad_output, {_PARAMETERS}, Tensor convolution,"
    f" Tensor mean, Tensor rstd, {_CONV}, {_STEPS}, str? precision, bool[5] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    # The same where nothing was saved.
    f"conv_transpose3d_block_recomputed_grad(Tensor grad_output, {_BLOCK}, bool[5] wanted)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
):
    _library.define(_schema)
OPERATORS = torch.ops.volup


# --- Kernels --------------------------------------------------------------------------------------


def _kernel(name: str, count: int) -> Callable[..., Any]:
    """An operator on plain tensors, as PyTorch's dispatcher calls it."""

    def kernel(*arguments: Any) -> Any:
        tensors, rest = arguments[:count], arguments[count:]
        plan = Call.of(name, rest).plan(tensors)
        if plan is None:
            # Of a class that turns the dispatcher off. What is so seldom is not kept.
            tensors = tuple(None if t is None else t.resolve_neg() for t in tensors)
            plan = KERNELS[tensors[0].is_cuda][name].plan(tensors, rest)
        return _autograd.whole(plan.run(tensors), tensors)

    return kernel


KERNELS[False].update(_cpu.KERNELS)
KERNELS[True].update(_cuda_operators.KERNELS)
for _name, _function in _autograd.FUNCTIONS.items():
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, _kernel(_name, _function.count), _device)


# --- Tensors without memory -----------------------------------------------------------------------


def _output_size(input: Tensor, weight: Tensor, conv: Conv) -> list[int]:
    values = (*input.shape, *weight.shape)
    if all(type(value) is int for value in values):
        # Refuses what the kernels refuse.
        block = _cpu.native_block(weight.shape, conv, NO_STEPS, False, False)
        return block.output_shape(input.shape)
    size = [input.shape[0], weight.shape[1] * conv.groups]
    for axis in range(3):
        reach = conv.dilation[axis] * (weight.shape[2 + axis] - 1) + conv.output_padding[axis]
        inside = (input.shape[2 + axis] - 1) * conv.stride[axis]
        size.append(inside - 2 * conv.padding[axis] + reach + 1)
    return size


def _empty(like: Tensor, size: Sequence[int], channels_last: bool) -> Tensor:
    return torch.empty(
        size, dtype=like.dtype, device=like.device, memory_format=_cpu.format_of(channels_last)
    )


def _fake_conv(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    return _empty(input, _output_size(input, weight, Conv(*rest[:5])), rest[6])


def _fake_input_grad(grad_output: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _empty(weight, _cpu.input_size(grad_output, weight, Conv(*rest[:5])), rest[6])


def _fake_weight_grad(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> Tensor:
    shape = (input.shape[1], grad_output.shape[1] // Conv(*rest[:5]).groups, *kernel_size)
    return _empty(input, shape, False)


def _fake_block(input: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    return _empty(input, _output_size(input, weight, Conv(*rest[3:8])), rest[15])


def _fake_block_training(input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    norm_groups = Steps(*rest[9:15]).norm_groups
    size = (input.shape[0], norm_groups) if norm_groups else (0,)
    mean, rstd = (input.new_empty(size, dtype=_cpu.accumulator(input.dtype)) for _ in range(2))
    return _fake_block(input, *rest), _fake_block(input, *rest), mean, rstd


def _fake_block_grad(grad_output: Tensor, input: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    wanted = rest[-1]
    of_input = _empty(input, input.shape, _memory.is_channels_last(input))
    others = [None if like is None else _empty(like, like.shape, False) for like in rest[:4]]
    return tuple(
        gradient if gradient is not None and wants else input.new_empty(0)
        for gradient, wants in zip((of_input, *others), wanted, strict=True)
    )


for _name, _fake in (
    ("conv_transpose3d", _fake_conv),
    ("conv_transpose3d_input_grad", _fake_input_grad),
    ("conv_transpose3d_weight_grad", _fake_weight_grad),
    ("conv_transpose3d_block", _fake_block),
    ("conv_transpose3d_block_training", _fake_block_training),
    ("conv_transpose3d_block_grad", _fake_block_grad),
    ("conv_transpose3d_block_recomputed_grad", _fake_block_grad),
):
    torch.library.register_fake(f"volup::{_name}", _fake, lib=_library)


# --- Autograd -------------------------------------------------------------------------------------

for _name in _autograd.FUNCTIONS:
    _library.impl(_name, partial(_autograd.from_dispatcher, _name), "Autograd")


# --- Autocast -------------------------------------------------------------------------------------


def _autocast(name: str, device: str) -> None:
    """Casts the tensors of a forward operator as PyTorch casts those of a convolution."""
    operator = getattr(OPERATORS, name)
    key = getattr(torch._C.DispatchKey, f"Autocast{device}")
    keys = torch._C.DispatchKeySet(key)

    def kernel(*arguments: Any) -> Any:
        to = torch.get_autocast_dtype(device.lower())
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operator(
                *(_memory.autocast(a, to) if isinstance(a, Tensor) else a for a in arguments)
            )

    _library.impl(name, kernel, f"Autocast{device}")


for _name in ("conv_transpose3d", "conv_transpose3d_block", "conv_transpose3d_block_training"):
    for _device in ("CPU", "CUDA"):
        _autocast(_name, _device)
