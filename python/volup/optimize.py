"""Puts volup into a model that already exists, and takes it out again."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from volup import nn
from volup._memory import DTYPES
from volup.chain import obstacle, run_at

# A layer changes its class and nothing else: the module object, its parameters and everything that
# refers to them stay the same, so there is nothing to copy back. The classes differ in `forward`.
_CLASSES: dict[type[torch.nn.Module], type[torch.nn.Module]] = {
    torch.nn.ConvTranspose3d: nn.ConvTranspose3d,
    torch.nn.Sequential: nn.Sequential,
}
# Tells a layer that `optimize` changed from one that its author made so.
_MARK = "_volup_optimized"


@dataclass(frozen=True)
class Entry:
    """A module by its name in the model, and what was done with it or why nothing was."""

    name: str
    text: str


@dataclass(frozen=True)
class Report:
    """What :func:`optimize` replaced and what it left alone."""

    replaced: tuple[Entry, ...]
    skipped: tuple[Entry, ...]

    def __repr__(self) -> str:
        """One line a module."""
        lines = [f"{len(self.replaced)} replaced, {len(self.skipped)} skipped"]
        for verb, entries in (("replaced", self.replaced), ("skipped", self.skipped)):
            lines += [f"  {verb} {entry.name or '(the model)'}: {entry.text}" for entry in entries]
        return "\n".join(lines)


def optimize(model: torch.nn.Module) -> Report:
    """Makes the layers of a model compute with volup, in place.

    Every ``torch.nn.ConvTranspose3d`` becomes a :class:`volup.nn.ConvTranspose3d`, and every
    ``torch.nn.Sequential`` that holds a run of ConvTranspose3d [activation] [GroupNorm or
    InstanceNorm3d [activation]] becomes a :class:`volup.nn.Sequential`, which computes each run in
    one go. The module objects, their parameters and the ``state_dict`` stay the very same.

    Left alone, and listed in the report, are layers with hooks (``weight_norm`` and
    ``spectral_norm`` among them) or parametrizations, subclasses of ConvTranspose3d, lazy and
    quantized ones, and such as are on a device or of a type that volup has no engine for.

    The model trains as before.

    Args:
        model: Any module; it is changed itself, not copied.

    Returns:
        What was replaced, and what was skipped and why. A second call replaces nothing.
    """
    replaced, skipped = [], []
    convs: list[tuple[str, torch.nn.Module]] = []
    chains: list[tuple[str, torch.nn.Sequential]] = []
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Sequential):
            chains.append((name, module))
        elif _is_conv(module):
            convs.append((name, module))
    for name, module in convs:
        reason = _conv_obstacle(module)
        if reason is None:
            _change(module)
            replaced.append(Entry(name, "ConvTranspose3d"))
        elif reason:
            skipped.append(Entry(name, reason))
    for name, chain in chains:
        runs = list(_runs(chain))
        if not runs or type(chain) is nn.Sequential:
            continue
        texts = ["+".join(type(module).__name__ for module in run) for run in runs]
        reason = _chain_obstacle(chain, runs)
        if reason is None:
            _change(chain)
            replaced.append(Entry(name, "Sequential, fuses " + ", ".join(texts)))
        else:
            skipped.append(Entry(name, reason))
    return Report(tuple(replaced), tuple(skipped))


def restore(model: torch.nn.Module) -> None:
    """Undoes :func:`optimize`: every layer that it replaced is PyTorch's again.

    Layers that were volup's from the start stay so.
    """
    originals = {ours: theirs for theirs, ours in _CLASSES.items()}
    for module in model.modules():
        if module.__dict__.pop(_MARK, False):
            module.__class__ = originals[type(module)]


def _change(module: torch.nn.Module) -> None:
    module.__class__ = _CLASSES[type(module)]
    module.__dict__[_MARK] = True


def _is_conv(module: torch.nn.Module) -> bool:
    """Whether a reader of the report would expect the module in it."""
    # By name too: the quantized and the scripted layers are no subclasses.
    name = getattr(module, "original_name", type(module).__name__)
    return isinstance(module, torch.nn.ConvTranspose3d) or name == "ConvTranspose3d"


def _conv_obstacle(module: torch.nn.Module) -> str | None:
    """Why a convolution is skipped; None if it is not, "" if there is nothing to tell."""
    kind = type(module)
    if issubclass(kind, nn.ConvTranspose3d):
        return ""
    if torch.nn.utils.parametrize.is_parametrized(module):
        return "is parametrized"
    if kind is not torch.nn.ConvTranspose3d:
        return f"is a {kind.__module__}.{kind.__qualname__}, not a torch.nn.ConvTranspose3d"
    weight = module.weight
    if not isinstance(weight, torch.Tensor):
        return "has no weight"
    if weight.device.type not in ("cpu", "cuda"):
        return f"is on device {weight.device}, for which volup has no engine"
    if weight.dtype not in DTYPES:
        return f"is of dtype {weight.dtype}, for which volup has no engine"
    return obstacle(module)


def _chain_obstacle(
    chain: torch.nn.Sequential, runs: list[tuple[torch.nn.Module, ...]]
) -> str | None:
    """Why a chain that holds runs is not fused; None if it is."""
    if type(chain) is not torch.nn.Sequential:
        kind = type(chain)
        return f"is a {kind.__module__}.{kind.__qualname__}, which may use its layers otherwise"
    if "forward" in chain.__dict__:
        return "its forward is replaced by another function"
    for run in runs:
        for module in run:
            reason = obstacle(module)
            if reason is not None:
                return f"{type(module).__name__} in it {reason}"
    return None


def _runs(chain: torch.nn.Sequential) -> Iterator[tuple[torch.nn.Module, ...]]:
    """The runs of more than a convolution, among the direct children of a chain."""
    modules = list(chain._modules.values())
    for start in range(len(modules)):
        run = run_at(modules, start, (nn.ConvTranspose3d,))
        if run is not None and len(run.modules) > 1:
            yield run.modules
