"""Weights that stay as they are: packed once for the GPU's kernels instead of in every call."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from volup import _native


class Forms:
    """What one weight was packed into, by the ways of packing."""

    def __init__(self) -> None:
        """Nothing yet."""
        self.lock = Lock()
        # Where the weight was, and what its version was, when it was packed.
        self.of: tuple[int, int] | None = None
        # With the stream that it was packed on.
        self.packed: dict[str, tuple[Tensor, int]] = {}

    def get(
        self,
        weight: Tensor,
        launch: _native.CudaPass,
        packing: tuple[str, int] | None,
        stream: int,
    ) -> Tensor | None:
        """The weight as a pass of a way of packing takes it; None if it may not be packed now."""
        if packing is None:
            return None
        way, size = packing
        captures = torch.cuda.is_current_stream_capturing()
        now = weight.data_ptr(), 0 if weight.is_inference() else weight._version
        with self.lock:
            if now != self.of:
                self.packed.clear()
                self.of = now
            if way not in self.packed:
                if captures:
                    return None
                packed = torch.empty(size, dtype=torch.uint8, device=weight.device)
                launch.pack(weight, packed, stream)
                self.packed[way] = packed, stream
            packed, own = self.packed[way]
        if captures:
            # A graph has its address, and lives as long as it likes.
            _captured[packed.data_ptr()] = packed
        elif stream != own:
            packed.record_stream(torch.cuda.current_stream(weight.device))
        return packed


# Beside the parameters rather than in them, so that what copies and pickles them need not know.
weights: MutableMapping[Tensor, Forms] = WeakTensorKeyDictionary()
_captured: dict[int, Tensor] = {}


def freeze(model: torch.nn.Module | Tensor) -> None:
    """Says that the weights of a model's transposed convolutions stay as they are.

    Kernels for Hopper that multiply packed weights then find them packed: by the first call that is
    not captured in a CUDA graph, into as much memory again as they take, or twice that in "ieee"
    precision. Results are the same to the bit. Deep layers with few voxels gain most. Elsewhere, on
    the CPU and under autocast, nothing changes; nor may it in compiled code.

    A weight that is changed is packed anew where PyTorch counts the change: by an optimizer's step
    or ``load_state_dict``, but not through ``.data``. Graphs that were captured meanwhile keep the
    weights as they were. So :func:`unfreeze` the model before its weights change, and capture anew.

    Args:
        model: Any module; of its layers those that are a ``torch.nn.ConvTranspose3d``, or a layer
            of :mod:`volup.nn`, whose weight is a parameter. Or a weight, for the functions.

    Raises:
        TypeError: It is neither.
    """
    for weight in _weights(model):
        weights.setdefault(weight, Forms())


def unfreeze(model: torch.nn.Module | Tensor) -> None:
    """Undoes :func:`freeze`: weights may change in any way, and are packed in every call.

    Raises:
        TypeError: The argument is neither a module nor a tensor.
    """
    for weight in _weights(model):
        weights.pop(weight, None)


def _weights(model: torch.nn.Module | Tensor) -> Iterator[Tensor]:
    if isinstance(model, Tensor):
        yield model
        return
    if not isinstance(model, torch.nn.Module):
        kind = type(model).__name__
        raise TypeError(f"argument 'model' must be torch.nn.Module or Tensor, not {kind}")
    for module in model.modules():
        if isinstance(module, torch.nn.ConvTranspose3d):
            weight = module._parameters.get("weight")
            if weight is not None:
                yield weight
