"""Calls on CUDA tensors: planned once for each kind of call, then only launched.

A GPU is done with a small volume in a few microseconds, so what depends on the kind of call alone
(shapes, strides, types, parameters) is decided once and looked up from then on. Nothing of the
tensors' values is kept.
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable
from threading import Lock

import torch
from torch import Tensor
from torch.autograd import forward_ad

from volup import _memory, _native
from volup._compose import Activation, flagged_precision

NAMES = ("input", "weight", "bias", "norm_weight", "norm_bias")
Tensors = tuple[Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]

# More kinds of calls than a program makes, unless the sizes of its inputs vary endlessly.
_MOST_PLANS = 1024
# What the kernels' reads are aligned to; PyTorch aligns to 512, but a view may begin anywhere.
_ALIGNMENT = 16

_NO_DISPATCH = Tensor.__torch_dispatch__


class Plan:
    """How calls of one kind are computed.

    Attributes:
        forward: What launches the kernels; None for an empty batch.
        copied: The indices of tensors that are not dense, so that a dense copy is read.
        itemsize: Of every tensor.
        nbytes: Of each tensor's elements.
        shape: Of the output.
        strides: Of the output.
        dtype: Of the output.
        device: Of everything.
        index: Of the device.
        workspace: Bytes of scratch memory.
    """

    __slots__ = (
        "copied",
        "device",
        "dtype",
        "forward",
        "index",
        "itemsize",
        "nbytes",
        "shape",
        "strides",
        "workspace",
    )

    def __init__(
        self,
        forward: _native.CudaForward | None,
        tensors: Tensors,
        copied: list[int],
        output: Tensor,
    ) -> None:
        """Takes the output's description from a tensor without memory."""
        self.forward = forward
        self.copied = copied
        self.itemsize = tensors[0].element_size()
        self.nbytes = [0 if t is None else t.numel() * self.itemsize for t in tensors]
        self.shape = output.shape
        self.strides = output.stride()
        self.dtype = tensors[0].dtype
        self.device = tensors[0].device
        self.index = self.device.index
        self.workspace = 0 if forward is None else forward.workspace_bytes

    def run(self, tensors: Tensors) -> Tensor:
        """Launches the kernels on the device's current stream, and waits for nothing.

        Raises:
            RuntimeError: A tensor has no memory, or the launch failed.
        """
        output = torch.empty_strided(self.shape, self.strides, dtype=self.dtype, device=self.device)
        if type(output) is not Tensor:
            # Under a mode that fakes what is allocated, the output is no memory either.
            kind = type(output).__name__
            raise RuntimeError(f"output must be a plain torch.Tensor, got {kind}")
        # The copies live until the launch: what is allocated later is used later on the stream.
        held = list(tensors)
        for i in self.copied:
            held[i] = held[i].contiguous()  # type: ignore[union-attr]
        addresses = []
        for tensor, nbytes in zip(held, self.nbytes, strict=True):
            if tensor is None:
                addresses.append(0)
                continue
            end = tensor.storage_offset() * self.itemsize + nbytes
            if tensor.untyped_storage().nbytes() < end:
                name = NAMES[len(addresses)]
                raise RuntimeError(f"{name} has no memory: its storage was freed")
            address = tensor.data_ptr()
            if address % _ALIGNMENT:
                tensor = held[len(addresses)] = tensor.clone()
                address = tensor.data_ptr()
            addresses.append(address)
        if self.forward is None:
            return output
        scratch = 0
        if self.workspace:
            workspace = torch.empty(self.workspace, dtype=torch.uint8, device=self.device)
            scratch = workspace.data_ptr()
        stream = torch._C._cuda_getCurrentRawStream(self.index)
        input, weight, bias, norm_weight, norm_bias = addresses
        self.forward.run(
            input, weight, bias, norm_weight, norm_bias, output.data_ptr(), scratch, stream
        )
        return output


_plans: dict[Hashable, Plan] = {}
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
) -> Tensor | None:
    """The result of a call like one that was checked and planned before, else None.

    Nothing is raised for arguments that are wrong: no plan is found for them.
    """
    if (
        forward_ad._current_level >= 0
        or torch._C._get_tracing_state() is not None
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return None
    try:
        if torch.is_autocast_enabled():
            tensors = _autocast(tensors)
        integers = _native.integers(stride, padding, output_padding, groups, dilation, norm_groups)
        plan = _plans.get(_key(tensors, integers, activation, eps, post_activation, precision))
    except Exception:
        return None
    return None if plan is None else plan.run(tensors)


def launch(
    block: _native.Block,
    tensors: dict[str, Tensor],
    integers: bytes,
    activation: Activation,
    eps: float,
    post_activation: Activation,
    precision: str | None,
) -> Tensor:
    """Computes a block whose tensors have been checked, and keeps the plan.

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
    key = _key(each, integers, activation, float(eps), post_activation, precision)
    plan = _plans.get(key)
    if plan is None:
        plan = _plan(block, each, precision or flagged_precision())
        with _lock:
            while len(_plans) >= _MOST_PLANS:
                del _plans[next(iter(_plans))]
            _plans[key] = plan
    return plan.run(each)


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
) -> Hashable:
    """All that a plan depends on; None, which no plan has, for tensors that no launch can read."""
    if precision is None and tensors[0].dtype is torch.float32:
        precision = flagged_precision()
    grad = torch.is_grad_enabled()
    parts: list[Hashable] = [integers, activation, eps, post_activation, precision]
    for tensor in tensors:
        if tensor is None:
            parts.append(None)
            continue
        if (
            (grad and tensor.requires_grad)
            or tensor.is_neg()
            or type(tensor).__torch_dispatch__ is not _NO_DISPATCH
        ):
            return None
        parts += (tensor.device, tensor.dtype, tensor.shape, tensor.stride())
    return tuple(parts)


def _plan(block: _native.Block, tensors: Tensors, precision: str) -> Plan:
    """Plans for tensors of these shapes, strides and types."""
    input, weight, *vectors = tensors
    batch = input if input.dim() == 5 else input.unsqueeze(0)
    shape = block.output_shape(input.shape)
    if block.normalizes:
        # PyTorch's group norm on CUDA makes its input and so its output contiguous.
        memory_format = torch.contiguous_format
    else:
        memory_format = _memory.output_format(block, batch, weight, vectors[0])
    output = torch.empty(shape, dtype=input.dtype, device="meta", memory_format=memory_format)
    channels_last = _memory.is_channels_last(batch)
    copied = [i for i, t in enumerate(tensors) if t is not None and not t.is_contiguous()]
    if channels_last:
        copied.remove(0)
    forward = None
    if output.numel() > 0:
        forward = _native.CudaForward(
            block,
            input.shape,
            _memory.DTYPES[input.dtype],
            precision,
            channels_last,
            memory_format is torch.channels_last_3d,
            input.device.index,
        )
    return Plan(forward, tensors, copied, output if input.dim() == 5 else output.squeeze(0))
