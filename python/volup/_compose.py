"""A block by PyTorch's own operators, for where volup has no engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

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
    input = tensors["input"]
    with torch.autocast(input.device.type, enabled=False):
        with _precision(precision):
            y = F.conv_transpose3d(
                input,
                tensors["weight"],
                tensors.get("bias"),
                block.stride,
                block.padding,
                block.output_padding,
                block.groups,
                block.dilation,
            )
        norm = (tensors.get("norm_weight"), tensors.get("norm_bias"))
        return follow(y, *norm, activation, norm_groups, eps, post_activation)


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
