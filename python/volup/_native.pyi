"""The native module: sizes, computation and files. Tensors are (address, shape, type's name)."""

import os
from typing import Any

import torch
from torch import Tensor

from volup._compose import Activation
from volup._memory import RawTensor
from volup.functional import Sizes

__version__: str

class Block:
    """A checked block."""

    stride: tuple[int, int, int]
    padding: tuple[int, int, int]
    output_padding: tuple[int, int, int]
    groups: int
    dilation: tuple[int, int, int]
    norm_groups: int | None

    def __init__(
        self,
        weight_shape: torch.Size,
        stride: Sizes,
        padding: Sizes,
        output_padding: Sizes,
        groups: int,
        dilation: Sizes,
        bias: bool,
        activation: Activation,
        norm_groups: int | None,
        affine: bool,
        eps: float,
        post_activation: Activation,
    ) -> None: ...
    def output_shape(self, input_shape: torch.Size) -> list[int]: ...
    def check(
        self,
        input: RawTensor,
        weight: RawTensor,
        bias: RawTensor | None,
        norm_weight: RawTensor | None,
        norm_bias: RawTensor | None,
        /,
    ) -> None: ...
    def forward_cpu(
        self,
        threads: int,
        input: RawTensor,
        input_channels_last: bool,
        weight: RawTensor,
        bias: RawTensor | None,
        norm_weight: RawTensor | None,
        norm_bias: RawTensor | None,
        output: RawTensor,
        output_channels_last: bool,
        cache: Cache | None,
        /,
    ) -> None: ...

class Cache:
    """Packed parameters, kept from call to call."""

class CudaPass:
    """A pass of a block, planned for one shape, type and CUDA device."""

    workspace_bytes: int
    packing: tuple[str, int] | None

    def __init__(
        self,
        name: str,
        wanted: tuple[bool, ...],
        block: Block,
        input_shape: torch.Size,
        dtype: str,
        precision: str,
        input_channels_last: bool,
        output_channels_last: bool,
        ordinal: int,
        /,
    ) -> None: ...
    def run(self, tensors: list[Tensor | None], slots: bytes, stream: int, /) -> None: ...
    def pack(self, weight: Tensor, packed: Tensor, stream: int, /) -> None: ...

class NoEngineError(RuntimeError):
    """The CUDA engine cannot run here."""

RawVolume = tuple[RawTensor, bool]

def forward_for_training(
    block: Block,
    threads: int,
    input: RawVolume,
    weight: RawTensor,
    bias: RawTensor | None,
    norm_weight: RawTensor | None,
    norm_bias: RawTensor | None,
    convolution: RawTensor,
    mean: RawTensor,
    rstd: RawTensor,
    output: RawTensor | None,
    channels_last: bool,
    /,
) -> None: ...
def input_gradient(
    block: Block,
    threads: int,
    grad_output: RawVolume,
    weight: RawTensor,
    grad_input: RawVolume,
    /,
) -> None: ...
def weight_gradient(
    block: Block,
    threads: int,
    input: RawVolume,
    grad_output: RawVolume,
    grad_weight: RawTensor,
    /,
) -> None: ...
def epilogue_gradient(
    block: Block,
    threads: int,
    input_shape: torch.Size,
    convolution: RawVolume,
    mean: RawTensor,
    rstd: RawTensor,
    norm_weight: RawTensor | None,
    norm_bias: RawTensor | None,
    grad_output: RawVolume,
    grad_convolution: RawVolume | None,
    grad_bias: RawTensor | None,
    grad_norm_weight: RawTensor | None,
    grad_norm_bias: RawTensor | None,
    /,
) -> None: ...
def cuda_status(ordinal: int, /) -> str | None: ...
def kind(
    tensors: tuple[Tensor | None, ...], grad: bool, arguments: tuple[Any, ...], /
) -> bytes | None: ...
def describe(tensors: tuple[Tensor | None, ...], /) -> bytes | None: ...
def cases() -> list[dict[str, Any]]: ...
def published() -> list[dict[str, Any]]: ...
def describe_cpu(threads: int) -> list[tuple[str, str]]: ...
def write_decoder(
    path: str | os.PathLike[str],
    blocks: list[
        tuple[
            str,
            Block,
            tuple[RawTensor, RawTensor | None, RawTensor | None, RawTensor | None],
        ]
    ],
    skip: str | None,
    normalize: str | None,
) -> None: ...
def read_decoder(
    path: str | os.PathLike[str],
) -> tuple[
    list[tuple[dict[str, Any], dict[str, tuple[bytearray, list[int], str]]]],
    str | None,
    str | None,
]: ...
