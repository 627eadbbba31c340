"""A block by PyTorch's own operators, for where volup has no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from volup import _native

Activation = str | tuple[str, float] | None

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "leaky_relu": F.leaky_relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "hardswish": F.hardswish,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
}

_aten = torch.ops.aten


def _leaky_relu_gradient(grad: Tensor, x: Tensor, slope: float = 0.01) -> Tensor:
    return _aten.leaky_relu_backward(grad, x, slope, False)  # type: ignore[no-any-return]


_ACTIVATION_GRADIENTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "relu": lambda grad, x: _aten.threshold_backward(grad, x, 0),
    "leaky_relu": _leaky_relu_gradient,
    "silu": _aten.silu_backward,
    "gelu": _aten.gelu_backward,
    "gelu_tanh": partial(_aten.gelu_backward, approximate="tanh"),
    "hardswish": _aten.hardswish_backward,
    "sigmoid": lambda grad, x: _aten.sigmoid_backward(grad, x.sigmoid()),
    "tanh": lambda grad, x: _aten.tanh_backward(grad, x.tanh()),
}

# Since PyTorch 2.9; it resolves what an operator inherits, and unlike `allow_tf32` does not raise
# where the old and the new flags were mixed.
_get_precision = getattr(torch._C, "_get_fp32_precision_getter", None)


def activate(activation: Activation, x: Tensor) -> Tensor:
    """Applies an activation, by the name that :func:`volup.conv_transpose3d_block` gives it."""
    if activation is None:
        return x
    if isinstance(activation, tuple):
        return F.leaky_relu(x, float(activation[1]))
    return _ACTIVATIONS[activation](x)


def compose(
    block: _native.Block,
    tensors: dict[str, Tensor],
    activation: Activation,
    norm_groups: int | None,
    eps: float,
    post_activation: Activation,
    precision: str | None,
) -> Tensor:
    """Computes a block as PyTorch does, step by step and with gradients.

    Args:
        block: The block, which has checked the rest.
        tensors: Of one type, by the names of ``conv_transpose3d_block``. Autocast changes nothing.
        activation: As there, and so on.
        norm_groups: As there.
        eps: As there.
        post_activation: As there.
        precision: As there. The backward pass follows PyTorch's flags.
    """
    input, weight, bias = tensors["input"], tensors["weight"], tensors.get("bias")
    conv = (block.stride, block.padding, block.output_padding, block.groups, block.dilation)
    with torch.autocast(input.device.type, enabled=False):
        y = convolve(input, weight, bias, conv, precision)
        norm = (tensors.get("norm_weight"), tensors.get("norm_bias"))
        return follow(y, *norm, activation, norm_groups, eps, post_activation)


def convolve(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    conv: Sequence[Any],
    precision: str | None,
) -> Tensor:
    """Computes the convolution of a block.

    Args:
        input: As for ``conv_transpose3d_block``.
        weight: As there.
        bias: As there.
        conv: stride, padding, output_padding, groups, dilation.
        precision: As there.
    """
    with _precision(precision):
        return F.conv_transpose3d(input, weight, bias, *conv)


def convolution_gradients(
    grad_output: Tensor,
    input: Tensor | Sequence[int],
    weight: Tensor | Sequence[int],
    conv: Sequence[Any],
    precision: str | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """The gradients of a convolution's input, weight and bias, those that are wanted.

    Args:
        grad_output: The gradient of its output.
        input: Its input, or no more than the shape where the weight's gradient is not wanted.
        weight: Its weight, likewise for the input's.
        conv: stride, padding, output_padding, groups, dilation.
        precision: As for ``conv_transpose3d_block``.
        wanted: Of input, weight and bias.
    """
    stride, padding, output_padding, groups, dilation = conv
    factors = [
        factor if isinstance(factor, Tensor) else grad_output.new_empty(1).expand(factor)
        for factor in (input, weight)
    ]
    rest = (stride, padding, dilation, True, output_padding, groups, list(wanted))
    channels = [grad_output.shape[1]]
    with _precision(precision):
        return _aten.convolution_backward(  # type: ignore[no-any-return]
            grad_output, *factors, channels, *rest
        )


def statistics(
    y: Tensor, activation: Activation, norm_groups: int, eps: float
) -> tuple[Tensor, Tensor]:
    """What the normalization of a block takes of the convolution's output.

    Args:
        y: That output, batched.
        activation: As for ``conv_transpose3d_block``, and so on.
        norm_groups: As there.
        eps: As there.

    Returns:
        Means and 1/deviations, [N, groups], in the type of sums.
    """
    wide = torch.promote_types(y.dtype, torch.float32)
    groups = activate(activation, y).reshape(y.shape[0], norm_groups, -1).to(wide)
    variance, mean = torch.var_mean(groups, -1, correction=0)
    return mean, (variance + eps).rsqrt()


def follow(
    y: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: Activation,
    norm_groups: int | None,
    eps: float,
    post_activation: Activation,
) -> Tensor:
    """Computes what follows the convolution in a block, step by step and with gradients.

    Args:
        y: The convolution's output.
        norm_weight: As for ``conv_transpose3d_block``, and so on.
        norm_bias: As there.
        activation: As there.
        norm_groups: As there.
        eps: As there.
        post_activation: As there.
    """
    y = activate(activation, y)
    if norm_groups is not None:
        # PyTorch's group norm takes an input without a batch for a batch of its channels.
        batch = y if y.dim() == 5 else y.unsqueeze(0)
        groups = int(norm_groups)
        y = F.group_norm(batch, groups, norm_weight, norm_bias, float(eps)).reshape(y.shape)
    return activate(post_activation, y)


def follow_gradients(
    grad_output: Tensor,
    y: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    activation: Activation,
    norm_groups: int | None,
    eps: float,
    post_activation: Activation,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of ``follow`` where autograd does not see it.

    Args:
        grad_output: The gradient of its output, batched.
        y: As there, and so on; batched.
        norm_weight: As there.
        norm_bias: As there.
        activation: As there.
        norm_groups: As there.
        eps: As there.
        post_activation: As there.

    Returns:
        Those of y, norm_weight and norm_bias.
    """
    if norm_groups is None:
        grad = _activation_gradient(post_activation, grad_output, activate(activation, y))
        return _activation_gradient(activation, grad, y), None, None
    a = activate(activation, y).contiguous()
    sizes = (a.shape[0], a.shape[1], a.shape[2:].numel(), int(norm_groups))
    # With statistics of the type that its gradient takes, which the saved ones need not have.
    v, mean, rstd = torch.native_group_norm(a, norm_weight, norm_bias, *sizes, float(eps))
    grad = _activation_gradient(post_activation, grad_output, v).contiguous()
    of_a, of_weight, of_bias = _aten.native_group_norm_backward(
        grad, a, mean, rstd, norm_weight, *sizes, [True, *[norm_weight is not None] * 2]
    )
    return _activation_gradient(activation, of_a, y), of_weight, of_bias


def _activation_gradient(activation: Activation, grad: Tensor, x: Tensor) -> Tensor:
    if activation is None:
        return grad
    if isinstance(activation, tuple):
        return _leaky_relu_gradient(grad, x, float(activation[1]))
    return _ACTIVATION_GRADIENTS[activation](grad, x)


def flagged_precision() -> str:
    """The precision in which PyTorch's flags let cuDNN convolve float32."""
    if _get_precision is None:
        return "tf32" if torch._C._get_cudnn_allow_tf32() else "ieee"
    return "tf32" if _get_precision("cuda", "conv") == "tf32" else "ieee"


def _set_precision(precision: str) -> None:
    if _get_precision is None:
        torch._C._set_cudnn_allow_tf32(precision == "tf32")
    else:
        torch._C._set_fp32_precision_setter("cuda", "conv", precision)


@contextmanager
def _precision(precision: str | None) -> Iterator[None]:
    """Lets cuDNN convolve float32 in a precision."""
    before = flagged_precision()
    if precision is None or precision == before:
        yield
        return
    _set_precision(precision)
    try:
        yield
    finally:
        _set_precision(before)
