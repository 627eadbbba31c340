"""Forward and backward passes on a GPU beside PyTorch's: `python bench/training.py --device cuda`.

PyTorch computes eagerly and as `torch.compile` fuses it, all with cuDNN's own search over its
kernels; `best` is its fastest way in either memory format. Ways take turns in one process, and
medians of the GPU's own time count. Gradients are those of the input and of every parameter.

Before it is timed, every element of volup's gradients is compared with float64; `worst` is the
largest error as a share of the bound that `reference_gradients` gives it, so at most 1. `peak` is
what a pass takes from PyTorch's allocator at most, inputs and parameters excluded.
"""

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from blocks import Block
from clocks import Clock, CudaClock
from compare_cudnn import (
    DTYPES,
    Contest,
    Row,
    attempt,
    cudnn_with,
    describe,
    no_fallback,
    rows_or_failure,
    set_precision,
    time_limit,
)
from peers import FORMATS

sys.path.insert(0, str(Path(__file__).parents[1] / "python" / "tests"))
import reference_gradients

# Launches are hidden behind the GPU's work, so graphs gain nothing; they would copy their inputs.
MODES = {"compiled": "default", "max_autotune": "max-autotune-no-cudagraphs"}
OURS = ("volup", "save")
THEIRS = ("eager", *MODES)
# Unit roundoff of what float32 is rounded to before it is multiplied.
ROUNDOFF = {"ieee": 2.0**-21, "tf32": 2.0**-11, "bf16": 0.0}
NAMES = ("weight", "bias", "norm_weight", "norm_bias")


class Step:
    """A forward and a backward pass, as a function of the input."""

    def __init__(self, block: Block, forward: Callable[[Tensor], Tensor], grad: Tensor) -> None:
        self.parameters = block.train()[1:]
        self.forward = forward
        self.grad = grad
        self.grads = {grad.stride(): grad}

    def gradients(self, input: Tensor) -> tuple[Tensor, ...]:
        output = self.forward(input)
        # It comes as the output lies, as from the layer that follows.
        grad = self.grads.get(output.stride())
        if grad is None:
            grad = self.grads[output.stride()] = torch.empty_like(output).copy_(self.grad)
        return torch.autograd.grad(output, (input, *self.parameters), grad)

    def __call__(self, input: Tensor) -> Tensor:
        return self.gradients(input)[0]


def steps(block: Block, precision: str, grad: Tensor, args: argparse.Namespace) -> dict[str, Step]:
    """All ways to compute the passes."""
    asked = None if precision == "bf16" else precision
    ways: dict[str, Callable[[Tensor], Tensor]] = {
        "volup": partial(block.run_volup, precision=asked),
        "save": partial(block.run_volup, precision=asked, memory="save"),
        "eager": block.run_torch,
    }
    if args.compile:
        for name in args.modes:
            options = {"mode": MODES[name], "fullgraph": True, "dynamic": False}
            ways[name] = torch.compile(lambda x: block.run_torch(x), **options)
    return {name: Step(block, forward, grad) for name, forward in ways.items()}


class Errors:
    """How far gradients are from float64."""

    def __init__(self) -> None:
        self.worst = 0.0
        self.square: dict[str, float] = {}
        self.exact_square: dict[str, float] = {}

    def add(self, name: str, got: Tensor, exact: Tensor, bound: Tensor) -> None:
        error = (got.double() - exact).abs()
        share = (error / bound.clamp(min=1e-300)).max().item()
        self.worst = max(self.worst, share) if share == share else math.nan
        self.square[name] = self.square.get(name, 0.0) + error.square().sum().item()
        exact_square = exact.square().sum().item()
        self.exact_square[name] = self.exact_square.get(name, 0.0) + exact_square

    def relative(self) -> float:
        """In norm, of the gradient that is off by most."""
        return max((self.square[n] / self.exact_square[n]) ** 0.5 for n in self.square)


def check(
    block: Block, precision: str, grad: Tensor, found: dict[str, tuple[Tensor, ...]]
) -> dict[str, Errors]:
    """Compares gradients, by layout, with float64: a sample at a time, to take little memory."""
    tensors = (block.weight, block.bias, block.gamma, block.beta)
    parameters = dict(zip(NAMES, tensors, strict=True))
    names = [name for name, tensor in parameters.items() if tensor is not None]
    spec = block.sizes | {"activation": block.activation, "post_activation": block.post}
    spec |= {"norm_groups": block.norm_groups, "eps": block.eps}
    errors = {layout: Errors() for layout in found}
    sums: dict[str, list[Tensor]] = {}
    # Not cuDNN, whose float64 kernels are slow where they exist.
    with cudnn_with(enabled=False):
        for i in range(block.input.shape[0]):
            one = slice(i, i + 1)
            exact = reference_gradients.expected(
                block.input[one], parameters, spec, grad[one], ROUNDOFF[precision]
            )
            for layout, gradients in found.items():
                errors[layout].add("input", gradients[0][one], *exact["input"])
            for name in names:
                known = sums.get(name, [0.0, 0.0])
                sums[name] = [a + b for a, b in zip(known, exact[name], strict=True)]
    for layout, gradients in found.items():
        for name, got in zip(names, gradients[1:], strict=True):
            errors[layout].add(name, got, *sums[name])
    return errors


def measure(block: Block, precision: str, clock: Clock, args: argparse.Namespace) -> list[Row]:
    """The rows of a shape in one precision, one a layout."""
    set_precision(clock, precision)
    # Or what was compiled for other shapes counts towards the most that is kept of a function.
    if args.compile:
        torch._dynamo.reset()
    what = f"{block.name} {precision}"
    block.train()
    inputs = {
        layout: [block.input.detach().clone(memory_format=FORMATS[layout]).requires_grad_()]
        for layout in args.layouts
    }
    grad = torch.randn(block.output_shape, device=clock.device, dtype=torch.float32)
    ways = steps(block, precision, grad.to(block.input.dtype), args)
    del grad

    rows: dict[str, Row] = {
        layout: {"op": "training", "shape": block.name, "precision": precision, "layout": layout}
        for layout in args.layouts
    }
    found: dict[str, tuple[Tensor, ...]] = {}
    for layout, row in rows.items():

        def gradients(layout: str = layout) -> tuple[Tensor, ...]:
            with no_fallback():
                return ways["volup"].gradients(inputs[layout][0])

        got = attempt(f"{what} volup {layout}", gradients)
        if isinstance(got, str):
            row["failure"] = got
        else:
            found[layout] = got
    for layout, errors in check(block, precision, ways["eager"].grad, found).items():
        rows[layout] |= {"worst": errors.worst, "rel_err": errors.relative()}
        # NaN fails too, and is no number of JSON's.
        if not errors.worst <= 1:
            rows[layout]["failure"] = f"an error is {errors.worst:.1e} of its bound"
            rows[layout] |= dict.fromkeys(("worst", "rel_err"))
    found.clear()
    clock.free()

    contest = Contest(clock, inputs)
    for layout in args.layouts:
        for how, step in ways.items():

            def enter(layout: str = layout, how: str = how, step: Step = step) -> None:
                with no_fallback(), time_limit(args.seconds_per_way):
                    contest.enter(f"{how} {layout}", layout, step)

            start = time.monotonic()
            if isinstance(attempt(f"{what} {how} {layout}", enter), str):
                contest.runs.pop(f"{how} {layout}", None)
            seconds = time.monotonic() - start
            print(f"  {what} {layout} {how}: ready after {seconds:.0f} s", file=sys.stderr)
    contest.take_turns(args.seconds * len(contest.runs))
    ms = contest.medians()
    theirs = [name for name in ms if name.split()[0] in THEIRS]
    best = min(theirs, key=ms.__getitem__, default=None)
    for layout, row in rows.items():
        for how in OURS + THEIRS:
            name = f"{how} {layout}"
            row[f"{how}_ms"] = ms.get(name)
            extra = contest.extra_bytes.get(name)
            # And the input's gradient, which is what a step returns.
            row[f"{how}_peak_bytes"] = None if extra is None else extra + block.input.nbytes
        row |= {"best_ms": best and ms[best], "best_how": best}
    return list(rows.values())


def rows_of(cases: list[Row], clock: Clock, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of one shape and precision after another, until the time is over."""
    start = time.monotonic()
    for case in cases:
        for precision in args.precisions:

            def group(case: Row = case, precision: str = precision) -> list[Row]:
                if time.monotonic() - start > args.budget:
                    raise TimeoutError("no time left")
                block = Block(case, dtype=DTYPES[precision], device=clock.device)
                return measure(block, precision, clock, args)

            yield rows_or_failure(case, precision, group, args)
            clock.free()


def line_of(row: Row) -> str:
    """A row of the table."""

    def number(key: str, scale: float = 1.0, digits: int = 3) -> str:
        value = row.get(key)
        return f"{'-' if value is None else f'{value / scale:.{digits}f}':>13}"

    times = "".join(number(f"{how}_ms") for how in OURS + THEIRS)
    peaks = "".join(number(f"{how}_peak_bytes", 2**20, 0) for how in OURS + THEIRS)
    ratio = "-"
    if row.get("volup_ms") and row.get("best_ms"):
        ratio = f"{row['best_ms'] / row['volup_ms']:.2f}"
    failure = f"  FAILED: {row['failure']}" if "failure" in row else ""
    return (
        f"{row['shape']:23}{row['precision']:5}{row['layout']:6}{times}{ratio:>7}"
        f"{number('worst', digits=2)}{peaks}  {row.get('best_how') or '-'}{failure}"
    )


def header() -> str:
    times, peaks = ("".join(f"{how + unit:>13}" for how in OURS + THEIRS) for unit in ("", " MiB"))
    return f"{'forward and backward, ms':34}{times}{'ratio':>7}{'worst':>13}{peaks}  best"


def means(rows: list[Row]) -> Iterator[str]:
    """Geometric means of the ratios, by precision."""
    for precision in DTYPES:
        parts = []
        for how in ("best_ms", *(f"{how}_ms" for how in THEIRS), "eager_peak_bytes"):
            ours = "volup_peak_bytes" if how.endswith("bytes") else "volup_ms"
            ratios = [
                row[how] / row[ours]
                for row in rows
                if row["precision"] == precision and row.get(how) and row.get(ours)
            ]
            if ratios:
                parts.append(f"{how}/volup {statistics.geometric_mean(ratios):.2f}")
        if parts:
            yield f"geometric mean {precision:5} {', '.join(parts)}"


def run(cases: list[Row], clock: Clock, args: argparse.Namespace) -> int:
    """Prints the rows and writes them; 1 if one failed."""
    torch.manual_seed(0)
    meta = describe(clock)
    print(", ".join(f"{name} {value}" for name, value in meta.items()))
    print(header(), flush=True)
    rows: list[Row] = []
    for some in rows_of(cases, clock, args):
        rows += some
        print("\n".join(map(line_of, some)), flush=True)
        if args.json:
            args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    print("\n".join(means(rows)))
    failed = sum("failure" in row for row in rows)
    print(f"{len(rows)} rows, {failed} failed")
    return int(failed > 0)


def main(cases: list[Row], args: argparse.Namespace) -> int:
    # Before any convolution, so that the first plan PyTorch keeps is one that it searched for.
    torch.backends.cudnn.benchmark = True
    return run(cases, CudaClock(), args)
