"""Gradients in float64 as the oracle, with a bound on how far each element may be from it.

On top of what ``reference`` says of the forward pass, whose outputs `y` and `h` (normalized) are
off by at most `e_y` and `e_h`:

- A slope is off by what it changes within the bound of where it is taken. So a bound has room for
  either side of a kink where rounding decides on which side a value is.
- `dy`, the gradient of the convolution's output, is made of the loss' gradient, slopes, `h` and two
  means over a group; each passes on its error, and sums in chunks add 64 u of the magnitudes.
- In narrow types `dy` may be stored before the convolution's gradients take it: v * |dy|.
- These are linear in it: their own bound is that of a sum of n products, (n + 2) * u of the sum of
  magnitudes, and (2r + r^2) of it where factors are rounded first.
"""

from __future__ import annotations

from typing import Any

import reference
import torch
import torch.nn.functional as F
from torch import Tensor

Bounded = tuple[Tensor, Tensor]
AXES = (0, 2, 3, 4)


def slope(activation: Any, x: Tensor, e: Tensor, u: float) -> Bounded:
    """The derivative of an activation, where x is off by at most e."""

    def at(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slopes,) = torch.autograd.grad(reference.activate(activation, x).sum(), x)
        return slopes

    if activation is None:
        return torch.ones_like(x), torch.zeros_like(x)
    here = at(x)
    moved = torch.maximum((at(x + e) - here).abs(), (at(x - e) - here).abs())
    return here, moved + reference.EVALUATION * u * (here.abs() + 1)


def times(a: Bounded, b: Bounded, u: float) -> Bounded:
    value = a[0] * b[0]
    return value, a[1] * b[0].abs() + a[0].abs() * b[1] + a[1] * b[1] + u * value.abs()


def expected(
    input: Tensor,
    parameters: dict[str, Tensor | None],
    spec: dict[str, Any],
    grad_output: Tensor,
    r: float = 0.0,
) -> dict[str, Bounded]:
    """Each gradient of the very same (rounded) values in float64, and the bound of its elements.

    `r` is the unit roundoff of factors that are rounded first.
    """
    input, grad_output = input.detach(), grad_output.detach()
    parameters = {key: None if t is None else t.detach() for key, t in parameters.items()}
    conv = {key: spec[key] for key in ("stride", "padding", "output_padding", "groups", "dilation")}
    exact = {key: None if t is None else t.double() for key, t in parameters.items()}
    x = (input if input.dim() == 5 else input[None]).double().contiguous()
    dz = (grad_output if grad_output.dim() == 5 else grad_output[None]).double()
    weight, groups, eps = exact["weight"], spec["norm_groups"], spec["eps"]
    forward = reference.Bounded(input.dtype, r)
    u, v = forward.u, forward.v
    forward.convolve(x, weight, exact["bias"], **conv)
    forward.store()
    y, e_y = forward.y, forward.e
    forward.activate(spec["activation"])
    found: dict[str, Bounded] = {}
    if groups is None:
        post = slope(spec["post_activation"], forward.y, forward.e, u)
        da = times((dz, torch.zeros_like(dz)), post, u)
    else:
        a, e_a = forward.y, forward.e
        forward.normalize(groups, None, None, eps)
        h = forward.y, forward.e
        gamma, beta = (
            y.new_full((1, 1, 1, 1, 1), default) if t is None else t.reshape(1, -1, 1, 1, 1)
            for t, default in ((exact["norm_weight"], 1.0), (exact["norm_bias"], 0.0))
        )
        at = gamma * h[0] + beta
        off = gamma.abs() * h[1] + 2 * u * ((gamma * h[0]).abs() + beta.abs())
        post = slope(spec["post_activation"], at, off, u)
        dv = times((dz, torch.zeros_like(dz)), post, u)
        dvh = times(dv, h, u)
        for name, (value, e) in (("norm_weight", dvh), ("norm_bias", dv)):
            if exact[name] is not None:
                found[name] = value.sum(AXES), summed(value, e, u)
        da = through_norm(dv, h, gamma, rstd_of(a, e_a, groups, eps, u), groups, u)
    dy, e_dy = times(da, slope(spec["activation"], y, e_y, u), u)
    if exact["bias"] is not None:
        found["bias"] = dy.sum(AXES), summed(dy, e_dy, u)
    followed = (spec["activation"], groups, spec["post_activation"]) != (None, None, None)
    e_dy = e_dy + (v * dy.abs() + forward.smallest if followed else 0)

    def adjoint(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        x, weight = x.detach().requires_grad_(), weight.detach().requires_grad_()
        return torch.autograd.grad(F.conv_transpose3d(x, weight, **conv), (x, weight), dy)

    ones = adjoint(*(torch.ones_like(t) for t in (x, weight, dy)))
    parts = (adjoint(x, weight, dy), adjoint(x.abs(), weight.abs(), dy.abs()), ones)
    passed_on = adjoint(x.abs(), weight.abs(), e_dy)
    for i, name in enumerate(("input", "weight")):
        value, magnitude, terms = (part[i] for part in parts)
        own = (terms + 2) * (u * magnitude + forward.accumulator_smallest)
        found[name] = value, passed_on[i] + own + (2 * r + r**2) * magnitude
    stored = {
        name: (value, e + v * (value.abs() + e) + forward.smallest)
        for name, (value, e) in found.items()
    }
    stored["input"] = tuple(t.reshape(input.shape) for t in stored["input"])  # type: ignore[assignment]
    return stored


def summed(value: Tensor, e: Tensor, u: float) -> Tensor:
    """The bound of sums over samples and voxels."""
    terms = min(value.numel() // value.shape[1] + 2, reference.CHUNK)
    return e.sum(AXES) + terms * u * value.abs().sum(AXES)


def mean_of(value: Tensor, e: Tensor, groups: int, u: float) -> Bounded:
    """Means over groups, in the shape of what they are taken of."""

    def mean(t: Tensor) -> Tensor:
        flat = t.reshape(t.shape[0], groups, -1)
        return flat.mean(-1, keepdim=True).expand_as(flat).reshape(t.shape)

    return mean(value), mean(e) + reference.CHUNK * u * mean(value.abs())


def rstd_of(a: Tensor, e: Tensor, groups: int, eps: float, u: float) -> Bounded:
    mu, e_mu = mean_of(a, e, groups, u)
    variance, _ = mean_of((a - mu) ** 2, torch.zeros_like(a), groups, u)
    spread = mean_of((e + e_mu) ** 2, torch.zeros_like(a), groups, u)[0].sqrt()
    off = 2 * variance.sqrt() * spread + spread**2 + reference.CHUNK * u * (variance + eps)
    rstd = (variance + eps).rsqrt()
    return rstd, ((variance - off).clamp(min=0) + eps).rsqrt() - rstd + 2 * u * rstd


def through_norm(
    dv: Bounded, h: Bounded, gamma: Tensor, rstd: Bounded, groups: int, u: float
) -> Bounded:
    """The gradient of the normalization's input."""
    g = gamma * dv[0], gamma.abs() * dv[1] + u * (gamma * dv[0]).abs()
    gh = times(g, h, u)
    mean, mean_h = mean_of(*g, groups, u), mean_of(*gh, groups, u)
    part = times(h, mean_h, u)
    inside = g[0] - mean[0] - part[0]
    magnitude = g[0].abs() + mean[0].abs() + part[0].abs()
    e = g[1] + mean[1] + part[1] + reference.EVALUATION * u * magnitude
    return times((inside, e), rstd, u)
