"""The operators' kernels for CPU tensors: the native module on plain tensors.

A kernel is planned for the first tensors of their kind, and then run; a precision means nothing
here. Copies are held until the native call has returned.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

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


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The type of sums and statistics."""
    return torch.promote_types(dtype, torch.float32)


def _empty(size: Sequence[int], dtype: torch.dtype, channels_last: bool) -> Tensor:
    return torch.empty(size, dtype=dtype, device="cpu", memory_format=format_of(channels_last))


def _volume(name: str, tensor: Tensor) -> tuple[_memory.RawTensor, bool]:
    return _memory.raw(name, tensor), _memory.is_channels_last(tensor)


def _raw(name: str, tensor: Tensor | None) -> _memory.RawTensor | None:
    return None if tensor is None else _memory.raw(name, tensor)


class Plan:
    """A pass for tensors of one kind.

    Attributes:
        function: Computes it, of dense tensors.
        arguments: What that takes before them.
        copied: Which tensors are copied first, and whether channels_last_3d will do.
    """

    __slots__ = ("arguments", "copied", "function")

    def __init__(
        self,
        function: Callable[..., Sequence[Tensor | None]],
        arguments: Sequence[Any],
        tensors: Sequence[Tensor | None],
        volumes: Sequence[int],
    ) -> None:
        """Takes the attributes, and tensors of the kind with the indices of volumes among them."""
        self.function = function
        self.arguments = arguments
        self.copied = [
            (i, i in volumes)
            for i, tensor in enumerate(tensors)
            if tensor is not None and _memory.dense(tensor, i in volumes) is not tensor
        ]

    def run(self, tensors: Sequence[Any]) -> Sequence[Tensor | None]:
        """The results; None for one that is not wanted."""
        if self.copied:
            tensors = list(tensors)
            for i, is_volume in self.copied:
                tensors[i] = _memory.dense(tensors[i], is_volume)
        return self.function(*self.arguments, *tensors)


class Kernel(NamedTuple):
    """An operator's kernel.

    Attributes:
        plan: Checks a call, of its tensors and what it takes after them, and says how those like it
            are computed.
    """

    plan: Callable[[Sequence[Any], Sequence[Any]], Plan]


# --- Forward --------------------------------------------------------------------------------------


def plan_forward(
    block: _native.Block, channels_last: bool, tensors: Sequence[Any], owner: Tensor | None
) -> Plan:
    """Plans a block that is not recorded, for a function: what a parameter is packed into is kept.

    Args:
        block: The block.
        channels_last: Of the output.
        tensors: The block's, the input batched.
        owner: What the weight was made of, if it is another.
    """
    return Plan(_forward_by_kept, (owner, block, channels_last), tensors, (0,))


def _plan_block(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    return Plan(_forward, (None, _checked(tensors, rest), rest[12]), tensors, (0,))


def _plan_conv(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    _, weight, bias = tensors
    block = native_block(weight.shape, Conv(*rest[:5]), NO_STEPS, bias is not None, False)
    return Plan(_forward, (None, block, rest[6]), tensors, (0,))


def _checked(tensors: Sequence[Any], rest: Sequence[Any]) -> _native.Block:
    """The block of an operator's arguments."""
    _, weight, bias, norm_weight, _ = tensors
    conv, steps = Conv(*rest[:5]), Steps(*rest[5:11])
    return native_block(weight.shape, conv, steps, bias is not None, norm_weight is not None)


def _forward(
    cache: _native.Cache | None,
    block: _native.Block,
    channels_last: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
) -> list[Tensor | None]:
    output = _empty(block.output_shape(input.shape), input.dtype, channels_last)
    block.forward_cpu(
        torch.get_num_threads(),
        *_volume("input", input),
        _memory.raw("weight", weight),
        _raw("bias", bias),
        _raw("norm_weight", norm_weight),
        _raw("norm_bias", norm_bias),
        _memory.raw("output", output),
        channels_last,
        cache,
    )
    return [output]


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


def _forward_by_kept(
    owner: Tensor | None, block: _native.Block, channels_last: bool, *tensors: Any
) -> list[Tensor | None]:
    cache = _cache_of(tensors[1] if owner is None else owner)
    return _forward(cache, block, channels_last, *tensors)


# --- Training -------------------------------------------------------------------------------------


def _plan_training(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    arguments = True, _checked(tensors, rest), Steps(*rest[5:11]).norm_groups, rest[12]
    return Plan(_for_training, arguments, tensors, (0,))


def _for_training(
    with_output: bool,
    block: _native.Block,
    norm_groups: int | None,
    channels_last: bool,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
) -> list[Any]:
    shape = block.output_shape(input.shape)
    output = _empty(shape, input.dtype, channels_last) if with_output else None
    convolution = _empty(shape, input.dtype, channels_last)
    size = (shape[0], norm_groups) if norm_groups else (0,)
    mean, rstd = (torch.zeros(size, dtype=accumulator(input.dtype)) for _ in range(2))
    _native.forward_for_training(
        block,
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
    kept = [convolution, mean, rstd]
    return [output, *kept] if with_output else kept


# --- Gradients ------------------------------------------------------------------------------------


def _plan_input_grad(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    grad_output, weight = tensors
    conv = Conv(*rest[:5])
    block = native_block(weight.shape, conv, NO_STEPS, False, False)
    arguments = block, input_size(grad_output, weight, conv), rest[6]
    return Plan(_input_grad, arguments, tensors, (0,))


def _input_grad(
    block: _native.Block,
    size: Sequence[int],
    channels_last: bool,
    grad_output: Tensor,
    weight: Tensor,
) -> list[Tensor | None]:
    gradient = _empty(size, weight.dtype, channels_last)
    _write_input_grad(block, grad_output, weight, gradient)
    return [gradient]


def _write_input_grad(
    block: _native.Block, grad_output: Tensor, weight: Tensor, to: Tensor
) -> None:
    _native.input_gradient(
        block,
        torch.get_num_threads(),
        _volume("grad_output", grad_output),
        _memory.raw("weight", weight),
        _volume("grad_input", to),
    )


def _plan_weight_grad(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    input, grad_output = tensors
    kernel_size, conv = rest[0], Conv(*rest[1:6])
    shape = (input.shape[1], grad_output.shape[1] // conv.groups, *kernel_size)
    block = native_block(shape, conv, NO_STEPS, False, False)
    return Plan(_weight_grad, (block, shape), tensors, (0, 1))


def _weight_grad(
    block: _native.Block, shape: Sequence[int], input: Tensor, grad_output: Tensor
) -> list[Tensor | None]:
    gradient = torch.empty(shape, dtype=input.dtype)
    _write_weight_grad(block, input, grad_output, gradient)
    return [gradient]


def _write_weight_grad(
    block: _native.Block, input: Tensor, grad_output: Tensor, to: Tensor
) -> None:
    _native.weight_gradient(
        block,
        torch.get_num_threads(),
        _volume("input", input),
        _volume("grad_output", grad_output),
        _memory.raw("grad_weight", to),
    )


class _Backward(NamedTuple):
    """A block's backward pass.

    Attributes:
        block: The block.
        conv: Its convolution alone.
        wanted: Which gradients are.
    """

    block: _native.Block
    conv: _native.Block
    wanted: Sequence[bool]


def _backward_of(tensors: Sequence[Any], rest: Sequence[Any], wanted: Sequence[bool]) -> _Backward:
    conv = native_block(tensors[1].shape, Conv(*rest[:5]), NO_STEPS, False, False)
    return _Backward(_checked(tensors, rest), conv, wanted)


def _plan_block_grad(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    backward = _backward_of(tensors[1:6], rest, rest[12])
    return Plan(_block_grad, (backward,), tensors, (0, 1, 6))


def _block_grad(
    backward: _Backward,
    grad_output: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *kept: Tensor,
) -> list[Tensor | None]:
    of_input = _empty_as(input) if backward.wanted[0] else None
    parameters = (weight, bias, norm_weight, norm_bias)
    gradients = (of_input, grad_output, input, parameters, kept)
    return [of_input, *_of_parameters(backward, weight.dtype, *gradients)]


def _empty_as(input: Tensor) -> Tensor:
    """Memory for the gradient of an input, which lies as that does."""
    return _empty(input.shape, input.dtype, _memory.is_channels_last(input))


def _plan_recomputed_grad(tensors: Sequence[Any], rest: Sequence[Any]) -> Plan:
    backward = _backward_of(tensors[1:], rest, rest[13])
    arguments = backward, Steps(*rest[5:11]).norm_groups, rest[12]
    return Plan(_recomputed_grad, arguments, tensors, (0, 1))


def _recomputed_grad(
    backward: _Backward,
    norm_groups: int | None,
    channels_last: bool,
    grad_output: Tensor,
    input: Tensor,
    *parameters: Any,
) -> list[Tensor | None]:
    pieces = _pieces(grad_output)
    of_input = _empty_as(input) if backward.wanted[0] else None
    # Sums over samples are rounded once.
    own = parameters[0].dtype
    dtype = own if len(pieces) == 1 else torch.float64

    def of_piece(piece: slice) -> list[Tensor | None]:
        given = input[piece]
        kept = _for_training(False, backward.block, norm_groups, channels_last, given, *parameters)
        to = None if of_input is None else of_input[piece]
        return _of_parameters(backward, dtype, to, grad_output[piece], given, parameters, kept)

    sums = of_piece(pieces[0])
    for piece in pieces[1:]:
        # Always in the order of the samples, for the same bits each time.
        for total, more in zip(sums, of_piece(piece), strict=True):
            if total is not None and more is not None:
                total += more
    return [of_input, *(None if total is None else total.to(own) for total in sums)]


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


def _of_parameters(
    backward: _Backward,
    dtype: torch.dtype,
    of_input: Tensor | None,
    grad_output: Tensor,
    input: Tensor,
    parameters: Sequence[Any],
    kept: Sequence[Tensor],
) -> list[Tensor | None]:
    """Writes the gradient of the input, and returns those of the parameters.

    Args:
        backward: The pass.
        dtype: Of the parameters' gradients: the tensors' own, or float64.
        of_input: Where the gradient of the input goes, if it is wanted; it lies as the input does.
        grad_output: As the operator takes it.
        input: Likewise.
        parameters: Likewise.
        kept: What the forward pass saves.
    """
    wanted = backward.wanted
    weight, bias, norm_weight, norm_bias = parameters
    convolution, mean, rstd = kept
    # The gradient of the convolution's output, in its memory format.
    through = torch.empty_like(convolution) if wanted[0] or wanted[1] else None
    of_vectors = [
        torch.empty(vector.shape, dtype=dtype) if vector is not None and wants else None
        for vector, wants in zip((bias, norm_weight, norm_bias), wanted[2:], strict=True)
    ]
    _native.epilogue_gradient(
        backward.block,
        torch.get_num_threads(),
        input.shape,
        _volume("convolution", convolution),
        _memory.raw("mean", mean),
        _memory.raw("rstd", rstd),
        _raw("norm_weight", norm_weight),
        _raw("norm_bias", norm_bias),
        _volume("grad_output", grad_output),
        None if through is None else _volume("grad_convolution", through),
        _raw("grad_bias", of_vectors[0]),
        _raw("grad_norm_weight", of_vectors[1]),
        _raw("grad_norm_bias", of_vectors[2]),
    )
    of_weight = None
    if through is not None and wanted[1]:
        of_weight = torch.empty(weight.shape, dtype=dtype)
        _write_weight_grad(backward.conv, input, through, of_weight)
    if through is not None and of_input is not None:
        _write_input_grad(backward.conv, through, weight, of_input)
    return [of_weight, *of_vectors]


def input_size(grad_output: Tensor, weight: Tensor, conv: Conv) -> list[int]:
    """The size of the input whose convolution is of a size."""
    size = [grad_output.shape[0], weight.shape[0]]
    for axis in range(3):
        reach = conv.dilation[axis] * (weight.shape[2 + axis] - 1) + conv.output_padding[axis]
        inside = grad_output.shape[2 + axis] - 1 + 2 * conv.padding[axis] - reach
        size.append(inside // conv.stride[axis] + 1)
    return size


KERNELS: dict[str, Kernel] = {
    "conv_transpose3d": Kernel(_plan_conv),
    "conv_transpose3d_input_grad": Kernel(_plan_input_grad),
    "conv_transpose3d_weight_grad": Kernel(_plan_weight_grad),
    "conv_transpose3d_block": Kernel(_plan_block),
    "conv_transpose3d_block_training": Kernel(_plan_training),
    "conv_transpose3d_block_grad": Kernel(_plan_block_grad),
    "conv_transpose3d_block_recomputed_grad": Kernel(_plan_recomputed_grad),
}
