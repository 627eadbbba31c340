"""The operators' kernels for CPU tensors: the native module on plain tensors.

Every function takes what its operator in ``_operators`` takes, batched volumes first; a precision
means nothing here. Copies are held until the native call has returned.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from volup import _memory, _native
from volup._compose import Activation


class Conv(NamedTuple):
    """The parameters of a convolution, as the operators take them."""

    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    groups: int
    dilation: Sequence[int]


class Steps(NamedTuple):
    """What follows the convolution, as the operators take it."""

    activation: str | None
    slope: float
    norm_groups: int | None
    eps: float
    post_activation: str | None
    post_slope: float

    @classmethod
    def of(
        cls,
        activation: Activation,
        norm_groups: int | None,
        eps: float,
        post_activation: Activation,
    ) -> Steps:
        """From the arguments of ``conv_transpose3d_block``."""
        name, slope = _split(activation)
        post_name, post_slope = _split(post_activation)
        groups = None if norm_groups is None else int(norm_groups)
        return cls(name, slope, groups, float(eps), post_name, post_slope)

    def are_none(self) -> bool:
        """Whether nothing follows."""
        return self.activation is None and self.norm_groups is None and self.post_activation is None

    def arguments(self) -> tuple[Activation, int | None, float, Activation]:
        """Back to the arguments: activation, norm_groups, eps, post_activation."""
        return (
            _joined(self.activation, self.slope),
            self.norm_groups,
            self.eps,
            _joined(self.post_activation, self.post_slope),
        )


def _split(activation: Activation) -> tuple[str | None, float]:
    if isinstance(activation, tuple):
        return activation[0], float(activation[1])
    return activation, 0.01


def _joined(name: str | None, slope: float) -> Activation:
    return (name, slope) if name == "leaky_relu" else name


NO_STEPS = Steps(None, 0.01, None, 1e-5, None, 0.01)


def native_block(
    weight_shape: Sequence[int], conv: Conv, steps: Steps, bias: bool, affine: bool
) -> _native.Block:
    """A block of the native module, which checks it."""
    activation, norm_groups, eps, post_activation = steps.arguments()
    shape = torch.Size(weight_shape)
    return _native.Block(shape, *conv, bias, activation, norm_groups, affine, eps, post_activation)


def format_of(channels_last: bool) -> torch.memory_format:
    """The memory format."""
    return torch.channels_last_3d if channels_last else torch.contiguous_format


def _empty(size: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu", memory_format=format_of(channels_last))


def _empty_as(input: Tensor) -> Tensor:
    """Memory for the gradient of an input, which lies as that does."""
    return _empty(input.shape, input.dtype, _memory.is_channels_last(input))


def _volume(name: str, tensor: Tensor) -> tuple[_memory.RawTensor, bool]:
    return _memory.raw(name, tensor), _memory.is_channels_last(tensor)


def _raw(name: str, tensor: Tensor | None) -> _memory.RawTensor | None:
    return None if tensor is None else _memory.raw(name, tensor)


def _dense(tensor: Tensor | None) -> Tensor | None:
    return None if tensor is None else _memory.dense(tensor)


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and statistics."""
    return torch.promote_types(dtype, torch.float32)


def forward(
    block: _native.Block,
    tensors: dict[str, Tensor],
    channels_last: bool,
    cache: _native.Cache | None,
) -> Tensor:
    """Computes a block, without autograd or the dispatcher.

    Args:
        block: The block.
        tensors: Plain tensors, the input batched.
        channels_last: Of the output.
        cache: Where packed parameters are kept.
    """
    input = _memory.dense(tensors["input"], keep_channels_last=True)
    output = _empty(block.output_shape(input.shape), input.dtype, channels_last)
    held = {name: _memory.dense(tensor) for name, tensor in tensors.items() if name != "input"}
    raw = {name: _memory.raw(name, tensor) for name, tensor in held.items()}
    block.forward_cpu(
        torch.get_num_threads(),
        *_volume("input", input),
        raw["weight"],
        raw.get("bias"),
        raw.get("norm_weight"),
        raw.get("norm_bias"),
        _memory.raw("output", output),
        channels_last,
        cache,
    )
    return output


def block(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *rest: Any,
) -> Tensor:
    """``conv_transpose3d_block``."""
    conv, steps, channels_last = Conv(*rest[:5]), Steps(*rest[5:11]), rest[12]
    checked = native_block(weight.shape, conv, steps, bias is not None, norm_weight is not None)
    given = {
        "input": input,
        "weight": weight,
        "bias": bias,
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
    }
    tensors = {name: tensor for name, tensor in given.items() if tensor is not None}
    return forward(checked, tensors, channels_last, None)


def input_grad(grad_output: Tensor, weight: Tensor, *rest: Any) -> Tensor:
    """``conv_transpose3d_input_grad``."""
    conv, channels_last = Conv(*rest[:5]), rest[6]
    gradient = _empty(input_size(grad_output, weight, conv), weight.dtype, channels_last)
    _input_grad(grad_output, weight, conv, gradient)
    return gradient


def _input_grad(grad_output: Tensor, weight: Tensor, conv: Conv, gradient: Tensor) -> None:
    grad_output, weight = _memory.dense(grad_output, True), _memory.dense(weight)
    _native.input_gradient(
        native_block(weight.shape, conv, NO_STEPS, False, False),
        torch.get_num_threads(),
        _volume("grad_output", grad_output),
        _memory.raw("weight", weight),
        _volume("grad_input", gradient),
    )


def weight_grad(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> Tensor:
    """``conv_transpose3d_weight_grad``."""
    conv = Conv(*rest[:5])
    shape = (input.shape[1], grad_output.shape[1] // conv.groups, *kernel_size)
    gradient = torch.empty(shape, dtype=input.dtype)
    _weight_grad(input, grad_output, conv, gradient)
    return gradient


def _weight_grad(input: Tensor, grad_output: Tensor, conv: Conv, gradient: Tensor) -> None:
    input, grad_output = _memory.dense(input, True), _memory.dense(grad_output, True)
    _native.weight_gradient(
        native_block(gradient.shape, conv, NO_STEPS, False, False),
        torch.get_num_threads(),
        _volume("input", input),
        _volume("grad_output", grad_output),
        _memory.raw("grad_weight", gradient),
    )


def block_training(*arguments: Any) -> tuple[Tensor, ...]:
    """``conv_transpose3d_block_training``."""
    return _for_training(True, *arguments)


def _for_training(
    with_output: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    conv, steps, channels_last = Conv(*rest[:5]), Steps(*rest[5:11]), rest[12]
    checked = native_block(weight.shape, conv, steps, bias is not None, norm_weight is not None)
    input, weight = _memory.dense(input, True), _memory.dense(weight)
    bias, norm_weight, norm_bias = (_dense(t) for t in (bias, norm_weight, norm_bias))
    shape = checked.output_shape(input.shape)
    output = _empty(shape, input.dtype, channels_last) if with_output else None
    convolution = _empty(shape, input.dtype, channels_last)
    size = (shape[0], steps.norm_groups) if steps.norm_groups else (0,)
    mean, rstd = (torch.zeros(size, dtype=accumulator(input.dtype)) for _ in range(2))
    _native.forward_for_training(
        checked,
        torch.get_num_threads(),
        _volume("input", input),
        _memory.raw("weight", weight),
        _raw("bias", bias),
        _raw("norm_weight", norm_weight),
        _raw("norm_bias", norm_bias),
        _memory.raw("convolution", convolution),
        _memory.raw("mean", mean),
        _memory.raw("rstd", rstd),
        _raw("output", output),
        channels_last,
    )
    kept = (convolution, mean, rstd)
    return kept if output is None else (output, *kept)


def block_grad(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    convolution: Tensor,
    mean: Tensor,
    rstd: Tensor,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """``conv_transpose3d_block_grad``."""
    parameters, kept = (weight, bias, norm_weight, norm_bias), (convolution, mean, rstd)
    of_input = _empty_as(input) if rest[12][0] else None
    gradients = (of_input, grad_output, input, parameters, kept)
    of_parameters = _block_grad(weight.dtype, *gradients, rest[:11], rest[12])
    return _there(input, of_input, *of_parameters)


def block_recomputed_grad(
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, ...]:
    """``conv_transpose3d_block_recomputed_grad``."""
    *options, wanted = rest
    parameters, pieces = (weight, bias, norm_weight, norm_bias), _pieces(grad_output)
    of_input = _empty_as(input) if wanted[0] else None
    # Sums over samples are rounded once.
    dtype = weight.dtype if len(pieces) == 1 else torch.float64

    def of_piece(piece: slice) -> list[Tensor | None]:
        kept = _for_training(False, input[piece], *parameters, *options)
        to = None if of_input is None else of_input[piece]
        gradients = (to, grad_output[piece], input[piece], parameters, kept)
        return _block_grad(dtype, *gradients, options[:11], wanted)

    sums = of_piece(pieces[0])
    for piece in pieces[1:]:
        # Always in the order of the samples, for the same bits each time.
        for total, more in zip(sums, of_piece(piece), strict=True):
            if total is not None and more is not None:
                total += more
    of_parameters = (None if total is None else total.to(weight.dtype) for total in sums)
    return _there(input, of_input, *of_parameters)


# Bytes of an output that is taken in pieces where it is computed again; so many at least, if there
# are as many samples.
LARGE = 1 << 24
_FEWEST_PIECES = 4


def _pieces(output: Tensor) -> list[slice]:
    batch = output.shape[0]
    if output.numel() * output.element_size() <= LARGE:
        return [slice(0, batch)]
    size = max(1, batch // _FEWEST_PIECES)
    return [slice(start, start + size) for start in range(0, batch, size)]


def _there(like: Tensor, *gradients: Tensor | None) -> tuple[Tensor, ...]:
    """Gradients as an operator returns them: an empty tensor for one that is not there."""
    return tuple(like.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _block_grad(
    dtype: torch.dtype,
    of_input: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    parameters: Sequence[Any],
    kept: Sequence[Tensor],
    rest: Sequence[Any],
    wanted: Sequence[bool],
) -> list[Tensor | None]:
    """Writes the gradient of the input, and returns those of the parameters.

    Args:
        dtype: Of the parameters' gradients: the tensors' own, or float64.
        of_input: Where the gradient of the input goes, if it is wanted; it lies as the input does.
        grad_output: As the operator takes it.
        input: Likewise.
        parameters: Likewise.
        kept: What the forward pass saves.
        rest: The convolution and the steps.
        wanted: Which gradients are wanted.
    """
    weight, bias, norm_weight, norm_bias = parameters
    conv, steps = Conv(*rest[:5]), Steps(*rest[5:11])
    checked = native_block(weight.shape, conv, steps, bias is not None, norm_weight is not None)
    grad_output, convolution = _memory.dense(grad_output, True), _memory.dense(kept[0], True)
    mean, rstd = _memory.dense(kept[1]), _memory.dense(kept[2])
    scale, shift = _dense(norm_weight), _dense(norm_bias)
    # The gradient of the convolution's output, in its memory format.
    through = torch.empty_like(convolution) if wanted[0] or wanted[1] else None
    of_vectors = [
        torch.empty(vector.shape, dtype=dtype) if vector is not None and wants else None
        for vector, wants in zip((bias, scale, shift), wanted[2:], strict=True)
    ]
    _native.epilogue_gradient(
        checked,
        torch.get_num_threads(),
        input.shape,
        _volume("convolution", convolution),
        _memory.raw("mean", mean),
        _memory.raw("rstd", rstd),
        _raw("norm_weight", scale),
        _raw("norm_bias", shift),
        _volume("grad_output", grad_output),
        None if through is None else _volume("grad_convolution", through),
        _raw("grad_bias", of_vectors[0]),
        _raw("grad_norm_weight", of_vectors[1]),
        _raw("grad_norm_bias", of_vectors[2]),
    )
    of_weight = None
    if through is not None and wanted[1]:
        of_weight = torch.empty(weight.shape, dtype=dtype)
        _weight_grad(input, through, conv, of_weight)
    if through is not None and of_input is not None:
        _input_grad(through, weight, conv, of_input)
    return [of_weight, *of_vectors]


def input_size(grad_output: Tensor, weight: Tensor, conv: Conv) -> list[int]:
    """The size of the input whose convolution is of a size."""
    size = [grad_output.shape[0], weight.shape[0]]
    for axis in range(3):
        reach = conv.dilation[axis] * (weight.shape[2 + axis] - 1) + conv.output_padding[axis]
        inside = grad_output.shape[2 + axis] - 1 + 2 * conv.padding[axis] - reach
        size.append(inside // conv.stride[axis] + 1)
    return size
