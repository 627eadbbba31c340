"""Functions in the manner of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from volup import _autograd, _calls, _cpu, _cuda, _memory, _native, _operators
from volup._compose import Activation, compose

Sizes = int | Sequence[int]


def conv_transpose3d(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    precision: str | None = None,
) -> Tensor:
    """Applies a 3D transposed convolution, as ``torch.nn.functional.conv_transpose3d`` does.

    Along each axis the output has ``(I-1)*stride - 2*padding + dilation*(k-1) + output_padding
    + 1`` voxels. Sums are kept in float32 (in float64 for float64) and rounded once.

    All tensors are on one device, the CPU or a CUDA GPU, and of one type: float32, float64, float16
    or bfloat16. Under ``torch.autocast`` they are cast as PyTorch casts them. The output has the
    memory format that PyTorch's would have. There are gradients of any order. ``torch.compile``
    traces the call without a break.

    On a GPU the call returns once its kernels are queued on the current stream; after a first call
    like it, it may be captured in a CUDA graph, with its backward pass. Where volup has no kernels
    for the GPU or its driver, PyTorch's operators compute, with gradients, and a ``RuntimeWarning``
    says why once.

    Args:
        input: [N, Cin, D, H, W], or [Cin, D, H, W] without a batch. Contiguous and channels_last_3d
            tensors are read in place, others are copied first.
        weight: [Cin, Cout/groups, kD, kH, kW]. What a ``torch.nn.Parameter`` is packed into for the
            CPU's kernels is kept, with a copy of its values, as long as it lives, and used again if
            the values are still the same.
        bias: [Cout].
        stride: One integer, or one each for depth, height and width.
        padding: Voxels cut off each side of the full output.
        output_padding: Voxels added at the far side; smaller than the stride or the dilation.
        groups: Independent convolutions side by side in the channels.
        dilation: Distance between the kernel's taps.
        precision: How exact products of float32 are on a GPU: "ieee" as exact as float32, "tf32"
            with factors rounded to 11 significant bits, None as PyTorch's flags let cuDNN convolve
            (``torch.backends.cudnn.conv.fp32_precision``, or ``torch.backends.cudnn.allow_tf32``).
            Gradients are computed as exactly, with None as the flags are by then. The CPU always
            computes in full precision.

    Returns:
        [N, Cout, D, H, W], or [Cout, D, H, W] without a batch; never a view of the input.

    Raises:
        TypeError: An argument is of a wrong Python type; a bool is no int.
        ValueError: ``precision`` is no known name.
        RuntimeError: Shapes, types, devices or parameters do not fit.
    """
    tensors = (input, weight, bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose3d,
            tensors,
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            precision=precision,
        )
    sizes = (stride, padding, output_padding, groups, dilation)
    return _forward(
        (input, weight, bias, None, None), (*sizes, None, None, 1e-5, None, precision, None)
    )


def conv_transpose3d_block(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Sizes = 1,
    padding: Sizes = 0,
    output_padding: Sizes = 0,
    groups: int = 1,
    dilation: Sizes = 1,
    *,
    activation: Activation = None,
    norm_groups: int | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    post_activation: Activation = None,
    precision: str | None = None,
    memory: str | None = None,
) -> Tensor:
    """Applies ``post_activation(group_norm(activation(conv_transpose3d(input))))`` in one go.

    Each step after the convolution is optional. Mean and biased variance are taken per sample and
    group, over the group's channels and all voxels, in float32 (in float64 for float64).

    Args:
        input: As for :func:`conv_transpose3d`, and so on up to ``dilation``. Without a batch, the
            volume is normalized like a batch of one.
        weight: [Cin, Cout/groups, kD, kH, kW].
        bias: [Cout].
        stride: One integer, or one each for depth, height and width.
        padding: Voxels cut off each side of the full output.
        output_padding: Voxels added at the far side.
        groups: Independent convolutions side by side in the channels.
        dilation: Distance between the kernel's taps.
        activation: "relu", "leaky_relu" or ("leaky_relu", slope), "silu", "gelu", "gelu_tanh",
            "hardswish", "sigmoid", "tanh", or None.
        norm_groups: Groups of the normalization, which divide Cout; None for no normalization.
        norm_weight: [Cout], of the input's type; ones if missing.
        norm_bias: [Cout], of the input's type; zeros if missing.
        eps: Added to the variance inside the root.
        post_activation: As ``activation``, after the normalization.
        precision: As for :func:`conv_transpose3d`.
        memory: What is kept for the gradients beside the input: None for one tensor of the output's
            size (the convolution's output, from which the backward pass computes the rest), "save"
            for none, so that the backward pass runs the convolution once more. It does so for a
            part of a large batch at a time, so that a step takes less memory at its peak too.

    Returns:
        [N, Cout, D, H, W], or [Cout, D, H, W] without a batch; never a view of the input.

    Raises:
        TypeError: An argument is of a wrong Python type; a bool is no int.
        ValueError: An activation, ``precision`` or ``memory`` is no known name, ``eps`` is negative
            or not finite, or the normalization's groups hold a single value in the whole batch.
        RuntimeError: Shapes, types, devices or parameters do not fit.
    """
    tensors = (input, weight, bias, norm_weight, norm_bias)
    if has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose3d_block,
            tensors,
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            activation=activation,
            norm_groups=norm_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            post_activation=post_activation,
            precision=precision,
            memory=memory,
        )
    sizes = (stride, padding, output_padding, groups, dilation)
    steps = (norm_groups, activation, eps, post_activation)
    return _forward(tensors, (*sizes, *steps, precision, memory))


def _forward(given: _calls.Tensors, arguments: _calls.Arguments) -> Tensor:
    compiling = torch.compiler.is_compiling()
    if not compiling:
        result = _calls.run_kept(given, arguments)
        if result is not None:
            return result
    stride, padding, output_padding, groups, dilation = arguments[:5]
    norm_groups, activation, eps, post_activation, precision, memory = arguments[5:]
    check_precision(precision)
    check_memory(memory)
    tensors = {n: t for n, t in zip(_cuda.NAMES, given, strict=True) if t is not None}
    for name, tensor in zip(_cuda.NAMES, given, strict=True):
        if tensor is not None or name in ("input", "weight"):
            _memory.check(name, tensor, None if name == "input" else given[0].device)
    device, on_cuda = given[0].device, given[0].is_cuda
    _memory.check_no_tangent(tensors)
    obstacle = _cuda.obstacle(device) if on_cuda and not compiling else None
    type_of_device = "cuda" if on_cuda else "cpu"
    casts = torch.is_autocast_enabled(type_of_device)
    if casts:
        to = torch.get_autocast_dtype(type_of_device)
        tensors = {name: _memory.autocast(tensor, to) for name, tensor in tensors.items()}
    if ("norm_weight" in tensors) != ("norm_bias" in tensors):
        # torch.nn.GroupNorm(bias=False) has the one without the other.
        if "norm_weight" in tensors:
            tensors["norm_bias"] = torch.zeros_like(tensors["norm_weight"])
        else:
            tensors["norm_weight"] = torch.ones_like(tensors["norm_bias"])
    steps = (activation, norm_groups, eps, post_activation)
    each: Any = tuple(tensors.get(name) for name in _cuda.NAMES)
    batched = each[0].dim() == 5
    if compiling:
        # The compiler knows values as they are, so they are checked where it runs the operator.
        stride, padding, output_padding, dilation = (
            _triple(values) for values in (stride, padding, output_padding, dilation)
        )
        conv = _cpu.Conv(stride, padding, output_padding, groups, dilation)
        channels_last = _memory.is_channels_last(each[0])
        # As `_memory.output_format` has it.
        channels_last = channels_last and not (on_cuda and norm_groups is not None)
        name, count, rest = _operator(each, conv, steps, precision, channels_last, memory)
        batch = each if batched else (each[0].unsqueeze(0), *each[1:])
        results = getattr(_operators.OPERATORS, name).default(*batch[:count], *rest)
        output: Tensor = results if isinstance(results, Tensor) else results[0]
        return output if batched else output.squeeze(0)
    block = _native.Block(
        tensors["weight"].shape,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        "bias" in tensors,
        activation,
        norm_groups,
        "norm_weight" in tensors,
        eps,
        post_activation,
    )
    _memory.check_not_transformed()
    _memory.check_fit(block, tensors)
    if obstacle is not None:
        _cuda.warn(obstacle)
        return compose(block, tensors, *steps, precision)
    each = tuple(None if t is None else t.resolve_neg() for t in each)
    batch = each if batched else (each[0].unsqueeze(0), *each[1:])
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in each)
    # A kind is compared by value, so it holds no object whose value may change.
    fixed = (norm_groups, _fixed(activation), float(eps), _fixed(post_activation))
    kind = _calls.kind(each, (*arguments[:5], *fixed, precision, memory))
    kept = None if kind is None else _calls.kept(kind)
    if kept is not None:
        return _calls.first(kept, each)
    runs: _calls.Runs
    if kind is not None and not records and on_cuda:
        try:
            runs = _cuda.plan_forward(block, precision, each)
        except _native.NoEngineError as error:
            _cuda.warn(str(error))
            return compose(block, tensors, *steps, precision)
        _calls.keep(kind, runs)
        return _calls.first(runs, each)
    memory_format = _memory.output_format(block, batch[0], each[1], each[2])
    channels_last = memory_format is torch.channels_last_3d
    if kind is not None and not records:
        # Under autocast the packed form of the parameter that was cast is kept.
        runs = _cpu.plan_forward(block, channels_last, batch, given[1] if casts else None)
    else:
        conv = _cpu.Conv(
            block.stride, block.padding, block.output_padding, block.groups, block.dilation
        )
        name, count, rest = _operator(each, conv, steps, precision, channels_last, memory)
        call = _calls.Call.of(name, rest)
        plan = None if kind is None else call.plan(batch[:count])
        runs = _autograd.Dispatched(call) if plan is None else _autograd.Recording(call, plan)
    if not batched:
        runs = _calls.Unbatched(runs)
    if kind is not None and (records or not casts):
        _calls.keep(kind, runs)
    return _calls.first(runs, each)


def _operator(
    tensors: _calls.Tensors,
    conv: _cpu.Conv,
    arguments: tuple[Activation, int | None, float, Activation],
    precision: str | None,
    channels_last: bool,
    memory: str | None,
) -> tuple[str, int, tuple[Any, ...]]:
    """The operator that computes a block on such tensors, how many it takes, and what else."""
    steps = _cpu.Steps.of(*arguments)
    if steps.are_none():
        return "conv_transpose3d", 3, (*conv, precision, channels_last)
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    trains = records and memory != "save"
    name = "conv_transpose3d_block_training" if trains else "conv_transpose3d_block"
    return name, 5, (*conv, *steps, precision, channels_last)


def _fixed(activation: Activation) -> Activation:
    return (activation[0], float(activation[1])) if isinstance(activation, tuple) else activation


def _triple(values: Sizes) -> Sequence[int]:
    """One integer for all three axes, or a list or tuple of one or three."""
    if isinstance(values, (tuple, list)):
        return values * 3 if len(values) == 1 else values
    return [values] * 3  # type: ignore[list-item]


def check_precision(precision: str | None) -> None:
    """Refuses a name that is none of the precisions.

    Raises:
        ValueError: It is not "ieee", "tf32" or None.
    """
    if precision not in (None, "ieee", "tf32"):
        raise ValueError(f"precision must be one of ieee, tf32, got {precision!r}")


def check_memory(memory: str | None) -> None:
    """Refuses a name that is no way to use memory.

    Raises:
        ValueError: It is not "save" or None.
    """
    if memory not in (None, "save"):
        raise ValueError(f"memory must be one of save, got {memory!r}")
