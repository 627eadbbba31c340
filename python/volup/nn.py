"""Layers in the manner of ``torch.nn``."""

from __future__ import annotations

import itertools
import os
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from volup import _native
from volup._compose import Activation
from volup.chain import Run, can_fuse, run_at
from volup.functional import (
    Sizes,
    check_memory,
    check_precision,
    conv_transpose3d,
    conv_transpose3d_block,
)

__all__ = ["ConvTranspose3d", "ConvTranspose3dBlock", "Decoder", "Sequential"]


def _parameter(module: torch.nn.Module, name: str) -> Any:
    """A parameter, or what stands in its place; as an attribute it takes longer to find."""
    parameter = module._parameters.get(name)
    return getattr(module, name) if parameter is None else parameter


class ConvTranspose3d(torch.nn.ConvTranspose3d):
    """``torch.nn.ConvTranspose3d``, computed by :func:`volup.conv_transpose3d`.

    Parameters, ``state_dict`` and initialization are PyTorch's.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps per axis, one integer or three.
        stride: Distance between the outputs of neighbouring inputs.
        padding: Voxels cut off each side of the full output.
        output_padding: Voxels added at the far side.
        groups: Independent convolutions side by side in the channels.
        bias: Whether there is one.
        dilation: Distance between the kernel's taps.
        padding_mode: "zeros", as PyTorch allows no other.
        device: Of the parameters.
        dtype: Of the parameters.
        precision: "ieee", "tf32" or None, see :func:`volup.conv_transpose3d`.

    Raises:
        ValueError: As ``torch.nn.ConvTranspose3d``, and for an unknown ``precision``.
    """

    # On the class, so that a layer that `volup.optimize` turned into this one has it too.
    precision: str | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        padding_mode: str = "zeros",
        device: Any = None,
        dtype: Any = None,
        *,
        precision: str | None = None,
    ) -> None:
        """Initializes the parameters as PyTorch does."""
        check_precision(precision)
        super().__init__(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            output_padding,  # type: ignore[arg-type]
            groups,
            bias,
            dilation,  # type: ignore[arg-type]
            padding_mode,  # type: ignore[arg-type]
            device,
            dtype,
        )
        self.precision = precision

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """Applies the layer to [N, Cin, D, H, W] or [Cin, D, H, W].

        Args:
            input: The input.
            output_size: The wanted size, which takes the place of ``output_padding``.

        Returns:
            [N, Cout, D, H, W], or [Cout, D, H, W] without a batch.

        Raises:
            ValueError: No output padding gives ``output_size``.
            RuntimeError: As :func:`volup.conv_transpose3d`.
        """
        output_padding: Sizes = self.output_padding
        if output_size is not None:
            output_padding = self._output_padding(
                input,
                output_size,
                self.stride,  # type: ignore[arg-type]
                self.padding,  # type: ignore[arg-type]
                self.kernel_size,  # type: ignore[arg-type]
                3,
                self.dilation,  # type: ignore[arg-type]
            )
        return conv_transpose3d(
            input,
            _parameter(self, "weight"),
            _parameter(self, "bias"),
            self.stride,
            self.padding,  # type: ignore[arg-type]
            output_padding,
            self.groups,
            self.dilation,
            precision=self.precision,
        )

    def extra_repr(self) -> str:
        """PyTorch's, and the precision if there is one."""
        precision = f", precision={self.precision!r}" if self.precision else ""
        return f"{super().extra_repr()}{precision}"  # type: ignore[no-untyped-call]


class ConvTranspose3dBlock(torch.nn.Module):
    """ConvTranspose3d, activation, GroupNorm, activation: one layer, computed in one go.

    The parameters are those of its submodules ``conv`` and ``norm``, with PyTorch's initialization.
    The block computes with these itself, so hooks of the submodules are not called.

    Args:
        in_channels: Channels of the input.
        out_channels: Channels of the output.
        kernel_size: Taps per axis, one integer or three.
        stride: Distance between the outputs of neighbouring inputs.
        padding: Voxels cut off each side of the full output.
        output_padding: Voxels added at the far side.
        groups: Independent convolutions side by side in the channels.
        bias: Whether the convolution has one.
        dilation: Distance between the kernel's taps.
        activation: As for :func:`volup.conv_transpose3d_block`.
        norm_groups: Groups of the normalization; None for no normalization.
        eps: Added to the variance inside the root.
        affine: Whether the normalization has a weight and a bias.
        post_activation: As ``activation``, after the normalization.
        precision: "ieee", "tf32" or None, see :func:`volup.conv_transpose3d`.
        memory: None, or "save" to take less for the gradients, see
            :func:`volup.conv_transpose3d_block`.
        device: Of the parameters.
        dtype: Of the parameters.

    Raises:
        ValueError: The parameters do not fit together.
    """

    conv: ConvTranspose3d
    norm: torch.nn.GroupNorm | None
    # On the class, so that a layer that was pickled without it has it too.
    memory: str | None = None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Sizes,
        stride: Sizes = 1,
        padding: Sizes = 0,
        output_padding: Sizes = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: Sizes = 1,
        *,
        activation: Activation = "relu",
        norm_groups: int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        post_activation: Activation = None,
        precision: str | None = None,
        memory: str | None = None,
        device: Any = None,
        dtype: Any = None,
    ) -> None:
        """Initializes the parameters as PyTorch does."""
        check_memory(memory)
        super().__init__()
        self.activation = activation
        self.post_activation = post_activation
        self.memory = memory
        self.conv = ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,
            stride,
            padding,
            output_padding,
            groups,
            bias,
            dilation,
            device=device,
            dtype=dtype,
            precision=precision,
        )
        try:
            _native.Block(
                self.conv.weight.shape,
                stride,
                padding,
                output_padding,
                groups,
                dilation,
                bias,
                activation,
                norm_groups,
                affine,
                eps,
                post_activation,
            )
        except RuntimeError as error:
            # What a function refuses with a RuntimeError, PyTorch's layers refuse with this one.
            raise ValueError(str(error)) from None
        norm = None
        if norm_groups is not None:
            norm = torch.nn.GroupNorm(norm_groups, out_channels, eps, affine, device, dtype)
        self.register_module("norm", norm)

    def forward(self, input: Tensor) -> Tensor:
        """Applies the block to [N, Cin, D, H, W] or [Cin, D, H, W].

        Returns:
            [N, Cout, D, H, W], or [Cout, D, H, W] without a batch.

        Raises:
            ValueError: The normalization's groups hold a single value in the whole batch.
            RuntimeError: As :func:`volup.conv_transpose3d_block`.
        """
        conv: Any = self._modules["conv"]
        norm: Any = self._modules["norm"]
        return conv_transpose3d_block(
            input,
            _parameter(conv, "weight"),
            _parameter(conv, "bias"),
            conv.stride,
            conv.padding,
            conv.output_padding,
            conv.groups,
            conv.dilation,
            activation=self.activation,
            norm_groups=None if norm is None else norm.num_groups,
            norm_weight=None if norm is None else _parameter(norm, "weight"),
            norm_bias=None if norm is None else _parameter(norm, "bias"),
            eps=1e-5 if norm is None else norm.eps,
            post_activation=self.post_activation,
            precision=conv.precision,
            memory=self.memory,
        )

    def extra_repr(self) -> str:
        """The activations, and how memory is used; the submodules show the rest."""
        memory = f", memory={self.memory!r}" if self.memory else ""
        return f"activation={self.activation!r}, post_activation={self.post_activation!r}{memory}"


class Sequential(torch.nn.Sequential):
    """``torch.nn.Sequential`` that computes the blocks in it in one go.

    A block is a run of ConvTranspose3d [activation] [GroupNorm or InstanceNorm3d [activation]].
    Every module stays where it is: names, ``state_dict``, slices and indices are PyTorch's, and the
    result is what the modules would give one after another. A run is called module by module
    where that could be told from the outside: with hooks, without a batch, with mixed types.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Applies the modules in order."""
        modules = list(self._modules.values())
        i = 0
        while i < len(modules):
            run = run_at(modules, i, (ConvTranspose3d, torch.nn.ConvTranspose3d))
            if run is not None and len(run.modules) > 1 and can_fuse(run, input):
                input = _fused(run, input)
                i += len(run.modules)
            else:
                input = modules[i](input)
                i += 1
        return input


def _fused(run: Run, input: Tensor) -> Tensor:
    conv, norm = run.conv, run.norm
    parameters: dict[str, Any] = run.parameters
    output = conv_transpose3d_block(
        input,
        stride=conv.stride,
        padding=conv.padding,  # type: ignore[arg-type]
        output_padding=conv.output_padding,
        groups=conv.groups,
        dilation=conv.dilation,
        activation=run.activation,
        norm_groups=run.norm_groups,
        eps=1e-5 if norm is None else norm.eps,
        post_activation=run.post_activation,
        precision=getattr(conv, "precision", None),
        **parameters,
    )
    if norm is not None and input.is_cuda and torch.is_autocast_enabled("cuda"):
        # There PyTorch normalizes in float32 and leaves it at that (float64 stays what it is).
        output = output.to(torch.promote_types(output.dtype, torch.float32))
    if isinstance(norm, torch.nn.InstanceNorm3d):
        # Unlike group norm, it refuses a single voxel whatever the batch, and its result is
        # contiguous whatever its input.
        if output.shape[2:].numel() == 1:
            F.instance_norm(output)
        output = output.contiguous()
    return output


class Decoder(torch.nn.Module):
    """A chain of blocks that turns a small volume into a large one; what ``volup run`` runs.

    Args:
        *blocks: Each takes as many channels as the one before gives.
        skip: "trilinear" adds the input, upsampled to the output's size, to the blocks' output.
        normalize: "max" divides each sample by its largest magnitude first and multiplies the
            output by it in the end; a sample whose largest magnitude is zero or not finite is left
            as it is.

    Raises:
        TypeError: A block is no :class:`ConvTranspose3dBlock`.
        ValueError: There are no blocks, their channels do not fit, or ``skip`` or ``normalize`` is
            no known name.
    """

    def __init__(
        self,
        *blocks: ConvTranspose3dBlock,
        skip: str | None = None,
        normalize: str | None = None,
    ) -> None:
        """Takes the blocks as they are."""
        super().__init__()
        for i, block in enumerate(blocks):
            if not isinstance(block, ConvTranspose3dBlock):
                kind = type(block).__name__
                raise TypeError(f"block {i} must be a volup.nn.ConvTranspose3dBlock, not {kind}")
        if not blocks:
            raise ValueError("a decoder must have at least one block")
        for before, after in itertools.pairwise(blocks):
            if after.conv.in_channels != before.conv.out_channels:
                raise ValueError(
                    f"a block must have as many in_channels as the one before has out_channels "
                    f"({before.conv.out_channels}), got {after.conv.in_channels}"
                )
        if skip not in (None, "trilinear"):
            raise ValueError(f"skip must be one of trilinear, got {skip!r}")
        if normalize not in (None, "max"):
            raise ValueError(f"normalize must be one of max, got {normalize!r}")
        if skip and blocks[0].conv.in_channels != blocks[-1].conv.out_channels:
            raise ValueError(
                f"a decoder with a skip must have as many out_channels as in_channels "
                f"({blocks[0].conv.in_channels}), got {blocks[-1].conv.out_channels}"
            )
        self.blocks = torch.nn.ModuleList(blocks)
        self.skip = skip
        self.normalize = normalize

    def forward(self, input: Tensor) -> Tensor:
        """Applies the decoder to [N, Cin, D, H, W] or [Cin, D, H, W].

        Returns:
            [N, Cout, D, H, W], or [Cout, D, H, W] without a batch, of the input's type.

        Raises:
            RuntimeError: As :func:`volup.conv_transpose3d_block`.
        """
        if not self.skip and not self.normalize:
            return self._chain(input)
        # The skip and the scale are not rounded to a narrow type on their way.
        wide = input.to(torch.promote_types(input.dtype, torch.float32))
        if self.normalize:
            magnitude = wide.abs().amax(dim=(-4, -3, -2, -1), keepdim=True)
            usable = magnitude.isfinite() & (magnitude > 0)
            magnitude = torch.where(usable, magnitude, torch.ones_like(magnitude))
            wide = wide / magnitude
        output = self._chain(wide.to(input.dtype)).to(wide.dtype)
        if self.skip:
            batch = wide if wide.dim() == 5 else wide.unsqueeze(0)
            skip = F.interpolate(batch, output.shape[-3:], mode="trilinear", align_corners=False)
            output = output + skip.reshape(output.shape)
        if self.normalize:
            output = output * magnitude
        return output.to(input.dtype)

    def _chain(self, input: Tensor) -> Tensor:
        for block in self.blocks:
            input = block(input)
        return input

    def extra_repr(self) -> str:
        """What surrounds the blocks."""
        return f"skip={self.skip!r}, normalize={self.normalize!r}"

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Decoder:
        """Reads what :func:`volup.export` wrote.

        Raises:
            OSError: The file cannot be read.
            ValueError: It holds no decoder.
        """
        entries, skip, normalize = _native.read_decoder(path)
        blocks = []
        for options, stored in entries:
            state = {key: _tensor(*parts) for key, parts in stored.items()}
            block = ConvTranspose3dBlock(**options, dtype=state["conv.weight"].dtype)
            block.load_state_dict(state)
            blocks.append(block)
        return cls(*blocks, skip=skip, normalize=normalize)


def _tensor(elements: bytearray, shape: list[int], dtype: str) -> Tensor:
    return torch.frombuffer(elements, dtype=getattr(torch, dtype)).reshape(shape)
