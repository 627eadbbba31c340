"""Functions in the manner of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from volup import _cpu, _cuda, _memory, _native, _operators
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
    return _forward(
        (input, weight, bias, None, None),
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        None,
        None,
        1e-5,
        None,
        precision,
        None,
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
    return _forward(
        tensors,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        activation,
        norm_groups,
        eps,
        post_activation,
        precision,
        memory,
    )


def _forward(
    given: tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None],
    stride: Sizes,
    padding: Sizes,
    output_padding: Sizes,
    groups: int,
    dilation: Sizes,
    activation: Activation,
    norm_groups: int | None,
    eps: float,
    post_activation: Activation,
    precision: str | None,
    memory: str | None,
) -> Tensor:
    compiling = torch.compiler.is_compiling()
    on_cuda = isinstance(given[0], Tensor) and given[0].is_cuda
    if on_cuda and not compiling:
        planned = _cuda.launch_planned(
            given,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            activation,
            norm_groups,
            eps,
            post_activation,
            precision,
            memory,
        )
        if planned is not None:
            return planned
    check_precision(precision)
    check_memory(memory)
    arguments = dict(zip(_cuda.NAMES, given, strict=True))
    tensors = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    for name, tensor in arguments.items():
        if tensor is not None or name in ("input", "weight"):
            _memory.check(name, tensor, None if name == "input" else given[0].device)
    device = given[0].device.type
    _memory.check_no_tangent(tensors)
    obstacle = _cuda.obstacle(given[0].device) if on_cuda and not compiling else None
    if torch.is_autocast_enabled(device):
        to = torch.get_autocast_dtype(device)
        tensors = {name: _memory.autocast(tensor, to) for name, tensor in tensors.items()}
    if ("norm_weight" in tensors) != ("norm_bias" in tensors):
        # torch.nn.GroupNorm(bias=False) has the one without the other.
        if "norm_weight" in tensors:
            tensors["norm_bias"] = torch.zeros_like(tensors["norm_weight"])
        else:
            tensors["norm_weight"] = torch.ones_like(tensors["norm_bias"])
    steps = (activation, norm_groups, eps, post_activation)
    each: Any = tuple(tensors.get(name) for name in _cuda.NAMES)
    if compiling:
        # The compiler knows values as they are, so they are checked where it runs the operator.
        sizes = (stride, padding, output_padding, dilation)
        stride, padding, output_padding, dilation = (_triple(values) for values in sizes)
        conv = _cpu.Conv(stride, padding, output_padding, groups, dilation)
        channels_last = _memory.is_channels_last(tensors["input"])
        # As `_memory.output_format` has it.
        channels_last = channels_last and not (on_cuda and norm_groups is not None)
        return _operator(each, conv, steps, channels_last, precision, memory).run(each)[0]
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
    plain = _memory.is_plain(tensors.values())
    if plain and not on_cuda:
        block.output_shape(tensors["input"].shape)  # Its rank; the rest is checked on the way.
    else:
        _memory.check_fit(block, tensors)
    if obstacle is not None:
        _cuda.warn(obstacle)
        return compose(block, tensors, *steps, precision)
    input = tensors["input"]
    batch = input if input.dim() == 5 else input.unsqueeze(0)

    def operator(each: _cuda.Tensors) -> _Operator:
        sizes = (block.stride, block.padding, block.output_padding, block.groups, block.dilation)
        channels_last = _channels_last(block, batch, tensors)
        return _operator(each, _cpu.Conv(*sizes), steps, channels_last, precision, memory)

    if on_cuda:
        integers = _native.integers(stride, padding, output_padding, groups, dilation, norm_groups)
        kind = (integers, activation, eps, post_activation, precision, memory)
        how = partial(_cuda.plan_forward, block, precision) if plain else operator
        try:
            return _cuda.run(how, tensors, *kind)
        except _native.NoEngineError as error:
            _cuda.warn(str(error))
            return compose(block, tensors, *steps, precision)
    if not plain:
        return operator(each).run(each)[0]
    channels_last = _channels_last(block, batch, tensors)
    output = _cpu.forward(block, tensors | {"input": batch}, channels_last, _cache_of(given[1]))
    return output if input.dim() == 5 else output.squeeze(0)


class _Operator(NamedTuple):
    """A block as one of the operators that PyTorch knows, so that it sees what is done.

    Attributes:
        function: The operator.
        tensors: How many of the block's tensors it takes.
        rest: What it takes after them.
    """

    function: Callable[..., Any]
    tensors: int
    rest: tuple[Any, ...]

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """The output, for the tensors of a block."""
        input, *parameters = tensors[: self.tensors]
        assert input is not None
        batch = input if input.dim() == 5 else input.unsqueeze(0)
        output = self.function(batch, *parameters, *self.rest)
        if isinstance(output, tuple):
            output = output[0]
        return [output if input.dim() == 5 else output.squeeze(0)]


def _operator(
    tensors: _cuda.Tensors,
    conv: _cpu.Conv,
    arguments: tuple[Activation, int | None, float, Activation],
    channels_last: bool,
    precision: str | None,
    memory: str | None,
) -> _Operator:
    """The operator that computes a block on such tensors."""
    steps = _cpu.Steps.of(*arguments)
    if steps.are_none():
        return _Operator(_operators.conv_transpose3d, 3, (*conv, precision, channels_last))
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    function = _operators.block
    if records and memory != "save":
        function = _operators.block_training
    return _Operator(function, 5, (*conv, *steps, precision, channels_last))


def _channels_last(block: _native.Block, input: Tensor, tensors: dict[str, Tensor]) -> bool:
    """Whether PyTorch's output for a batched input would be channels_last_3d."""
    memory_format = _memory.output_format(block, input, tensors["weight"], tensors.get("bias"))
    return memory_format is torch.channels_last_3d


def _triple(values: Sizes) -> Sequence[int]:
    """One integer for all three axes, or a list or tuple of one or three."""
    if isinstance(values, (tuple, list)):
        return values * 3 if len(values) == 1 else values
    return [values] * 3  # type: ignore[list-item]


# Beside the parameters rather than in them, so that what copies and pickles them need not know.
_caches: MutableMapping[Tensor, _native.Cache] = WeakTensorKeyDictionary()


def _cache_of(weight: Tensor) -> _native.Cache | None:
    """Where the packed form of a weight that is likely to come again is kept while it lives."""
    if type(weight) is not torch.nn.Parameter:
        return None
    cache = _caches.get(weight)
    if cache is None:
        cache = _caches.setdefault(weight, _native.Cache())
    return cache


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
