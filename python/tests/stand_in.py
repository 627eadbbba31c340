"""The CUDA engine's place taken by the CPU's, so that what drives it runs without a GPU."""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch

from volup import _calls, _cpu, _cuda, _cuda_operators, _memory, _native, functional
from volup._cpu import NO_STEPS, Conv, Steps


class OnCuda(torch.Tensor):
    """A CPU tensor that claims to be on a GPU, once its class is out of PyTorch's sight."""

    is_cuda = True


def pretend(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(OnCuda)


def addresses_of(tensors: Sequence[torch.Tensor | None], slots: bytes) -> list[int]:
    """Where the tensors of a pass lie, as the native module has it."""
    addresses = [0] * 17
    for tensor, slot in zip(tensors, slots, strict=False):
        if slot != 255:
            assert tensor is not None
            addresses[slot] = tensor.data_ptr()
    return addresses


class CpuPass:
    """A pass on addresses of the host's memory, which checks what it is given."""

    workspace_bytes = 100
    # Of each block: itself, so that it lives, its weight's shape, its steps.
    blocks: ClassVar[dict[int, tuple[_native.Block, torch.Size, Steps]]] = {}
    # The passes, with their precision.
    planned: ClassVar[list[tuple[str, str]]] = []
    launched: ClassVar[list[tuple[str, str]]] = []
    # The gradients that were wanted of those that were launched, if any.
    wanted_of: ClassVar[list[tuple[bool, ...]]] = []
    # Where weights were packed to.
    packed: ClassVar[list[int]] = []
    # Tasks that there are no kernels for.
    missing: ClassVar[set[str]] = set()

    def __init__(
        self,
        task: str,
        wanted: tuple[bool, ...],
        block: _native.Block,
        input_shape: torch.Size,
        dtype: str,
        precision: str,
        input_last: bool,
        output_last: bool,
        ordinal: int | None,
    ) -> None:
        assert precision in ("ieee", "tf32")
        if task in CpuPass.missing:
            raise _native.NoEngineError("no such kernel")
        self.task, self.wanted, self.precision = task, wanted, precision
        self.block, self.dtype = block, dtype
        self.last = {"input": input_last, "grad_input": input_last}
        for name in ("output", "convolution", "grad_output"):
            self.last[name] = output_last
        _, weight, self.steps = CpuPass.blocks[id(block)]
        output = torch.Size(block.output_shape(input_shape))
        groups = block.norm_groups
        statistics = (output[0], groups) if groups else (0,)
        self.shapes = dict.fromkeys(("output", "convolution", "grad_output"), output)
        self.shapes |= dict.fromkeys(("input", "grad_input"), torch.Size(input_shape))
        self.shapes |= dict.fromkeys(("weight", "grad_weight"), weight)
        self.shapes |= dict.fromkeys(("mean", "rstd"), torch.Size(statistics))
        CpuPass.planned.append((task, precision))

    def run(self, tensors: Sequence[torch.Tensor | None], slots: bytes, stream: int) -> None:
        if len(tensors) < len(slots):
            raise MemoryError("no scratch memory")
        *addresses, packed = addresses_of(tensors, slots)
        assert addresses[-1]
        assert all(address % 16 == 0 for address in addresses)
        CpuPass.launched.append((self.task, self.precision))
        self.addresses = dict(zip(_cuda.SLOTS, addresses, strict=False))
        # What is packed is a copy, so that it shows which of both is read.
        self.addresses["weight"] = packed or self.addresses["weight"]
        if self.task in ("forward", "training"):
            self.forward()
            return
        CpuPass.wanted_of.append(self.wanted)
        self.backward(dict(zip(_cuda.SLOTS[10:], self.wanted, strict=True)))

    @property
    def packing(self) -> tuple[str, int] | None:
        if self.task != "forward":
            return None
        weight = torch.empty(self.shapes["weight"], dtype=getattr(torch, self.dtype), device="meta")
        return f"{weight.shape} {weight.dtype}", weight.nbytes

    def pack(self, weight: torch.Tensor, packed: torch.Tensor, stream: int) -> None:
        packed.copy_(weight.detach().contiguous().view(-1).view(torch.uint8))
        CpuPass.packed.append(packed.data_ptr())

    def raw(self, name: str) -> Any:
        """Address, shape and type of a tensor; None for one that is not there."""
        shape = self.shapes.get(name, self.shapes["output"][1:2])
        if not self.addresses[name] and shape.numel():
            return None
        wide = name in ("mean", "rstd") and self.dtype != "float64"
        return self.addresses[name], shape, "float32" if wide else self.dtype

    def made(self, name: str) -> torch.Tensor:
        """Memory for a tensor of the workspace."""
        wide = name in ("mean", "rstd") and self.dtype != "float64"
        dtype = torch.float32 if wide else getattr(torch, self.dtype)
        made = torch.zeros(self.shapes[name], dtype=dtype)
        last = self.last.get(name, False)
        return made.contiguous(memory_format=torch.channels_last_3d) if last else made

    def volume(self, name: str) -> Any:
        return self.raw(name), self.last[name]

    def forward(self) -> None:
        saves = self.task != "forward"
        # Of a bare convolution nothing is saved.
        assert not (saves and self.steps.are_none())
        there = {name for name, address in self.addresses.items() if address}
        assert "output" in there
        assert ("convolution" in there) == saves
        assert not any(name.startswith("grad") for name in there)
        given = [self.raw(name) for name in _cuda.NAMES[1:]]
        threads, input = torch.get_num_threads(), self.volume("input")
        if saves:
            kept = [self.raw(name) for name in ("convolution", "mean", "rstd", "output")]
            last = self.last["output"]
            _native.forward_for_training(self.block, threads, input, *given, *kept, last)
        else:
            self.block.forward_cpu(threads, *input, *given, *self.volume("output"), None)

    def backward(self, wanted: dict[str, bool]) -> None:
        for name, is_wanted in wanted.items():
            assert bool(self.addresses[name]) == is_wanted, name
        recomputes = self.task == "recompute"
        kept = ("convolution", "mean", "rstd")
        assert not self.addresses["output"]
        # What a pass has no use for need not be there, and is not copied for it.
        assert recomputes or not self.addresses["bias"]
        assert bool(self.addresses["input"]) == (wanted["grad_weight"] or recomputes)
        assert bool(self.addresses["weight"]) == (wanted["grad_input"] or recomputes)
        # Held until the pass is done.
        again = {}
        if recomputes and not self.steps.are_none():
            assert not any(self.addresses[name] for name in kept)
            again = {name: self.made(name) for name in kept}
            self.addresses |= {name: tensor.data_ptr() for name, tensor in again.items()}
            given = [self.raw(name) for name in (*_cuda.NAMES[1:], *kept)]
            last, volume = self.last["output"], self.volume("input")
            threads = torch.get_num_threads()
            _native.forward_for_training(self.block, threads, volume, *given, None, last)
        threads, through = torch.get_num_threads(), self.volume("grad_output")
        if not self.steps.are_none():
            made = self.made("convolution")
            _native.epilogue_gradient(
                self.block,
                threads,
                self.shapes["input"],
                self.volume("convolution"),
                *(self.raw(name) for name in ("mean", "rstd", "norm_weight", "norm_bias")),
                through,
                (_memory.raw("grad_convolution", made), self.last["output"]),
                *(self.raw(name) if wanted[name] else None for name in _cuda.SLOTS[12:]),
            )
            through = _memory.raw("grad_convolution", made), self.last["output"]
        if wanted["grad_weight"]:
            factor, result = self.volume("input"), self.raw("grad_weight")
            _native.weight_gradient(self.block, threads, factor, through, result)
        if wanted["grad_input"]:
            factor, result = self.raw("weight"), self.volume("grad_input")
            _native.input_gradient(self.block, threads, through, factor, result)


@contextmanager
def cuda_kernels(monkeypatch: pytest.MonkeyPatch, obstacle: str | None) -> Iterator[None]:
    """The operators' kernels for CUDA as those for the CPU, on the engine above or on none."""
    honest = _cpu.native_block

    def remembered(weight_shape: Sequence[int], conv: Conv, steps: Steps, *rest: bool) -> Any:
        block = honest(weight_shape, conv, steps, *rest)
        CpuPass.blocks[id(block)] = (block, torch.Size(weight_shape), steps)
        return block

    def described(weight_shape: Sequence[int], *rest: Any) -> Any:
        block = _native.Block(weight_shape, *rest)
        CpuPass.blocks[id(block)] = (block, torch.Size(weight_shape), NO_STEPS)
        return block

    native = SimpleNamespace(**{**vars(_native), "CudaPass": CpuPass})
    for module in (_cuda, _cuda_operators):
        monkeypatch.setattr(module, "_native", native)
    monkeypatch.setattr(_cpu, "native_block", remembered)
    functions = SimpleNamespace(**{**vars(_native), "Block": described})
    monkeypatch.setattr(functional, "_native", functions)
    monkeypatch.setattr(_calls, "_kept", {})
    monkeypatch.setitem(_calls.KERNELS, False, _cuda_operators.KERNELS)
    monkeypatch.setattr(_cuda, "_warned", {obstacle})
    monkeypatch.setattr(_cuda, "_obstacles", {torch.device("cpu"): obstacle})
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    records: tuple[Any, ...] = (CpuPass.planned, CpuPass.launched, CpuPass.wanted_of)
    for record in (*records, CpuPass.packed, CpuPass.missing):
        record.clear()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        CpuPass.blocks.clear()
