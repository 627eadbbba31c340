"""The operators' kernels for CUDA tensors: planned once for each kind of call, then only launched.

Where the engine cannot run, PyTorch's operators compute in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from volup import _compose, _cpu, _cuda, _memory, _native
from volup._calls import Runs
from volup._cpu import NO_STEPS, Conv, Steps

Given = Sequence[Tensor | None]


class Pass(NamedTuple):
    """What a call asks of the engine.

    Attributes:
        task: "forward", "training", "backward" or "recompute", which is backward without what
            training saves.
        wanted: Which gradients are wanted.
        block: The block.
        input_shape: Batched.
        input_last: Whether the input, or its gradient, lies in channels_last_3d.
        output_last: Whether the output does, the convolution's output, and the output's gradient.
        precision: As the operators take it.
    """

    task: str
    wanted: tuple[bool, ...]
    block: _native.Block
    input_shape: Sequence[int]
    input_last: bool
    output_last: bool
    precision: str | None

    def is_backward(self) -> bool:
        """Whether it computes gradients."""
        return self.task in ("backward", "recompute")


class Instead:
    """PyTorch's operators in the engine's place, for calls of one kind."""

    def __init__(
        self, function: Callable[..., Any], rest: Sequence[Any], like: Sequence[Tensor]
    ) -> None:
        """Takes what follows the tensors, and the results' description."""
        self.function = function
        self.rest = rest
        self.like = [(meta.shape, meta.stride(), meta.dtype) for meta in like]

    def run(self, tensors: Given) -> list[Tensor]:
        """The results, in the strides that the engine's have."""
        device = tensors[0].device  # type: ignore[union-attr]
        results = self.function(*tensors, *self.rest)
        described = []
        for result, (shape, strides, dtype) in zip(results, self.like, strict=True):
            if result is None or result.stride() != strides:
                like = torch.empty_strided(shape, strides, dtype=dtype, device=device)
                result = like if result is None else like.copy_(result)
            described.append(result)
        return described


class Kernel:
    """An operator's kernel.

    Attributes:
        name: The operator's.
        reads: Its tensors, by their names in a pass.
        writes: Its results, likewise.
        of: Says what its arguments ask of the engine.
        instead: Computes the results by PyTorch's operators; None for one that is not wanted.
    """

    def __init__(
        self,
        name: str,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        of: Callable[[Given, Sequence[Any]], Pass],
        instead: Callable[..., Sequence[Tensor | None]],
    ) -> None:
        """Takes the attributes."""
        self.name = name
        self.reads = reads
        self.writes = writes
        self.of = of
        self.instead = instead

    def plan(self, tensors: Given, rest: Sequence[Any]) -> Runs:
        """Checks a call and says how those like it are computed.

        Raises:
            RuntimeError: Its tensors do not fit, or the engine failed.
        """
        device = tensors[0].device  # type: ignore[union-attr]
        for name, tensor in zip(self.reads, tensors, strict=True):
            if tensor is not None:
                _memory.check(name, tensor, device)
        asked = self.of(tensors, rest)
        _check(asked, dict(zip(self.reads, tensors, strict=True)))
        # What the results are like is written down once, for the compiler.
        fakes = getattr(torch.ops.volup, self.name)(*(_without_memory(t) for t in tensors), *rest)
        like = fakes if isinstance(fakes, (tuple, list)) else [fakes]
        if asked.task == "training" and Steps(*rest[5:11]).are_none():
            return Instead(_bare, rest, like)
        launch = None
        if asked.input_shape[0] > 0 and (any(asked.wanted) or not asked.is_backward()):
            obstacle = _cuda.obstacle(device)
            try:
                launch = None if obstacle else _launch(asked, tensors[0])
            except _native.NoEngineError as error:
                obstacle = str(error)
            if obstacle is not None:
                _cuda.warn(obstacle)
                return Instead(self.instead, rest, like)
        unread, unwritten = _parts_without(asked)
        reads = [
            (name, None if name in unread else tensor, _lies_last(asked, name))
            for name, tensor in zip(self.reads, tensors, strict=True)
        ]
        writes = [
            (None if name in unwritten else name, meta)
            for name, meta in zip(self.writes, like, strict=True)
        ]
        return _cuda.Plan(launch, reads, writes, device)


_GRADIENTS = _cuda.SLOTS[10:]
_NONE = (False,) * len(_GRADIENTS)


def _parts_without(asked: Pass) -> tuple[set[str], set[str]]:
    """Tensors that a pass does not read, and results that it does not write."""
    if not asked.is_backward():
        return set(), set()
    unwritten = {name for name, wanted in zip(_GRADIENTS, asked.wanted, strict=True) if not wanted}
    if asked.task == "recompute":
        return set(), unwritten
    # The gradient of one of the convolution's factors is made of the other.
    factors = zip(("weight", "input"), asked.wanted, strict=False)
    return {name for name, reads in factors if not reads} | {"bias"}, unwritten


def _lies_last(asked: Pass, name: str) -> bool:
    if name == "input":
        return asked.input_last
    return asked.output_last and name in ("convolution", "grad_output")


def _launch(asked: Pass, first: Any) -> _native.CudaPass:
    return _native.CudaPass(
        asked.task,
        asked.wanted,
        asked.block,
        torch.Size(asked.input_shape),
        _memory.DTYPES[first.dtype],
        asked.precision or _compose.flagged_precision(),
        asked.input_last,
        asked.output_last,
        first.device.index,
    )


def _without_memory(tensor: Tensor | None) -> Tensor | None:
    if tensor is None:
        return None
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def _check(asked: Pass, named: dict[str, Tensor | None]) -> None:
    """Refuses tensors whose shapes or types do not fit.

    Raises:
        RuntimeError: One of them is.
    """
    tensors = {name: tensor for name, tensor in named.items() if tensor is not None}
    if "input" in tensors and "weight" in tensors:
        _memory.check_fit(asked.block, tensors)
    dtype = next(iter(tensors.values())).dtype
    shape = torch.Size(asked.block.output_shape(torch.Size(asked.input_shape)))
    for name, tensor in tensors.items():
        if name in ("grad_output", "convolution"):
            _memory.expect(name, tensor, shape, dtype)
        elif name not in ("mean", "rstd"):
            _memory.expect(name, tensor, tensor.shape, dtype)
        elif asked.block.norm_groups is not None:
            groups = torch.Size((shape[0], asked.block.norm_groups))
            _memory.expect(name, tensor, groups, _cpu.accumulator(dtype))


# --- What the operators' arguments ask for --------------------------------------------------------


def _of_conv(tensors: Given, rest: Sequence[Any]) -> Pass:
    *conv, precision, channels_last = rest
    rest = (*conv, *NO_STEPS, precision, channels_last)
    return _of_block("forward", (*tensors, None, None), rest)


def _of_block(task: str, tensors: Given, rest: Sequence[Any]) -> Pass:
    input: Any = tensors[0]
    last = _memory.is_channels_last(input)
    block = _block(tensors[1:], rest)
    return Pass(task, _NONE, block, input.shape, last, rest[12], rest[11])


def _block(parameters: Given, rest: Sequence[Any]) -> _native.Block:
    weight: Any
    weight, bias, norm_weight, _ = parameters
    conv, steps = Conv(*rest[:5]), Steps(*rest[5:11])
    return _cpu.native_block(weight.shape, conv, steps, bias is not None, norm_weight is not None)


def _of_input_grad(tensors: Given, rest: Sequence[Any]) -> Pass:
    grad_output: Any
    weight: Any
    grad_output, weight = tensors
    conv, precision, input_last = Conv(*rest[:5]), rest[5], rest[6]
    block = _cpu.native_block(weight.shape, conv, NO_STEPS, False, False)
    shape = _cpu.input_size(grad_output, weight, conv)
    wanted = (True, False, False, False, False)
    last = _memory.is_channels_last(grad_output)
    return Pass("backward", wanted, block, shape, input_last, last, precision)


def _of_weight_grad(tensors: Given, rest: Sequence[Any]) -> Pass:
    input: Any
    grad_output: Any
    input, grad_output = tensors
    kernel_size, conv, precision = rest[0], Conv(*rest[1:6]), rest[6]
    shape = (input.shape[1], grad_output.shape[1] // conv.groups, *kernel_size)
    block = _cpu.native_block(shape, conv, NO_STEPS, False, False)
    wanted = (False, True, False, False, False)
    last = (_memory.is_channels_last(input), _memory.is_channels_last(grad_output))
    return Pass("backward", wanted, block, input.shape, *last, precision)


def _of_block_grad(tensors: Given, rest: Sequence[Any]) -> Pass:
    input: Any = tensors[1]
    convolution: Any = tensors[6]
    block = _block(tensors[2:6], rest)
    last = (_memory.is_channels_last(input), _memory.is_channels_last(convolution))
    return Pass("backward", tuple(rest[12]), block, input.shape, *last, rest[11])


def _of_recomputed_grad(tensors: Given, rest: Sequence[Any]) -> Pass:
    asked = _of_block("recompute", tensors[1:], rest)
    return asked._replace(wanted=tuple(rest[13]))


# --- PyTorch's operators in the engine's place ----------------------------------------------------


def _conv(input: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> list[Tensor]:
    return [_compose.convolve(input, weight, bias, rest[:5], rest[5])]


def _input_grad(grad_output: Tensor, weight: Tensor, *rest: Any) -> list[Tensor | None]:
    shape = _cpu.input_size(grad_output, weight, Conv(*rest[:5]))
    wanted = (True, False, False)
    gradients = _compose.convolution_gradients(
        grad_output, shape, weight, rest[:5], rest[5], wanted
    )
    return [gradients[0]]


def _weight_grad(
    input: Tensor, grad_output: Tensor, kernel_size: Sequence[int], *rest: Any
) -> list[Tensor | None]:
    shape = (input.shape[1], grad_output.shape[1] // rest[3], *kernel_size)
    wanted = (False, True, False)
    gradients = _compose.convolution_gradients(grad_output, input, shape, rest[:5], rest[5], wanted)
    return [gradients[1]]


def _block_forward(*arguments: Any) -> list[Tensor]:
    return _followed(*arguments)[:1]


def _followed(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    *rest: Any,
) -> list[Tensor]:
    """The output and the convolution's."""
    y = _compose.convolve(input, weight, bias, rest[:5], rest[11])
    output = _compose.follow(y, norm_weight, norm_bias, *Steps(*rest[5:11]).arguments())
    # An operator's results are tensors apart.
    return [output.clone() if output is y else output, y]


def _block_training(*arguments: Any) -> list[Tensor]:
    steps = Steps(*arguments[10:16])
    output, y = _followed(*arguments)
    if steps.norm_groups is None:
        mean, rstd = (y.new_empty(0, dtype=_cpu.accumulator(y.dtype)) for _ in range(2))
    else:
        activation = steps.arguments()[0]
        mean, rstd = _compose.statistics(y, activation, steps.norm_groups, steps.eps)
    return [output, y, mean, rstd]


def _bare(*arguments: Any) -> list[Tensor]:
    """What a block of a convolution alone saves; the engine saves nothing of it."""
    conv, (precision, channels_last) = arguments[5:10], arguments[16:]
    operator = torch.ops.volup.conv_transpose3d
    y = operator(*arguments[:3], *conv, precision, channels_last)
    return [y.clone(), y, *(y.new_empty(0, dtype=_cpu.accumulator(y.dtype)) for _ in range(2))]


def _block_grad(
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
) -> list[Tensor | None]:
    steps, precision, wanted = Steps(*rest[5:11]), rest[11], rest[12]
    through, *of_norm = _compose.follow_gradients(
        grad_output, convolution, norm_weight, norm_bias, *steps.arguments()
    )
    of_conv = _compose.convolution_gradients(
        through, input, weight, rest[:5], precision, wanted[:3]
    )
    gradients = (*of_conv, *of_norm)
    return [g if wants else None for g, wants in zip(gradients, wanted, strict=True)]


def _block_recomputed_grad(grad_output: Tensor, *arguments: Any) -> list[Tensor | None]:
    *block, wanted = arguments
    kept = _block_training(*block)[1:]
    return _block_grad(grad_output, *block[:5], *kept, *block[5:17], wanted)


_BLOCK = _cuda.NAMES
_SAVED = ("convolution", "mean", "rstd")
KERNELS: dict[str, Kernel] = {
    kernel.name: kernel
    for kernel in (
        Kernel("conv_transpose3d", _BLOCK[:3], ("output",), _of_conv, _conv),
        Kernel(
            "conv_transpose3d_input_grad",
            ("grad_output", "weight"),
            ("grad_input",),
            _of_input_grad,
            _input_grad,
        ),
        Kernel(
            "conv_transpose3d_weight_grad",
            ("input", "grad_output"),
            ("grad_weight",),
            _of_weight_grad,
            _weight_grad,
        ),
        Kernel(
            "conv_transpose3d_block",
            _BLOCK,
            ("output",),
            partial(_of_block, "forward"),
            _block_forward,
        ),
        Kernel(
            "conv_transpose3d_block_training",
            _BLOCK,
            ("output", *_SAVED),
            partial(_of_block, "training"),
            _block_training,
        ),
        Kernel(
            "conv_transpose3d_block_grad",
            ("grad_output", *_BLOCK, *_SAVED),
            _GRADIENTS,
            _of_block_grad,
            _block_grad,
        ),
        Kernel(
            "conv_transpose3d_block_recomputed_grad",
            ("grad_output", *_BLOCK),
            _GRADIENTS,
            _of_recomputed_grad,
            _block_recomputed_grad,
        ),
    )
}
