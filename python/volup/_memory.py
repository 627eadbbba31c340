"""What the native module may read: dense tensors with memory of their own.

An address says nothing about what lies there, so everything that a tensor can be besides a plain
array (sparse, quantized, fake, a view of another's negation, freed storage) is refused or resolved
here, before its address is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad

from volup import _native

DTYPES = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
}

RawTensor = tuple[int, torch.Size, str]


def check(name: str, tensor: object, device: torch.device | None = None) -> None:
    """Refuses what is no plain tensor of a type that volup computes in.

    Args:
        name: The parameter's name.
        tensor: What was given for it.
        device: Where it must be; None for any device that volup knows.

    Raises:
        TypeError: It is not a tensor.
        RuntimeError: It is a tensor of another kind.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"argument '{name}' must be Tensor, not {type(tensor).__name__}")
    if tensor.is_nested:
        raise RuntimeError(f"{name} must be a strided tensor, got a nested one")
    if device is None and tensor.device.type not in ("cpu", "cuda"):
        raise RuntimeError(f"{name} must be on the CPU or a CUDA GPU, got device {tensor.device}")
    if device is not None and tensor.device != device:
        expected = "the CPU" if device.type == "cpu" else device
        raise RuntimeError(f"{name} must be on {expected}, got device {tensor.device}")
    if tensor.layout is not torch.strided:
        raise RuntimeError(f"{name} must be a strided tensor, got layout {tensor.layout}")
    if tensor.dtype not in DTYPES:
        expected = "float32, float64, float16 or bfloat16"
        raise RuntimeError(f"{name} must have dtype {expected}, got {tensor.dtype}")


def check_fit(block: _native.Block, tensors: dict[str, Tensor]) -> None:
    """Refuses tensors whose shapes or types are not the block's.

    Raises:
        RuntimeError: One of them is.
    """

    def described(name: str) -> RawTensor | None:
        tensor = tensors.get(name)
        return None if tensor is None else (0, tensor.shape, DTYPES[tensor.dtype])

    input, weight = tensors["input"], tensors["weight"]
    batched = torch.Size((1, *input.shape)) if input.dim() == 4 else input.shape
    block.check(
        (0, batched, DTYPES[input.dtype]),
        (0, weight.shape, DTYPES[weight.dtype]),
        described("bias"),
        described("norm_weight"),
        described("norm_bias"),
    )


def expect(name: str, tensor: Tensor, shape: torch.Size, dtype: torch.dtype) -> None:
    """Refuses a tensor that is not what its user takes it for.

    Raises:
        RuntimeError: Its shape or its type is another.
    """
    if tensor.shape != shape:
        got = list(tensor.shape)
        raise RuntimeError(f"{name} must have shape {list(shape)}, got {got}")
    if tensor.dtype != dtype:
        got_type = DTYPES[tensor.dtype]
        raise RuntimeError(f"{name} must have dtype {DTYPES[dtype]}, got {got_type}")


def check_not_transformed() -> None:
    """Refuses calls inside of a transform of ``torch.func``.

    Raises:
        RuntimeError: There is one.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise RuntimeError("volup's functions cannot be transformed by torch.func")


def check_no_tangent(tensors: dict[str, Tensor]) -> None:
    """Refuses tensors of forward-mode differentiation, which no operator knows.

    Raises:
        RuntimeError: A tensor carries a tangent.
    """
    if forward_ad._current_level >= 0:
        for name, tensor in tensors.items():
            if forward_ad.unpack_dual(tensor).tangent is not None:  # type: ignore[no-untyped-call]
                raise RuntimeError(f"{name} has a tangent, which volup does not compute")


def autocast(tensor: Tensor, to: torch.dtype) -> Tensor:
    """The tensor as PyTorch's autocast casts it: not from float64, nor from what is refused."""
    if tensor.dtype is torch.float64 or tensor.dtype not in DTYPES:
        return tensor
    return tensor.to(to)


def dense(tensor: Tensor, keep_channels_last: bool = False) -> Tensor:
    """A tensor whose memory can be read as it is: contiguous, the very same one if it can be.

    Args:
        tensor: Of any strides.
        keep_channels_last: Whether channels_last_3d will do too.
    """
    tensor = tensor.resolve_neg()
    if tensor.data_ptr() % tensor.element_size():  # torch.frombuffer at an odd offset
        tensor = tensor.clone()
    if keep_channels_last and is_channels_last(tensor):
        return tensor
    return tensor.contiguous()


def is_channels_last(tensor: Tensor) -> bool:
    """Whether a dense tensor of rank 5 is channels_last_3d rather than contiguous."""
    return not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last_3d)


def raw(name: str, tensor: Tensor) -> RawTensor:
    """Address, shape and type of a dense tensor; valid as long as the tensor is held.

    Raises:
        RuntimeError: Its storage is gone, as that of a sharded parameter between uses.
    """
    end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
    if tensor.untyped_storage().nbytes() < end:
        raise RuntimeError(f"{name} has no memory: its storage was freed")
    return tensor.data_ptr(), tensor.shape, DTYPES[tensor.dtype]


def output_format(
    block: _native.Block, input: Tensor, weight: Tensor, bias: Tensor | None
) -> torch.memory_format:
    """The memory format of what PyTorch's conv_transpose3d would return for a batched input.

    In PyTorch 2.15 on the CPU: channels_last_3d if the input or the weight suggests it (also one
    whose channels are a slice) and oneDNN computes the call, else contiguous. oneDNN takes no
    float64, no output_padding that reaches the stride, no float16 and bfloat16 on processors
    without instructions for them, and no float32 that it finds small: a single sample in one group
    with a narrow kernel and at most 20480 rows. Group norm and activations keep the format there.
    On CUDA the same with cuDNN in the place of oneDNN, and group norm's output is contiguous.

    PyTorch is asked rather than imitated, except where both tensors are contiguous beyond doubt,
    since asking takes 5 us.
    """
    if block.norm_groups is not None and input.is_cuda:
        return torch.contiguous_format
    if (
        input.is_contiguous()
        and weight.is_contiguous()
        and input.stride(1) != 1
        and weight.stride(1) != 1
    ):
        return torch.contiguous_format
    backend = torch._C._select_conv_backend(
        input,
        weight,
        bias,
        block.stride,
        block.padding,
        block.dilation,
        True,
        block.output_padding,
        block.groups,
        None,
    )
    return torch._C._conv_determine_backend_memory_format(input, weight, backend)
