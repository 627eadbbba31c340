"""Calls on CUDA tensors: planned once for each kind of call, then only launched.

A GPU is done with a small volume in a few microseconds, so what depends on the kind of call alone
(shapes, strides, types, parameters) is decided once and looked up from then on. Nothing of the
tensors' values is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Hashable, Sequence
from threading import Lock
from typing import Protocol

import torch
from torch import Tensor
from torch.autograd import forward_ad

from volup import _memory, _native
from volup._compose import Activation, flagged_precision

# A pass's tensors, in the order in which the native module takes their addresses.
SLOTS = (
    "input",
    "weight",
    "bias",
    "norm_weight",
    "norm_bias",
    "output",
    "convolution",
    "mean",
    "rstd",
    "grad_output",
    "grad_input",
    "grad_weight",
    "grad_bias",
    "grad_norm_weight",
    "grad_norm_bias",
)
# Those of a forward pass.
NAMES = SLOTS[:5]
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

# More kinds of calls than a program makes, unless the sizes of its inputs vary endlessly.
_MOST_PLANS = 1024
# What the kernels' reads are aligned to; PyTorch aligns to 512, but a view may begin anywhere.
_ALIGNMENT = 16

# Of tensors whose class does not say that they are without memory.
NO_DISPATCH = Tensor.__torch_dispatch__


class Runs(Protocol):
    """What is kept of a kind of call: how it is computed."""

    def run(self, tensors: Sequence[Tensor | None], /) -> Sequence[Tensor]:
        """The results for tensors of this kind."""


class Plan:
    """One pass of a block, for calls of one kind.

    Attributes:
        launch: Launches the kernels; None where there is nothing to compute.
        reads: Of each tensor that is given, where its address goes, its bytes, its bytes an element
            and, if that is not how it lies, the memory format to copy it to. None for one that is
            missing or has no part in the pass.
        writes: Of each result, where its address goes (None for one that is not wanted), its shape,
            strides and type.
        device: Of everything.
        index: Of the device.
        workspace: Bytes of scratch memory.
    """

    __slots__ = ("device", "index", "launch", "reads", "workspace", "writes")

    def __init__(
        self,
        launch: _native.CudaPass | None,
        reads: Sequence[tuple[str, Tensor | None, bool]],
        writes: Sequence[tuple[str | None, Tensor]],
        device: torch.device,
    ) -> None:
        """Takes everything's description from tensors.

        Args:
            launch: As the attribute.
            reads: Name, tensor, and whether it has to lie in channels_last_3d.
            writes: Name, and a tensor without memory.
            device: As the attribute.
        """
        self.launch = launch
        self.reads = [
            None if tensor is None else _read(name, tensor, channels_last)
            for name, tensor, channels_last in reads
        ]
        self.writes = [
            (None if name is None else SLOTS.index(name), like.shape, like.stride(), like.dtype)
            for name, like in writes
        ]
        self.device = device
        self.index = device.index
        self.workspace = 0 if launch is None else launch.workspace_bytes

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor]:
        """Launches the kernels on the device's current stream, and waits for nothing.

        Raises:
            RuntimeError: A tensor has no memory, or the launch failed.
        """
        addresses = [0] * 16
        results = []
        for slot, shape, strides, dtype in self.writes:
            result = torch.empty_strided(shape, strides, dtype=dtype, device=self.device)
            if type(result) is not Tensor:
                # Under a mode that fakes what is allocated, the result is no memory either.
                kind = type(result).__name__
                raise RuntimeError(f"output must be a plain torch.Tensor, got {kind}")
            results.append(result)
            if slot is not None:
                addresses[slot] = result.data_ptr()
        # The copies live until the launch: what is allocated later is used later on the stream.
        held = []
        for tensor, read in zip(tensors, self.reads, strict=True):
            if tensor is None or read is None:
                continue
            slot, nbytes, itemsize, memory_format = read
            if memory_format is not None:
                tensor = tensor.contiguous(memory_format=memory_format)
                held.append(tensor)
            end = tensor.storage_offset() * itemsize + nbytes
            if tensor.untyped_storage().nbytes() < end:
                raise RuntimeError(f"{SLOTS[slot]} has no memory: its storage was freed")
            address = tensor.data_ptr()
            if address % _ALIGNMENT:
                tensor = tensor.clone()
                held.append(tensor)
                address = tensor.data_ptr()
            addresses[slot] = address
        if self.launch is None:
            return [result.zero_() for result in results]
        if self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=self.device)
            addresses[15] = workspace.data_ptr()
        self.launch.run(addresses, torch._C._cuda_getCurrentRawStream(self.index))
        return results


def _read(
    name: str, tensor: Tensor, channels_last: bool
) -> tuple[int, int, int, torch.memory_format | None]:
    memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
    batch = tensor.unsqueeze(0) if tensor.dim() == 4 else tensor
    dense = batch.is_contiguous(memory_format=memory_format)
    itemsize = tensor.element_size()
    copied = None if dense else memory_format
    return SLOTS.index(name), tensor.numel() * itemsize, itemsize, copied


_plans: dict[Hashable, Runs] = {}
_lock = Lock()


def launch_planned(
    tensors: Tensors,
    stride: object,
    padding: object,
    output_padding: object,
    groups: object,
    dilation: object,
    activation: Activation,
    norm_groups: object,
    eps: float,
    post_activation: Activation,
    precision: str | None,
    memory: str | None,
) -> Tensor | None:
    """The result of a call like one that was checked and planned before, else None.

    Nothing is raised for arguments that are wrong: no plan is found for them.
    """
    if forward_ad._current_level >= 0:
        return None
    try:
        if torch.is_autocast_enabled():
            tensors = _autocast(tensors)
        integers = _native.integers(stride, padding, output_padding, groups, dilation, norm_groups)
        key = _key(tensors, integers, activation, eps, post_activation, precision, memory)
        plan = _plans.get(key)
    except Exception:
        return None
    return None if plan is None else plan.run(tensors)[0]


def is_watched() -> bool:
    """Whether a mode, a trace or a transform stands between calls and memory."""
    return (
        torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
        or torch._C._functorch.peek_interpreter_stack() is not None
    )


def planned(key: Hashable) -> Runs | None:
    """How calls of a kind are computed, if that is known."""
    return _plans.get(key)


def remember(key: Hashable, plan: Runs) -> None:
    """Keeps how calls of a kind are computed."""
    with _lock:
        while len(_plans) >= _MOST_PLANS:
            del _plans[next(iter(_plans))]
        _plans[key] = plan


def run(
    make: Callable[[Tensors], Runs],
    tensors: dict[str, Tensor],
    integers: bytes,
    activation: Activation,
    eps: float,
    post_activation: Activation,
    precision: str | None,
    memory: str | None,
) -> Tensor:
    """The result of a call whose tensors have been checked; keeps how it was computed.

    Args:
        make: Says how calls with tensors like these are computed.
        tensors: As for ``conv_transpose3d_block``, and so on.
        integers: Of ``_native.integers``.
        activation: As there.
        eps: As there.
        post_activation: As there.
        precision: As there.
        memory: As there.

    Raises:
        RuntimeError: The engine failed.
        _native.NoEngineError: The engine has no kernels for this call.
    """
    resolved = {name: tensor.resolve_neg() for name, tensor in tensors.items()}
    each: Tensors = tuple(resolved.get(name) for name in NAMES)  # type: ignore[assignment]
    # A key is compared by value, so it holds no object whose value may change.
    if isinstance(activation, tuple):
        activation = activation[0], float(activation[1])
    if isinstance(post_activation, tuple):
        post_activation = post_activation[0], float(post_activation[1])
    key = _key(each, integers, activation, float(eps), post_activation, precision, memory)
    plan = _plans.get(key)
    if plan is None:
        plan = make(each)
        if key is not None:
            remember(key, plan)
    return plan.run(each)[0]


def obstacle(device: torch.device) -> str | None:
    """Why the engine cannot run on a device; None if it can."""
    if device not in _obstacles:
        if torch.version.hip is not None:
            _obstacles[device] = "this PyTorch is for AMD GPUs"
        else:
            _obstacles[device] = _native.cuda_status(device.index)
    return _obstacles[device]


_obstacles: dict[torch.device, str | None] = {}
_warned: set[str] = set()


def warn(reason: str) -> None:
    """Says why PyTorch computes instead, once a process and reason."""
    if reason not in _warned:
        _warned.add(reason)
        text = f"volup's CUDA engine cannot compute this, so PyTorch does: {reason}"
        warnings.warn(text, RuntimeWarning, stacklevel=4)


def _autocast(tensors: Tensors) -> Tensors:
    to = torch.get_autocast_dtype("cuda")
    return tuple(  # type: ignore[return-value]
        None if tensor is None else _memory.autocast(tensor, to) for tensor in tensors
    )


def _key(
    tensors: Tensors,
    integers: bytes,
    activation: Activation,
    eps: float,
    post_activation: Activation,
    precision: str | None,
    memory: str | None,
) -> Hashable:
    """All that a plan depends on; None, which no plan has, where tensors may have no memory."""
    if is_watched():
        return None
    grad = torch.is_grad_enabled()
    records = False
    parts: list[Hashable] = [integers, activation, eps, post_activation]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        if tensor.is_neg() or type(tensor).__torch_dispatch__ is not NO_DISPATCH:
            return None
        records = records or (grad and tensor.requires_grad)
        parts += (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    if records:
        # The flags count again when the gradients are computed.
        parts.append((precision, memory))
    elif precision is None and tensors[0].dtype is torch.float32:
        parts.append(flagged_precision())
    else:
        parts.append(precision)
    return tuple(parts)


def plan_forward(block: _native.Block, precision: str | None, tensors: Tensors) -> Plan:
    """Plans a block for tensors of these shapes, strides and types.

    Raises:
        RuntimeError: The engine failed.
        _native.NoEngineError: The engine has no kernels for this call.
    """
    input, weight, *vectors = tensors
    batch = input if input.dim() == 5 else input.unsqueeze(0)
    shape = block.output_shape(input.shape)
    memory_format = _memory.output_format(block, batch, weight, vectors[0])
    output = torch.empty(shape, dtype=input.dtype, device="meta", memory_format=memory_format)
    channels_last = _memory.is_channels_last(batch)
    launch = None
    if output.numel() > 0:
        launch = _native.CudaPass(
            "forward",
            (False,) * 5,
            block,
            input.shape,
            _memory.DTYPES[input.dtype],
            precision or flagged_precision(),
            channels_last,
            memory_format is torch.channels_last_3d,
            input.device.index,
        )
    reads = [
        (name, tensor, channels_last and name == "input")
        for name, tensor in zip(NAMES, tensors, strict=True)
    ]
    output = output if input.dim() == 5 else output.squeeze(0)
    return Plan(launch, reads, [("output", output)], input.device)
