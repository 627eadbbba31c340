"""PyTorch in float64 as the oracle, with a bound on how far each element may be from it.

Values are stored in the input's type (unit roundoff `v`) and summed in float32, or in float64 for
float64 (unit roundoff `u`, to which float64's own is added for the oracle's rounding).

- A GPU may round factors first (TF32: unit roundoff `r`): another (2r + r^2) * (|x| conv |w|).
- A sum of n products and a bias is off by at most (n + 2) * u * (|x| conv |w| + |b|).
- An activation with slopes up to L makes that L times as much, and adds a few u of its own.
- Storing adds v * |y|, and half of the smallest subnormal number.
- If each y of a group is off by at most e, the mean is off by at most mean(e) and the standard
  deviation by at most rms(e); sums in chunks add 64 u of the magnitudes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64.0
EVALUATION = 8.0

# The function and its largest slope.
ACTIVATIONS = {
    "relu": (F.relu, 1.0),
    "silu": (F.silu, 1.1),
    "gelu": (F.gelu, 1.13),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), 1.13),
    # By its formula: PyTorch's own multiplies by a sixth in float32 on GPUs, in float64 too.
    "hardswish": (lambda x: x * (x + 3).clamp(0, 6) / 6, 1.5),
    "sigmoid": (F.sigmoid, 0.25),
    "tanh": (F.tanh, 1.0),
}


def slope_of(activation: Any) -> float:
    return 0.01 if activation == "leaky_relu" else activation[1]


def is_leaky(activation: Any) -> bool:
    return activation == "leaky_relu" or isinstance(activation, tuple)


def activate(activation: Any, x: Tensor) -> Tensor:
    if activation is None:
        return x
    if is_leaky(activation):
        return F.leaky_relu(x, slope_of(activation))
    return ACTIVATIONS[activation][0](x)


def block(input: Tensor, parameters: dict[str, Tensor | None], spec: dict[str, Any]) -> Tensor:
    """The block by PyTorch's own functions, in the type of its tensors."""
    conv = {key: spec[key] for key in ("stride", "padding", "output_padding", "groups", "dilation")}
    y = F.conv_transpose3d(input, parameters["weight"], parameters["bias"], **conv)
    y = activate(spec["activation"], y)
    if spec["norm_groups"] is not None:
        batch = y if y.dim() == 5 else y.unsqueeze(0)
        norm = (parameters["norm_weight"], parameters["norm_bias"], spec["eps"])
        y = F.group_norm(batch, spec["norm_groups"], *norm).reshape(y.shape)
    return activate(spec["post_activation"], y)


class Bounded:
    """Values in float64, and a bound for each."""

    def __init__(self, dtype: torch.dtype, r: float = 0.0) -> None:
        self.r = r
        accumulator = torch.promote_types(dtype, torch.float32)
        eps = torch.finfo(torch.float64).eps
        self.u = (torch.finfo(accumulator).eps + eps) / 2
        self.narrow = dtype != accumulator
        self.v = torch.finfo(dtype).eps / 2 if self.narrow else 0.0
        self.smallest = torch.finfo(dtype).tiny * torch.finfo(dtype).eps if self.narrow else 0.0
        self.accumulator_smallest = torch.finfo(accumulator).tiny * torch.finfo(accumulator).eps

    def convolve(self, input: Tensor, weight: Tensor, bias: Tensor | None, **conv: Any) -> None:
        self.y = F.conv_transpose3d(input, weight, bias, **conv)
        magnitude = F.conv_transpose3d(
            input.abs(), weight.abs(), None if bias is None else bias.abs(), **conv
        )
        terms = F.conv_transpose3d(torch.ones_like(input), torch.ones_like(weight), **conv)
        self.e = (terms + 2) * (self.u * magnitude + self.accumulator_smallest)
        self.e = self.e + (2 * self.r + self.r**2) * magnitude

    def activate(self, activation: Any) -> None:
        if activation is None:
            return
        x = self.y.abs()
        if activation == "relu":
            lipschitz, own = 1.0, torch.zeros_like(x)
        elif is_leaky(activation):
            slope = abs(slope_of(activation))
            lipschitz, own = max(1.0, slope), slope * x
        else:
            lipschitz, own = ACTIVATIONS[activation][1], EVALUATION * (x + 1)
        self.e = lipschitz * self.e + self.u * own + self.accumulator_smallest
        self.y = activate(activation, self.y)

    def store(self) -> None:
        self.e = self.e + self.v * (self.y.abs() + self.e) + self.smallest

    def normalize(
        self, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> None:
        shape = self.y.shape
        y = self.y.reshape(shape[0], groups, shape[1:].numel() // groups)
        e = self.e.reshape(y.shape)

        def mean(values: Tensor) -> Tensor:
            return values.mean(-1, keepdim=True)

        mu = mean(y)
        variance = mean((y - mu) ** 2)
        mu_error = mean(e) + CHUNK * self.u * mean(y.abs())
        spread = mean(e**2).sqrt() + CHUNK * self.u * mean(y**2).sqrt()
        variance_error = (
            2 * variance.sqrt() * spread + spread**2 + CHUNK * self.u * (variance + eps)
        )
        r = (variance + eps).rsqrt()
        r_high = ((variance - variance_error).clamp(min=0) + eps).rsqrt()
        moved = (e + mu_error) * r_high + (y - mu).abs() * (r_high - r)
        evaluated = (y.abs() + mu.abs()) * r_high

        def per_channel(values: Tensor | None, default: float) -> Tensor:
            values = self.y.new_full((shape[1],), default) if values is None else values
            return values.reshape(1, -1, 1, 1, 1)

        gamma, beta = per_channel(weight, 1.0), per_channel(bias, 0.0)
        self.y = gamma * ((y - mu) * r).reshape(shape) + beta
        own = gamma.abs() * evaluated.reshape(shape) + beta.abs()
        self.e = gamma.abs() * moved.reshape(shape) + EVALUATION * self.u * own
        self.e = self.e + self.accumulator_smallest


def expected(
    input: Tensor, parameters: dict[str, Tensor | None], spec: dict[str, Any], r: float = 0.0
) -> tuple[Tensor, Tensor]:
    """The block of the very same (rounded) values in float64, and the bound of each element.

    `r` is the unit roundoff of factors that are rounded first.
    """
    conv = {key: spec[key] for key in ("stride", "padding", "output_padding", "groups", "dilation")}
    exact = {key: None if t is None else t.double() for key, t in parameters.items()}
    batch = input.double() if input.dim() == 5 else input.double().unsqueeze(0)
    result = Bounded(input.dtype, r)
    result.convolve(batch.contiguous(), exact["weight"], exact["bias"], **conv)
    result.activate(spec["activation"])
    if spec["norm_groups"] is not None:
        result.store()
        result.normalize(spec["norm_groups"], exact["norm_weight"], exact["norm_bias"], spec["eps"])
    result.activate(spec["post_activation"])
    result.store()
    shape = result.y.shape if input.dim() == 5 else result.y.shape[1:]
    return result.y.reshape(shape), result.e.reshape(shape)


def assert_within(got: Tensor, values: Tensor, bounds: Tensor) -> None:
    """Compares element by element, and says where the first bad one is."""
    assert got.shape == values.shape
    bad = ~((got.double() - values).abs() <= bounds)
    if bad.any():
        at = tuple(bad.nonzero()[0].tolist())
        count = f"{int(bad.sum())} of {bad.numel()} elements are off"
        raise AssertionError(
            f"{count}, first {list(at)}: got {got[at].item()}, expected {values[at].item()} "
            f"within {bounds[at].item()}"
        )
