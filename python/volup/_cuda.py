"""Passes on CUDA tensors: planned once for each kind of call, then only launched."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from volup import _memory, _native, frozen
from volup._calls import Tensors
from volup._compose import flagged_precision

# A pass's tensors, in the order in which the native module takes their addresses.
SLOTS: tuple[str, ...] = (
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
NAMES: tuple[str, ...] = SLOTS[:5]
# After them come the scratch memory and the packed weight.
_WORKSPACE = len(SLOTS)
_PACKED = _WORKSPACE + 1
# What the kernels' reads are aligned to; PyTorch aligns to 512, but a view may begin anywhere.
_ALIGNMENT = 16


class Plan:
    """One pass of a block, for calls of one kind.

    Attributes:
        launch: Launches the kernels; None where there is nothing to compute.
        slots: Where the address of each tensor goes: of those that are given, the results that are
            wanted, the scratch memory. A byte each, 255 for one that has no part in the pass.
        copied: Which of the given tensors are copied first, and the memory format that they have to
            lie in; None for their own, at an address that kernels can read.
        writes: Of each result a tensor like it that has no memory; None for one that is not wanted.
        device: Of everything.
        index: Of the device.
        workspace: Bytes of scratch memory.
        weight: Which of the given tensors is the weight, if it is read where it lies.
    """

    __slots__ = (
        "_packing",
        "copied",
        "device",
        "index",
        "launch",
        "slots",
        "weight",
        "workspace",
        "writes",
    )

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
            reads: Name, tensor, and whether it has to lie in channels_last_3d; no tensor for one
                that is missing or has no part in the pass.
            writes: Name, and a tensor without memory; no name for one that is not wanted.
            device: As the attribute.

        Raises:
            RuntimeError: A tensor has no memory.
        """
        self.launch = launch
        slots = [255 if tensor is None else SLOTS.index(name) for name, tensor, _ in reads]
        slots += [SLOTS.index(name) for name, _ in writes if name is not None]
        self.slots = bytes([*slots, _WORKSPACE])
        self.weight = next((i for i, (name, *_) in enumerate(reads) if name == "weight"), None)
        self.copied: list[tuple[int, torch.memory_format | None]] = []
        for i, (name, tensor, channels_last) in enumerate(reads):
            if tensor is None:
                continue
            memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
            batch = tensor.unsqueeze(0) if tensor.dim() == 4 else tensor
            if not batch.is_contiguous(memory_format=memory_format):
                self.copied.append((i, memory_format))
            elif _memory.raw(name, tensor)[0] % _ALIGNMENT:
                self.copied.append((i, None))
        if any(i == self.weight for i, _ in self.copied):
            self.weight = None
        self.writes = [None if name is None else _pattern(like, device) for name, like in writes]
        self.device = device
        self.index = device.index
        self.workspace = 0 if launch is None else launch.workspace_bytes
        self._packing: list[tuple[str, int] | None] = []

    @property
    def packing(self) -> tuple[str, int] | None:
        """How the weight is packed, and into how many bytes; None if it is not.

        It is asked for once, as it takes as long as a small call.
        """
        if not self._packing:
            self._packing.append(None if self.launch is None else self.launch.packing)
        return self._packing[0]

    def run(self, tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Launches the kernels on the device's current stream, and waits for nothing.

        Raises:
            RuntimeError: The launch failed.
        """
        device = self.device
        results: list[Tensor | None] = []
        passed = [*tensors]
        for write in self.writes:
            if write is None:
                results.append(None)
                continue
            result = torch.empty_like(write)
            if type(result) is not Tensor:
                # Under a mode that fakes what is allocated, the result is no memory either.
                kind = type(result).__name__
                raise RuntimeError(f"output must be a plain torch.Tensor, got {kind}")
            results.append(result)
            passed.append(result)
        if self.launch is None:
            return [None if result is None else result.zero_() for result in results]
        # Copies live until the launch: what is allocated later is used later on the stream.
        for i, memory_format in self.copied:
            tensor: Any = tensors[i]
            if memory_format is None:
                passed[i] = tensor.clone()
            else:
                passed[i] = tensor.contiguous(memory_format=memory_format)
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        slots = self.slots
        if frozen.weights and self.weight is not None:
            weight: Any = tensors[self.weight]
            forms = frozen.weights.get(weight)
            packed = None if forms is None else forms.get(weight, self.launch, self.packing, stream)
            if packed is not None:
                passed.append(packed)
                slots = bytes([*slots[:-1], _PACKED, _WORKSPACE])
        try:
            self.launch.run(passed, slots, stream)
        except MemoryError:
            # With PyTorch's own error, if it has none to give.
            passed.append(torch.empty(self.workspace, dtype=torch.uint8, device=device))
            self.launch.run(passed, slots, stream)
        return results


def _pattern(like: Tensor, device: torch.device) -> Tensor:
    """A tensor to make others like, which takes less time than from its sizes and all the rest."""
    pattern = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=device)
    pattern.untyped_storage().resize_(0)
    return pattern


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
