"""Writes decoders for the ``volup`` command line."""

from __future__ import annotations

import os

import torch
from torch import Tensor

from volup import _memory, _native, nn
from volup.chain import Run, run_at

_Tensors = tuple[
    _memory.RawTensor,
    _memory.RawTensor | None,
    _memory.RawTensor | None,
    _memory.RawTensor | None,
]


def export(decoder: torch.nn.Module, path: str | os.PathLike[str]) -> None:
    """Writes a decoder to the file that ``volup run`` reads, whole or not at all.

    The file is in safetensors format; the parameters keep their type and are copied from whatever
    device they are on. :meth:`volup.nn.Decoder.load` reads it again.

    Args:
        decoder: A :class:`volup.nn.Decoder`, a :class:`volup.nn.ConvTranspose3dBlock`, or a
            ``Sequential`` (PyTorch's or volup's) of blocks: ConvTranspose3dBlock, or
            ConvTranspose3d [activation] [GroupNorm or InstanceNorm3d [activation]].
        path: The file, by convention ``*.safetensors``.

    Raises:
        TypeError: ``decoder`` is none of these, or a Sequential holds anything else.
        ValueError: The blocks do not fit together, or their types differ.
        OSError: The file cannot be written.
    """
    skip = normalize = None
    if isinstance(decoder, nn.Decoder):
        skip, normalize = decoder.skip, decoder.normalize
        runs = [_run_of(block) for block in decoder.blocks]  # type: ignore[arg-type]
    elif isinstance(decoder, nn.ConvTranspose3dBlock):
        runs = [_run_of(decoder)]
    elif isinstance(decoder, torch.nn.Sequential):
        runs = _runs_of(decoder)
    else:
        raise TypeError(
            "a decoder must be a volup.nn.Decoder, a volup.nn.ConvTranspose3dBlock or a "
            f"torch.nn.Sequential, not {type(decoder).__name__}"
        )
    held: list[Tensor] = []
    blocks = []
    for i, run in enumerate(runs):
        tensors = _tensors_of(run)
        held += tensors.values()
        block = _native.Block(
            tensors["weight"].shape,
            run.conv.stride,
            run.conv.padding,  # type: ignore[arg-type]
            run.conv.output_padding,
            run.conv.groups,
            run.conv.dilation,
            "bias" in tensors,
            run.activation,
            run.norm_groups,
            "norm_weight" in tensors,
            1e-5 if run.norm is None else run.norm.eps,
            run.post_activation,
        )
        raw = {name: _memory.raw(name, tensor) for name, tensor in tensors.items()}
        parameters = (
            raw["weight"],
            raw.get("bias"),
            raw.get("norm_weight"),
            raw.get("norm_bias"),
        )
        blocks.append((f"blocks.{i}", block, parameters))
    _native.write_decoder(path, blocks, skip, normalize)


def _tensors_of(run: Run) -> dict[str, Tensor]:
    """The block's parameters, on the CPU and contiguous."""
    tensors = {name: tensor.detach().cpu() for name, tensor in run.parameters.items()}
    if "norm_weight" in tensors and "norm_bias" not in tensors:
        # torch.nn.GroupNorm(bias=False) has the one without the other, the file has both.
        tensors["norm_bias"] = torch.zeros_like(tensors["norm_weight"])
    for name, tensor in tensors.items():
        _memory.check(name, tensor)
        tensors[name] = _memory.dense(tensor)
    return tensors


def _run_of(block: nn.ConvTranspose3dBlock) -> Run:
    return Run((block,), block.conv, block.activation, block.norm, block.post_activation)


def _runs_of(chain: torch.nn.Sequential) -> list[Run]:
    modules = list(chain._modules.values())
    runs = []
    i = 0
    while i < len(modules):
        module = modules[i]
        if isinstance(module, nn.ConvTranspose3dBlock):
            run: Run | None = _run_of(module)
        else:
            run = run_at(modules, i, (torch.nn.ConvTranspose3d, nn.ConvTranspose3d))
        if run is None:
            raise TypeError(
                f"module {i} of the Sequential begins no block: {type(module).__name__}"
            )
        runs.append(run)
        i += len(run.modules)
    return runs
