"""Recognises blocks in a chain of PyTorch's modules: a convolution and what follows it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.modules import module as module_hooks

from volup._compose import Activation

_NAMES: dict[type[torch.nn.Module], str] = {
    torch.nn.ReLU: "relu",
    torch.nn.SiLU: "silu",
    torch.nn.Hardswish: "hardswish",
    torch.nn.Sigmoid: "sigmoid",
    torch.nn.Tanh: "tanh",
}

Norm = torch.nn.GroupNorm | torch.nn.InstanceNorm3d


@dataclass(frozen=True)
class Run:
    """ConvTranspose3d [activation] [GroupNorm or InstanceNorm3d [activation]], in this order.

    ``modules`` are those of the chain that it takes up.
    """

    modules: tuple[torch.nn.Module, ...]
    conv: torch.nn.ConvTranspose3d
    activation: Activation
    norm: Norm | None
    post_activation: Activation

    @property
    def norm_groups(self) -> int | None:
        """Groups of the normalization; an instance norm has one a channel."""
        if isinstance(self.norm, torch.nn.InstanceNorm3d):
            return self.conv.out_channels
        return None if self.norm is None else self.norm.num_groups

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The tensors of the block, under the names of ``conv_transpose3d_block``."""
        named = {"weight": self.conv.weight, "bias": self.conv.bias}
        if self.norm is not None:
            named |= {"norm_weight": self.norm.weight, "norm_bias": self.norm.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}


def activation_of(module: torch.nn.Module) -> Activation:
    """The name of an activation module, or None for anything else.

    Subclasses may compute something else, so only the very classes of PyTorch count.
    """
    if type(module) is torch.nn.LeakyReLU and math.isfinite(module.negative_slope):
        return "leaky_relu", float(module.negative_slope)
    if type(module) is torch.nn.GELU:
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(module.approximate)
    return _NAMES.get(type(module))


def obstacle(module: torch.nn.Module) -> str | None:
    """Why a module cannot be computed by other means than calling it; None if it can."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        # torch.nn.utils.weight_norm and spectral_norm are such hooks too.
        return "has hooks"
    if "forward" in module.__dict__:
        return "its forward is replaced by another function"
    return None


def run_at(modules: Sequence[torch.nn.Module], start: int, convs: tuple[type, ...]) -> Run | None:
    """The longest run that begins at an index, if a convolution of the given classes is there."""
    conv = modules[start]
    if type(conv) not in convs or not isinstance(conv, torch.nn.ConvTranspose3d):
        return None
    end = start + 1

    def take_activation() -> Activation:
        nonlocal end
        activation = activation_of(modules[end]) if end < len(modules) else None
        end += activation is not None
        return activation

    activation = take_activation()
    norm = _norm_of(conv, modules[end]) if end < len(modules) else None
    post_activation = None
    if norm is not None:
        end += 1
        post_activation = take_activation()
    return Run(tuple(modules[start:end]), conv, activation, norm, post_activation)


def _norm_of(conv: torch.nn.ConvTranspose3d, module: torch.nn.Module) -> Norm | None:
    """The module, if it is a normalization that a block can take for the convolution's output."""
    channels = conv.out_channels
    if type(module) is torch.nn.GroupNorm:
        fits = module.num_channels == channels
    elif type(module) is torch.nn.InstanceNorm3d:
        # With running statistics it normalizes by these in evaluation.
        fits = module.num_features == channels and not module.track_running_stats
    else:
        return None
    return module if fits and math.isfinite(module.eps) and module.eps >= 0 else None


def can_fuse(run: Run, input: Tensor) -> bool:
    """Whether nobody could tell a fused run from its modules called one after another."""
    if (
        module_hooks._global_forward_hooks
        or module_hooks._global_forward_pre_hooks
        or module_hooks._global_backward_hooks
        or module_hooks._global_backward_pre_hooks
    ):
        return False
    if any(obstacle(module) for module in run.modules):
        return False
    # PyTorch's group norm takes an input without a batch for a batch of its channels.
    if not isinstance(input, Tensor) or input.dim() != 5:
        return False
    # PyTorch's group norm takes float32 parameters for narrower inputs; a block does not.
    dtypes = {tensor.dtype for tensor in run.parameters.values()}
    return torch.is_autocast_enabled("cuda" if input.is_cuda else "cpu") or dtypes == {input.dtype}
