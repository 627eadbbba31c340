"""Functions in the manner of ``torch.nn.functional``."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

import torch
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function
from torch.utils.weak import WeakTensorKeyDictionary

from volup import _cuda, _memory, _native
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
    memory format that PyTorch's would have. There are no gradients yet.

    On a GPU the call returns once its kernels are queued on the current stream; after a first call
    like it, it may be captured in a CUDA graph. Where volup has no kernels for the GPU or its
    driver, PyTorch's operators compute, with gradients, and a ``RuntimeWarning`` says why once.

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
            The CPU always computes in full precision.

    Returns:
        [N, Cout, D, H, W], or [Cout, D, H, W] without a batch; never a view of the input.

    Raises:
        TypeError: An argument is of a wrong Python type; a bool is no int.
        ValueError: ``precision`` is no known name.
        RuntimeError: Shapes, types, devices or parameters do not fit, or a tensor requires grad in
            grad mode.
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

    Returns:
        [N, Cout, D, H, W], or [Cout, D, H, W] without a batch; never a view of the input.

    Raises:
        TypeError: An argument is of a wrong Python type; a bool is no int.
        ValueError: An activation or ``precision`` is no known name, ``eps`` is negative or not
            finite, or the normalization's groups hold a single value in the whole batch.
        RuntimeError: Shapes, types, devices or parameters do not fit, or a tensor requires grad in
            grad mode.
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
) -> Tensor:
    on_cuda = isinstance(given[0], Tensor) and given[0].is_cuda
    if on_cuda:
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
        )
        if planned is not None:
            return planned
    check_precision(precision)
    arguments = dict(zip(_cuda.NAMES, given, strict=True))
    tensors = {name: tensor for name, tensor in arguments.items() if tensor is not None}
    for name, tensor in arguments.items():
        if tensor is not None or name in ("input", "weight"):
            _memory.check(name, tensor, None if name == "input" else given[0].device)
    device = given[0].device.type
    obstacle = _cuda.obstacle(given[0].device) if on_cuda else None
    if obstacle is None:
        _memory.check_no_gradient(tensors)
    if torch.is_autocast_enabled(device):
        to = torch.get_autocast_dtype(device)
        tensors = {name: _memory.autocast(tensor, to) for name, tensor in tensors.items()}
    if ("norm_weight" in tensors) != ("norm_bias" in tensors):
        # torch.nn.GroupNorm(bias=False) has the one without the other.
        if "norm_weight" in tensors:
            tensors["norm_bias"] = torch.zeros_like(tensors["norm_weight"])
        else:
            tensors["norm_weight"] = torch.ones_like(tensors["norm_bias"])
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
    if not on_cuda:
        return _forward_cpu(block, tensors, given[1])
    _memory.check_fit(block, tensors)
    if obstacle is None:
        integers = _native.integers(stride, padding, output_padding, groups, dilation, norm_groups)
        try:
            return _cuda.launch(
                block, tensors, integers, activation, eps, post_activation, precision
            )
        except _native.NoEngineError as error:
            obstacle = str(error)
    _cuda.warn(obstacle)
    return compose(block, tensors, activation, norm_groups, eps, post_activation, precision)


def _forward_cpu(block: _native.Block, tensors: dict[str, Tensor], packed: Tensor) -> Tensor:
    """Computes a block whose tensors have been checked one by one.

    Args:
        block: The block.
        tensors: As they are computed with.
        packed: The weight as the caller has it, whose packed form is kept.
    """
    input, weight = tensors["input"], tensors["weight"]
    shape = block.output_shape(input.shape)
    batched = input.dim() == 5
    if not batched:
        input = input.unsqueeze(0)
    memory_format = _memory.output_format(block, input, weight, tensors.get("bias"))
    output = torch.empty(shape, dtype=input.dtype, device="cpu", memory_format=memory_format)
    # Under a mode that fakes what torch.empty makes, the output is no memory either.
    _memory.check("output", output)

    # `held` keeps the copies alive until the native call has returned.
    held = {name: _memory.dense(tensor) for name, tensor in tensors.items() if name != "input"}
    input = _memory.dense(input, keep_channels_last=True)
    raw = {name: _memory.raw(name, tensor) for name, tensor in held.items()}
    block.forward_cpu(
        torch.get_num_threads(),
        _memory.raw("input", input),
        _memory.is_channels_last(input),
        raw["weight"],
        raw.get("bias"),
        raw.get("norm_weight"),
        raw.get("norm_bias"),
        _memory.raw("output", output),
        memory_format is torch.channels_last_3d,
        _cache_of(packed),
    )
    return output if batched else output.squeeze(0)


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
