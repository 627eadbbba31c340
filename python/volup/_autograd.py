"""The operators' gradients, and the operators as functions that record them.

A call is recorded as one node that knows its :class:`Call`, not every argument: a small volume is
computed in less time than PyTorch takes to pass twenty arguments on. For the same reason the
dispatcher is passed by where it would do no more than to call the kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from volup import _calls, _memory
from volup._calls import Call, Runs
from volup._compose import follow
from volup._cpu import Steps


class _Recorded(torch.autograd.Function):
    """An operator that records its gradient.

    Attributes:
        count: How many tensors it takes.
        keeps: Whether all of its results but the first are what the gradient needs.
    """

    count: ClassVar[int]
    keeps: ClassVar[bool] = False

    @classmethod
    def forward(cls, ctx: Any, call: Call, plan: Runs | None, *tensors: Any) -> Any:
        """The results of a call; the output alone, if it is known how to compute it."""
        ctx.call = call
        if plan is not None:
            results = plan.run(tensors)
            cls.save(ctx, tensors, results[1:])
            return results[0]
        results = whole(_compute(call, tensors), tensors)
        kept = results[1:] if cls.keeps else ()
        cls.save(ctx, tensors, kept)
        ctx.mark_non_differentiable(*kept)
        return results

    @staticmethod
    def save(ctx: Any, tensors: Sequence[Any], kept: Sequence[Any]) -> None:
        """Keeps what the gradient needs."""
        raise NotImplementedError

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """The gradients of the tensors."""
        raise NotImplementedError

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        """As PyTorch calls it: with nothing for what is no tensor."""
        return None, None, *cls.gradients(ctx, *grads)


def _needed(ctx: Any) -> tuple[bool, ...]:
    """Which tensors' gradients are."""
    return ctx.needs_input_grad[2:]  # type: ignore[no-any-return]


# --- The convolution ------------------------------------------------------------------------------


class _Bilinear(_Recorded):
    """The convolution, and the gradients of its factors: that of each is made of the other."""

    count = 2

    @staticmethod
    def save(ctx: Any, tensors: Sequence[Any], kept: Sequence[Any]) -> None:
        first, second = tensors[0], tensors[1]
        of_first, of_second = ctx.needs_input_grad[2:4]
        ctx.save_for_backward(first if of_second else None, second if of_first else None)
        ctx.last = (
            of_first and _memory.is_channels_last(first),
            of_second and _memory.is_channels_last(second),
        )
        ctx.kernel_size = second.shape[2:]


class _Conv(_Bilinear):
    count = 3

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        (grad,) = grads
        input, weight = ctx.saved_tensors
        call, (of_input, of_weight, of_bias) = ctx.call, _needed(ctx)
        return (
            run(_input_grad(call, call.rest[:6], ctx.last[0]), grad, weight) if of_input else None,
            run(_weight_grad(call, ctx.kernel_size, call.rest[:6]), input, grad)
            if of_weight
            else None,
            grad.sum((0, 2, 3, 4)) if of_bias else None,
        )


def _input_grad(call: Call, rest: Sequence[Any], last: bool) -> Call:
    return call.relative(("input", last), "conv_transpose3d_input_grad", *rest, last)


def _weight_grad(call: Call, kernel_size: Sequence[int], rest: Sequence[Any]) -> Call:
    return call.relative(kernel_size, "conv_transpose3d_weight_grad", kernel_size, *rest)


def _forward(call: Call, rest: Sequence[Any], last: bool) -> Call:
    return call.relative(("output", last), "conv_transpose3d", *rest, last)


class _InputGrad(_Bilinear):
    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        (grad,) = grads
        grad_output, weight = ctx.saved_tensors
        call, (of_output, of_weight) = ctx.call, _needed(ctx)
        rest = call.rest[:6]
        return (
            run(_forward(call, rest, ctx.last[0]), grad, weight, None) if of_output else None,
            run(_weight_grad(call, ctx.kernel_size, rest), grad, grad_output)
            if of_weight
            else None,
        )


class _WeightGrad(_Bilinear):
    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        (grad,) = grads
        input, grad_output = ctx.saved_tensors
        call, (of_input, of_output) = ctx.call, _needed(ctx)
        rest = call.rest[1:7]
        return (
            run(_input_grad(call, rest, ctx.last[0]), grad_output, grad) if of_input else None,
            run(_forward(call, rest, ctx.last[1]), input, grad, None) if of_output else None,
        )


# --- The block ------------------------------------------------------------------------------------


class _Block(_Recorded):
    """A block: keeps its five tensors, and of the training operator what it has saved."""

    count = 5
    name_of_gradient: ClassVar[str] = "conv_transpose3d_block_recomputed_grad"

    @staticmethod
    def save(ctx: Any, tensors: Sequence[Any], kept: Sequence[Any]) -> None:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors, *kept)

    @classmethod
    def backward(cls, ctx: Any, *grads: Any) -> Any:
        wanted = _needed(ctx)
        if grads[0] is None:
            return None, None, *[None] * 5
        call = ctx.call
        gradient = call.related.get(wanted)
        if gradient is None:
            rest = (*cls.arguments(call), [bool(wants) for wants in wanted])
            gradient = call.relative(wanted, cls.name_of_gradient, *rest)
        return None, None, *_those(run(gradient, grads[0], *ctx.saved_tensors), wanted)

    @staticmethod
    def arguments(call: Call) -> Sequence[Any]:
        """What the gradient takes of the arguments."""
        return call.rest


class _BlockTraining(_Block):
    keeps = True
    name_of_gradient = "conv_transpose3d_block_grad"

    @staticmethod
    def arguments(call: Call) -> Sequence[Any]:
        return call.rest[:12]


def _those(gradients: Sequence[Any], wanted: Sequence[bool]) -> list[Any]:
    return [gradient if wants else None for gradient, wants in zip(gradients, wanted, strict=True)]


class _BlockGrad(_Recorded):
    count = 9

    @staticmethod
    def save(ctx: Any, tensors: Sequence[Any], kept: Sequence[Any]) -> None:
        # Of what was saved nothing is needed.
        ctx.save_for_backward(*tensors[:6])
        ctx.set_materialize_grads(False)

    @staticmethod
    def gradients(ctx: Any, *grads: Any) -> Sequence[Tensor | None]:
        """The gradient of a block's gradient: that of a composition, differentiated twice."""
        recorded = torch.is_grad_enabled()
        # Through tensors of its own: what one depends on by its history is no part of this.
        with torch.enable_grad():
            given: list[Any] = [
                None
                if t is None
                else t.view_as(t)
                if t.requires_grad
                else t.detach().requires_grad_()
                for t in ctx.saved_tensors
            ]
            output = _composed(given[1:], ctx.call.rest)
            wanted = [
                (tensor, grad)
                for tensor, grad in zip(given[1:], grads, strict=True)
                if tensor is not None and grad is not None and grad.shape == tensor.shape
            ]
            needs = _needed(ctx)
            needed = [tensor for tensor, needs in zip(given, needs[:6], strict=True) if needs]
            results: list[Tensor | None] = [None] * len(needed)
            if wanted and needed:
                tensors, seeds = zip(*wanted, strict=True)
                first = torch.autograd.grad(output, tensors, given[0], create_graph=True)
                second = torch.autograd.grad(
                    first, needed, seeds, create_graph=recorded, allow_unused=True
                )
                results = list(second)
        found = iter(results)
        return [next(found) if needs else None for needs in needs[:6]] + [None] * (len(needs) - 6)


class _RecomputedGrad(_BlockGrad):
    count = 6


def _composed(tensors: Sequence[Any], rest: Sequence[Any]) -> Tensor:
    """A block by operators that can be differentiated any number of times."""
    input, weight, bias, norm_weight, norm_bias = tensors
    conv, steps, precision = rest[:5], Steps(*rest[5:11]), rest[11]
    channels_last = _memory.is_channels_last(input)
    with torch.autocast(input.device.type, enabled=False):
        call = Call.of("conv_transpose3d", (*conv, precision, channels_last))
        y = run(call, input, weight, bias)
        return follow(y, norm_weight, norm_bias, *steps.arguments())


FUNCTIONS: dict[str, type[_Recorded]] = {
    "conv_transpose3d": _Conv,
    "conv_transpose3d_input_grad": _InputGrad,
    "conv_transpose3d_weight_grad": _WeightGrad,
    "conv_transpose3d_block": _Block,
    "conv_transpose3d_block_training": _BlockTraining,
    "conv_transpose3d_block_grad": _BlockGrad,
    "conv_transpose3d_block_recomputed_grad": _RecomputedGrad,
}
for _name, _class in FUNCTIONS.items():
    _class.__name__ = _class.__qualname__ = _name


# --- Operators as functions -----------------------------------------------------------------------


def whole(results: Sequence[Any], tensors: Sequence[Any]) -> Any:
    """Results as an operator returns them: an empty tensor for one that is not there."""
    if len(results) == 1:
        return results[0]
    return tuple(tensors[0].new_empty(0) if r is None else r for r in results)


def _compute(call: Call, tensors: tuple[Any, ...]) -> Any:
    """A call's results, with nothing recorded."""
    if not _calls.is_watched():
        plan = call.plan(tensors)
        if plan is not None:
            return plan.run(tensors)
    with torch._C._AutoDispatchBelowAutograd():
        results = getattr(torch.ops.volup, call.name).default(*tensors, *call.rest)
    return results if isinstance(results, (tuple, list)) else [results]


def _records(tensors: Sequence[Any]) -> bool:
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)


def run(call: Call, *tensors: Any) -> Any:
    """An operator's results; of more than one, None may stand for one that is not wanted."""
    if torch.compiler.is_compiling() or _calls.is_watched():
        return getattr(torch.ops.volup, call.name).default(*tensors, *call.rest)
    if _records(tensors):
        return FUNCTIONS[call.name].apply(call, None, *tensors)
    results = _compute(call, tensors)
    return results[0] if len(results) == 1 else results


def from_dispatcher(name: str, *arguments: Any) -> Any:
    """An operator's kernel for what may require gradients, as PyTorch's dispatcher calls it."""
    function = FUNCTIONS[name]
    tensors, rest = arguments[: function.count], arguments[function.count :]
    call = Call.of(name, rest)
    if _records(tensors):
        return function.apply(call, None, *tensors)
    return whole(_compute(call, tensors), tensors)


class Recording:
    """How calls of a kind are computed and recorded, where nothing watches.

    Attributes:
        apply: What the function's own `apply` calls after it has looked for what is excluded here.
        call: The operator's.
        count: How many tensors it takes.
        plan: How it is computed.
    """

    __slots__ = ("apply", "call", "count", "plan")

    def __init__(self, call: Call, plan: Runs) -> None:
        """Takes the attributes."""
        function = FUNCTIONS[call.name]
        self.apply: Any = super(torch.autograd.Function, function).apply  # type: ignore[misc]
        self.call = call
        self.count = function.count
        self.plan = plan

    def run(self, tensors: Sequence[Any]) -> Sequence[Tensor]:
        """The output."""
        return (self.apply(self.call, self.plan, *tensors[: self.count]),)


class Dispatched(NamedTuple):
    """How a call is computed where tensors or a mode are the dispatcher's to handle.

    Attributes:
        call: The operator's.
    """

    call: Call

    def run(self, tensors: Sequence[Any]) -> Sequence[Any]:
        """The output, and whatever comes with it."""
        results = run(self.call, *tensors[: FUNCTIONS[self.call.name].count])
        return results if isinstance(results, (tuple, list)) else (results,)
