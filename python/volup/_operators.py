"""The operators that PyTorch knows: its dispatcher, autograd, autocast and compiler.

Every operator takes batched volumes. ``conv_transpose3d`` and the gradients of its two factors are
closed under differentiation: the gradient of each is made of the others. A block's gradient is one
fused operator; the gradient of that is composed of the convolution's operators and PyTorch's.

Kernels are in ``_cpu`` and ``_cuda_operators``. ``precision`` is what float32 is multiplied in on a
GPU; None follows PyTorch's flags, those of the moment in the backward pass too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from volup import _cpu, _cuda, _cuda_operators, _memory
from volup._compose import follow
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


def _bare(kernel: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A block's kernel as that of the convolution alone."""

    def conv_transpose3d(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
        *conv, precision, channels_last = rest
        return kernel(input, weight, bias, None, None, *conv, *NO_STEPS, precision, channels_last)

    return conv_transpose3d


for _name, _function in (
    ("conv_transpose3d", _bare(_cpu.block)),
    ("conv_transpose3d_input_grad", _cpu.input_grad),
    ("conv_transpose3d_weight_grad", _cpu.weight_grad),
    ("conv_transpose3d_block", _cpu.block),
    ("conv_transpose3d_block_training", _cpu.block_training),
    ("conv_transpose3d_block_grad", _cpu.block_grad),
    ("conv_transpose3d_block_recomputed_grad", _cpu.block_recomputed_grad),
):
    _library.impl(_name, _function, "CPU")
for _name, _function in _cuda_operators.KERNELS.items():
    _library.impl(_name, _function, "CUDA")


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


def _save_factors(ctx: Any, first: Tensor, second: Tensor, rest: Sequence[Any]) -> None:
    """Keeps each of two factors if the gradient of the other is needed, and conv and precision."""
    needed = ctx.needs_input_grad
    ctx.save_for_backward(first if needed[1] else None, second if needed[0] else None)
    ctx.channels_last = [_memory.is_channels_last(first), _memory.is_channels_last(second)]
    ctx.kernel_size = second.shape[2:]
    ctx.rest = tuple(rest)


def _save_conv(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_factors(ctx, inputs[0], inputs[1], inputs[3:9])


def _save_input_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_factors(ctx, inputs[0], inputs[1], inputs[2:8])


def _save_weight_grad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save_factors(ctx, inputs[0], inputs[1], inputs[3:9])


def _conv_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, weight = ctx.saved_tensors
    of_input = of_weight = of_bias = None
    if ctx.needs_input_grad[0]:
        of_input = input_grad(grad, weight, *ctx.rest, ctx.channels_last[0])
    if ctx.needs_input_grad[1]:
        of_weight = weight_grad(input, grad, ctx.kernel_size, *ctx.rest)
    if ctx.needs_input_grad[2]:
        of_bias = grad.sum((0, 2, 3, 4))
    return of_input, of_weight, of_bias, *[None] * 7


def _input_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_output, weight = ctx.saved_tensors
    of_output = of_weight = None
    if ctx.needs_input_grad[0]:
        of_output = conv_transpose3d(grad, weight, None, *ctx.rest, ctx.channels_last[0])
    if ctx.needs_input_grad[1]:
        of_weight = weight_grad(grad, grad_output, ctx.kernel_size, *ctx.rest)
    return of_output, of_weight, *[None] * 7


def _weight_grad_backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, grad_output = ctx.saved_tensors
    of_input = of_output = None
    if ctx.needs_input_grad[0]:
        of_input = input_grad(grad_output, grad, *ctx.rest, ctx.channels_last[0])
    if ctx.needs_input_grad[1]:
        of_output = conv_transpose3d(input, grad, None, *ctx.rest, ctx.channels_last[1])
    return of_input, of_output, *[None] * 7


def _save_block(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """Keeps the five tensors, and of the training operator what it has saved."""
    kept: tuple[Any, ...] = ()
    if isinstance(output, tuple):
        kept = output[1:]
        ctx.mark_non_differentiable(*kept)
        ctx.set_materialize_grads(False)
    ctx.save_for_backward(*inputs[:5], *kept)
    ctx.rest = inputs[5:]


def _block_backward(ctx: Any, grad: Tensor | None, *_: Any) -> tuple[Tensor | None, ...]:
    tensors, kept = ctx.saved_tensors[:5], ctx.saved_tensors[5:]
    unneeded = [None] * len(ctx.rest)
    if grad is None:
        return *[None] * 5, *unneeded
    wanted = [bool(needed) for needed in ctx.needs_input_grad[:5]]
    if kept:
        gradients = block_grad(grad, *tensors, *kept, *ctx.rest[:12], wanted)
    else:
        gradients = block_recomputed_grad(grad, *tensors, *ctx.rest, wanted)
    return *_those(gradients, wanted), *unneeded


def _those(gradients: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True)]


def _save_block_grad(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.save_for_backward(*inputs[:6])
    # Of what was saved nothing is needed.
    ctx.rest = tuple(argument for argument in inputs[6:] if not isinstance(argument, Tensor))
    ctx.unneeded = [None] * len(inputs[6:])
    ctx.set_materialize_grads(False)


def _block_grad_backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """The gradient of a block's gradient: that of a composition, differentiated twice."""
    recorded = torch.is_grad_enabled()
    # Through tensors of its own: what one depends on by its history is no part of this gradient.
    with torch.enable_grad():
        given: list[Any] = [
            None if t is None else t.view_as(t) if t.requires_grad else t.detach().requires_grad_()
            for t in ctx.saved_tensors
        ]
        output = _composed(given[1:], ctx.rest[:5], Steps(*ctx.rest[5:11]), ctx.rest[11])
        wanted = [
            (tensor, grad)
            for tensor, grad in zip(given[1:], grads, strict=True)
            if tensor is not None and grad is not None and grad.shape == tensor.shape
        ]
        needed = [
            tensor for tensor, needs in zip(given, ctx.needs_input_grad[:6], strict=True) if needs
        ]
        results: list[Tensor | None] = [None] * len(needed)
        if wanted and needed:
            tensors, seeds = zip(*wanted, strict=True)
            first = torch.autograd.grad(output, tensors, given[0], create_graph=True)
            second = torch.autograd.grad(
                first, needed, seeds, create_graph=recorded, allow_unused=True
            )
            results = list(second)
    found = iter(results)
    of_tensors = [next(found) if needs else None for needs in ctx.needs_input_grad[:6]]
    return *of_tensors, *ctx.unneeded


def _composed(tensors: list[Any], conv: Any, steps: Steps, precision: str | None) -> Tensor:
    """A block by operators that can be differentiated any number of times."""
    input, weight, bias, norm_weight, norm_bias = tensors
    channels_last = _memory.is_channels_last(input)
    with torch.autocast(input.device.type, enabled=False):
        y = conv_transpose3d(input, weight, bias, *conv, precision, channels_last)
        return follow(y, norm_weight, norm_bias, *steps.arguments())


def _below_autograd(name: str) -> Callable[..., Any]:
    """An operator as a function that records nothing.

    A GPU is done with a small volume before the dispatcher has passed a block's arguments on, so
    its kernel is called as it is where that would do no more.
    """
    operator = getattr(OPERATORS, name).default
    below = torch._C._AutoDispatchBelowAutograd
    on_cuda = _cuda_operators.KERNELS[name]

    def compute(*arguments: Any) -> Any:
        output = on_cuda.directly(*arguments)
        if output is None:
            with below():
                output = operator(*arguments)
        return output

    return compute


def _as_function(name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """An operator by the kernel that the dispatcher comes to first, if nobody watches."""
    operator = getattr(OPERATORS, name).default

    def function(*arguments: Any) -> Any:
        if torch.compiler.is_compiling() or _cuda.is_watched():
            return operator(*arguments)
        return kernel(*arguments)

    return function


def _differentiable(
    name: str,
    setup: Callable[[Any, tuple[Any, ...], Any], None],
    gradient: Callable[..., tuple[Tensor | None, ...]],
) -> Callable[..., Any]:
    """Gives an operator its gradient, and returns the operator as a function.

    As ``torch.library.register_autograd`` does, in half of its time: a call of a small volume takes
    no longer than that.
    """
    compute = _below_autograd(name)
    count = _cuda_operators.KERNELS[name].count

    class Recorded(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            output = compute(*arguments)
            setup(ctx, arguments, output)
            return output

        backward = staticmethod(gradient)

    Recorded.__name__ = Recorded.__qualname__ = name

    def kernel(*arguments: Any) -> Any:
        if torch.is_grad_enabled():
            for tensor in arguments[:count]:
                if tensor is not None and tensor.requires_grad:
                    return Recorded.apply(*arguments)
        return compute(*arguments)

    _library.impl(name, kernel, "Autograd")
    return _as_function(name, kernel)


conv_transpose3d = _differentiable("conv_transpose3d", _save_conv, _conv_backward)
input_grad = _differentiable("conv_transpose3d_input_grad", _save_input_grad, _input_grad_backward)
weight_grad = _differentiable(
    "conv_transpose3d_weight_grad", _save_weight_grad, _weight_grad_backward
)
block = _differentiable("conv_transpose3d_block", _save_block, _block_backward)
block_training = _differentiable("conv_transpose3d_block_training", _save_block, _block_backward)
block_grad = _differentiable("conv_transpose3d_block_grad", _save_block_grad, _block_grad_backward)
block_recomputed_grad = _differentiable(
    "conv_transpose3d_block_recomputed_grad", _save_block_grad, _block_grad_backward
)


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
