"""Calls like one that was made before: looked up by their kind, then only run.

A small volume is computed in a few microseconds, so what depends on the kind of call alone (shapes,
strides, types, parameters) is decided once and looked up from then on. Nothing of the tensors'
values is kept.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from volup import _compose, _memory, _native

Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

# What a block takes after its tensors: stride, padding, output_padding, groups, dilation,
# norm_groups, activation, eps, post_activation, precision, memory.
Arguments = tuple[Any, ...]

# More kinds of calls than a program makes, unless the sizes of its inputs vary endlessly.
_MOST_KEPT = 2048


class Runs(Protocol):
    """What is kept of a kind of call: how it is computed."""

    def run(self, tensors: Sequence[Any], /) -> Any:
        """The results for tensors of this kind; None for one that is not wanted."""


class Plans(Protocol):
    """An operator's kernel on one type of device."""

    def plan(self, tensors: Sequence[Any], rest: Sequence[Any], /) -> Runs:
        """Checks a call and says how those like it are computed."""


# The operators' kernels, for CPU tensors and for CUDA tensors.
KERNELS: dict[bool, dict[str, Plans]] = {False: {}, True: {}}

_kept: dict[Hashable, Any] = {}
_lock = Lock()


def kept(key: Hashable) -> Any:
    """What is kept under a key; None if nothing is."""
    return _kept.get(key)


def keep(key: Hashable, value: Any) -> None:
    """Keeps something under a key, in the place of what was kept first if there is too much."""
    with _lock:
        while len(_kept) >= _MOST_KEPT:
            del _kept[next(iter(_kept))]
        _kept[key] = value


def is_watched() -> bool:
    """Whether a mode, a trace or a transform stands between calls and memory."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


class Unbatched:
    """How calls are computed whose input has no batch: as those of a batch of one."""

    __slots__ = ("batched",)

    def __init__(self, batched: Runs) -> None:
        """Takes how those are computed."""
        self.batched = batched

    def run(self, tensors: Sequence[Any]) -> Sequence[Tensor]:
        """The output."""
        input, *parameters = tensors
        return (self.batched.run((input.unsqueeze(0), *parameters))[0].squeeze(0),)


class Call:
    """An operator with all that it takes beside tensors.

    Attributes:
        name: The operator's.
        rest: What it takes after the tensors.
        is_kept: Whether this is the one for such arguments, and knows how it was computed before.
        follows_flags: Whether PyTorch's flags say in which precision it computes on a GPU.
        related: Calls that its gradients are made of, by what they are called there.
    """

    __slots__ = ("follows_flags", "is_kept", "name", "related", "rest")

    def __init__(self, name: str, rest: Sequence[Any], is_kept: bool) -> None:
        """Takes the attributes."""
        self.name = name
        self.rest = tuple(rest)
        self.is_kept = is_kept
        # No other of the arguments is such a name.
        self.follows_flags = is_kept and not ("ieee" in self.rest or "tf32" in self.rest)
        self.related: dict[Hashable, Call] = {}

    @classmethod
    def of(cls, name: str, rest: Sequence[Any]) -> Call:
        """The one for such arguments."""
        if is_watched():
            # Numbers may stand for any, as the compiler's do.
            return cls(name, rest, False)
        key = name, *(tuple(part) if type(part) is list else part for part in rest)
        call: Call | None = _kept.get(key)
        if call is None:
            call = cls(name, rest, True)
            keep(key, call)
        return call

    def relative(self, key: Hashable, name: str, *rest: Any) -> Call:
        """Another operator's call, which is found by its key from then on."""
        if not self.is_kept:
            return Call.of(name, rest)
        call = self.related.get(key)
        if call is None:
            call = self.related[key] = Call.of(name, rest)
        return call

    def plan(self, tensors: tuple[Tensor | None, ...]) -> Runs | None:
        """How it is computed for tensors; None for those that are the dispatcher's to handle."""
        described = _native.describe(tensors)
        if described is None or not self.is_kept:
            return None
        on_cuda = tensors[0].is_cuda  # type: ignore[union-attr]
        flags = _compose.flagged_precision() if self.follows_flags else None
        key = self, described, on_cuda, flags
        plan: Runs | None = _kept.get(key)
        if plan is None:
            plan = KERNELS[on_cuda][self.name].plan(tensors, self.rest)
            keep(key, plan)
        return plan


def kind(tensors: Tensors, arguments: Arguments) -> Hashable:
    """All that the way to compute a call depends on; None for what nothing may be kept of."""
    described = _native.kind(tensors, torch.is_grad_enabled(), arguments)
    if described is None or is_watched():
        return None
    flags = _compose.flagged_precision() if arguments[9] is None else None
    return described, arguments[6:], tensors[0].is_cuda, flags


def run_kept(tensors: Tensors, arguments: Arguments) -> Tensor | None:
    """The result of a call like one that was checked before, else None.

    Nothing is raised for arguments that are wrong: nothing is kept of them.
    """
    if forward_ad._current_level >= 0:
        return None
    try:
        on_cuda = tensors[0].is_cuda
        if torch.is_autocast_enabled("cuda" if on_cuda else "cpu"):
            if not on_cuda:
                return None
            to = torch.get_autocast_dtype("cuda")
            tensors = tuple(  # type: ignore[assignment]
                None if tensor is None else _memory.autocast(tensor, to) for tensor in tensors
            )
        runs = _kept.get(kind(tensors, arguments))
    except Exception:
        return None
    return None if runs is None else first(runs, tensors)


def first(runs: Runs, tensors: Sequence[Any]) -> Tensor:
    """The output of a call."""
    return runs.run(tensors)[0]  # type: ignore[no-any-return]
