"""Times volup beside the best that PyTorch and cuDNN can do on a GPU, and checks volup's result.

    python bench/compare_cudnn.py --json out.json
    python bench/compare_cudnn.py --shapes kb2-61 kb2-61-block --precisions tf32 --layouts ndhwc

`best` is the fastest of all ways in `peers.py` in both memory formats, with cuDNN's own search over
its kernels (`torch.backends.cudnn.benchmark`); `default` is PyTorch as it comes, in the row's
layout. The best ways and volup take turns, and the medians count. All times are the GPU's own: a
call is queued while the GPU is busy. Inputs are random normal.

The result is compared with float64 on the first and the last sample. `floor` is the larger of the
arithmetic over the tensor cores' rate and the traffic over the memory's, both as measured on an
H200.
"""

import argparse
import contextlib
import datetime
import json
import math
import signal
import statistics
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar

import torch
from torch import Tensor

import volup
from blocks import Block, commit
from clocks import Clock, CpuClock, CudaClock, Rotation, copies_to_defeat
from decoder_shapes import decoder_cases
from peers import FORMATS, compiled, peers
from random_shapes import random_cases
from volup import _native

Row = dict[str, Any]
T = TypeVar("T")

DTYPES = {"ieee": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
# Of ||got - exact|| / ||exact||. Past it, a result is wrong rather than rounded.
LIMITS = {"ieee": 2e-6, "tf32": 2e-3, "bf16": 1e-2}
# What an H200 was seen to reach: FLOP/s (three tensor-core products for each of ieee), and bytes/s.
CEILINGS = {"ieee": 119e12, "tf32": 357e12, "bf16": 713e12}
BANDWIDTH = 4.29e12

LEAST_ROUNDS = 10
# Ways that are slower than the best by more than this take no further part.
IN_THE_RUNNING = 1.3


def floor_ms(block: Block, precision: str) -> float:
    """No computation of the block is faster."""
    return 1e3 * max(block.flops() / CEILINGS[precision], block.bytes() / BANDWIDTH)


def set_precision(clock: Clock, precision: str) -> None:
    if isinstance(clock, CudaClock):
        torch.backends.cudnn.allow_tf32 = precision == "tf32"
        torch.backends.cuda.matmul.allow_tf32 = precision == "tf32"


@contextlib.contextmanager
def cudnn_with(**flags: bool) -> Iterator[None]:
    """Flags of `torch.backends.cudnn`, for a while."""
    before = {name: getattr(torch.backends.cudnn, name) for name in flags}
    for name, value in flags.items():
        setattr(torch.backends.cudnn, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(torch.backends.cudnn, name, value)


def in_new_thread(function: Callable[[], T]) -> T:
    """Runs it where PyTorch has chosen no cuDNN plan yet: it keeps them by thread."""
    results: list[T] = []
    errors: list[BaseException] = []

    def target() -> None:
        try:
            with torch.inference_mode():
                results.append(function())
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return results[0]


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises TimeoutError in the block once the time is over and PyTorch has returned."""

    def stop(_signal: int, _frame: FrameType | None) -> None:
        raise TimeoutError(f"took longer than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@contextlib.contextmanager
def no_fallback() -> Iterator[None]:
    """Raises where volup would warn and let PyTorch compute, which would meet itself then."""
    warned: set[str] = getattr(sys.modules.get("volup._cuda"), "_warned", set())
    warned.clear()  # It warns once only.
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="volup's CUDA engine")
        yield


class Contest:
    """Calls that are timed in turns."""

    def __init__(self, clock: Clock, inputs: dict[str, list[Tensor]]) -> None:
        self.clock = clock
        self.inputs = inputs
        self.runs: dict[str, Rotation] = {}
        self.estimates: dict[str, float] = {}
        self.extra_bytes: dict[str, int] = {}
        self.times: dict[str, list[float]] = {}

    def enter(self, name: str, layout: str, compute: Callable[[Tensor], Tensor]) -> None:
        """Warms up and takes a first estimate; raises what the call raises."""
        run = Rotation(compute, self.inputs[layout])
        for _ in range(2):
            run()
        rough = self.clock.sample(run, 1e3)
        self.estimates[name] = min(rough, self.clock.sample(run, rough))
        self.extra_bytes[name] = self.clock.extra_bytes(compute, self.inputs[layout][0])
        self.runs[name] = run
        self.times[name] = []

    def drop_slow(self, names: set[str]) -> None:
        """Leaves only those of the names that may yet turn out the fastest."""
        best = min((self.estimates[name] for name in names), default=0.0)
        for name in names:
            if self.estimates[name] > IN_THE_RUNNING * best:
                del self.runs[name]

    def take_turns(self, seconds: float, rounds: int = LEAST_ROUNDS) -> None:
        start = time.monotonic()
        done = 0
        while done < rounds or time.monotonic() - start < seconds:
            for name, run in self.runs.items():
                self.times[name].append(self.clock.sample(run, self.estimates[name]))
            done += 1

    def medians(self) -> dict[str, float]:
        return {name: statistics.median(self.times[name]) for name in self.runs}


def in_layouts(block: Block, clock: Clock) -> dict[str, list[Tensor]]:
    """Copies of the input in each layout, as many as it takes to get past the cache."""
    output = torch.Size(block.output_shape).numel() * block.input.element_size()
    copies = copies_to_defeat(clock.cache_bytes, block.input.nbytes + output)
    return {
        layout: [block.input.clone(memory_format=memory_format) for _ in range(copies)]
        for layout, memory_format in FORMATS.items()
    }


class Oracle:
    """The first and the last sample's exact result, by PyTorch's own float64 operators."""

    def __init__(self, block: Block) -> None:
        self.samples = sorted({0, block.input.shape[0] - 1})
        # Not cuDNN, whose float64 kernels are slow where they exist.
        with cudnn_with(enabled=False):
            self.exact = [
                block.run_torch(block.input[i : i + 1].double(), torch.float64)
                for i in self.samples
            ]

    def errors(self, got: Tensor) -> tuple[float, float]:
        """The relative error in norm, and the largest absolute error of an element."""
        square = exact_square = 0.0
        largest = []
        for i, exact in zip(self.samples, self.exact, strict=True):
            error = got[i : i + 1].double() - exact
            square += float(error.square().sum())
            exact_square += float(exact.square().sum())
            largest.append(error.abs().max())
        # PyTorch's max() keeps a NaN.
        return (square / exact_square) ** 0.5, float(torch.stack(largest).max())


def measure_default(block: Block, clock: Clock, inputs: list[Tensor], seconds: float) -> float:
    def run() -> float:
        contest = Contest(clock, {"own": inputs})
        contest.enter("default", "own", block.run_torch)
        contest.take_turns(seconds, rounds=5)
        return contest.medians()["default"]

    with cudnn_with(benchmark=False):
        return in_new_thread(run)


def attempt(what: str, function: Callable[[], T]) -> T | str:
    """The result, or the reason why there is none; a call that fails must not end the others."""
    try:
        return function()
    except (RuntimeError, TypeError, ValueError, TimeoutError, RuntimeWarning) as error:
        reason = str(error).strip().split("\n")[0][:200] or type(error).__name__
        print(f"  {what}: {reason}", file=sys.stderr, flush=True)
        return reason


def measure(
    block: Block, precision: str, oracle: Oracle, clock: Clock, args: argparse.Namespace
) -> list[Row]:
    """The rows of a shape in one precision, one a layout."""
    set_precision(clock, precision)
    inputs = in_layouts(block, clock)
    what = f"{block.name} {precision}"
    asked = None if precision == "bf16" else precision

    def run_volup(x: Tensor) -> Tensor:
        return block.run_volup(x, asked)

    # Made only if it is timed: with no weight frozen, a call looks none up.
    frozen = None
    if args.freeze:
        frozen = torch.nn.Parameter(block.weight.clone(), requires_grad=False)
        volup.freeze(frozen)

    def run_frozen(x: Tensor) -> Tensor:
        return block.run_volup(x, asked, weight=frozen)

    contest = Contest(clock, inputs)
    rows: dict[str, Row] = {}
    for layout in args.layouts:
        rows[layout] = row = {
            "op": block.op,
            "shape": block.name,
            "precision": precision,
            "layout": layout,
            **dict.fromkeys(("volup_ms", "best_ms", "best_how", "default_ms")),
            "floor_ms": floor_ms(block, precision),
            **dict.fromkeys(("rel_err", "max_abs_err", "volup_extra_bytes", "best_extra_bytes")),
        }

        def enter(layout: str = layout) -> tuple[float, float]:
            with no_fallback():
                contest.enter(f"volup {layout}", layout, run_volup)
                if args.freeze:
                    contest.enter(f"frozen {layout}", layout, run_frozen)
            result = run_volup(inputs[layout][0])
            if args.freeze and not torch.equal(run_frozen(inputs[layout][0]), result):
                raise ValueError("a frozen weight changes the result")
            return oracle.errors(result)

        found = attempt(f"{what} volup {layout}", enter)
        if isinstance(found, str):
            for name in ("volup", "frozen"):
                contest.runs.pop(f"{name} {layout}", None)
            row["failure"] = found
        else:
            row["volup_extra_bytes"] = contest.extra_bytes[f"volup {layout}"]
            # NaN fails too, and is no number of JSON's.
            if not found[0] <= LIMITS[precision]:
                row["failure"] = f"rel_err {found[0]:.1e} exceeds {LIMITS[precision]:.0e}"
            if all(map(math.isfinite, found)):
                row["rel_err"], row["max_abs_err"] = found

        def default_of(layout: str = layout) -> float:
            return measure_default(block, clock, inputs[layout], args.seconds / 3)

        default = attempt(f"{what} default {layout}", default_of)
        row["default_ms"] = default if isinstance(default, float) else None

    ways = [(peer, args.seconds_per_search) for peer in peers(block)]
    if args.compile and block.op == "block":
        # Or what was compiled for other shapes counts towards the most that is kept of a function,
        # and what comes after runs eagerly.
        torch._dynamo.reset()
        ways += [(peer, args.seconds_per_compile) for peer in compiled(block)]
    for peer, limit in ways:

        def enter_peer(peer: Any = peer, limit: float = limit) -> None:
            with time_limit(limit):
                contest.enter(peer.name, peer.layout, peer.compute)

        attempt(f"{what} {peer.name}", enter_peer)
    contest.drop_slow({peer.name for peer, _ in ways} & contest.runs.keys())
    contest.take_turns(args.seconds * len(args.layouts))

    ms = contest.medians()
    best = min((peer.name for peer, _ in ways if peer.name in ms), key=ms.__getitem__, default=None)
    for layout, row in rows.items():
        row["volup_ms"] = ms.get(f"volup {layout}")
        if args.freeze:
            row["frozen_ms"] = ms.get(f"frozen {layout}")
        if best is not None:
            row["best_ms"], row["best_how"] = ms[best], best
            row["best_extra_bytes"] = contest.extra_bytes[best]
    return list(rows.values())


def rows_or_failure(
    case: Row, precision: str, group: Callable[[], list[Row]], args: argparse.Namespace
) -> list[Row]:
    """The rows that `group` returns, or one a layout that says why there are none."""
    rows = attempt(f"{case['name']} {precision}", group)
    if isinstance(rows, str):
        of = {"shape": case["name"], "precision": precision, "failure": rows}
        return [of | {"layout": layout} for layout in args.layouts]
    return rows


def rows_of(cases: list[Row], clock: Clock, args: argparse.Namespace) -> Iterator[list[Row]]:
    """Rows of one shape and precision after another, until the time is over."""
    start = time.monotonic()
    for case in cases:
        made: dict[torch.dtype, tuple[Block, Oracle]] = {}
        for precision in args.precisions:
            dtype = DTYPES[precision]

            def group(
                case: Row = case,
                precision: str = precision,
                dtype: torch.dtype = dtype,
                made: dict[torch.dtype, tuple[Block, Oracle]] = made,
            ) -> list[Row]:
                if time.monotonic() - start > args.budget:
                    raise TimeoutError("no time left")
                if dtype not in made:
                    block = Block(case, dtype=dtype, device=clock.device)
                    made[dtype] = block, Oracle(block)
                block, oracle = made[dtype]
                return measure(block, precision, oracle, clock, args)

            yield rows_or_failure(case, precision, group, args)
            clock.free()
        made.clear()


def describe(clock: Clock) -> dict[str, str | None]:
    meta: dict[str, str | None] = {"gpu": None, "driver": None}
    if isinstance(clock, CudaClock):
        meta = {"gpu": torch.cuda.get_device_name(0), "driver": driver_version()}
    return meta | {
        "torch": torch.__version__,
        "cudnn": str(torch.backends.cudnn.version()),
        "cuda": torch.version.cuda,
        "volup": volup.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }


def driver_version() -> str | None:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.split("\n")[0].strip()


def line_of(row: Row) -> str:
    """A row of the table."""

    def number(key: str, digits: int = 3) -> str:
        value = row.get(key)
        return "-" if value is None else f"{value:.{digits}f}"

    ratio = "-"
    if row.get("volup_ms") and row.get("best_ms"):
        ratio = f"{row['best_ms'] / row['volup_ms']:.2f}"
    error = "-" if row.get("rel_err") is None else f"{row['rel_err']:.1e}"
    failure = f"  FAILED: {row['failure']}" if "failure" in row else ""
    return (
        f"{row['shape']:23}{row['precision']:5}{row['layout']:6}{number('volup_ms'):>9}"
        f"{number('frozen_ms'):>9}{number('best_ms'):>9}{ratio:>7}{number('default_ms'):>9}{number('floor_ms'):>8}"
        f"{error:>9}  {row.get('best_how') or '-'}{failure}"
    )


def header() -> str:
    return (
        f"{'shape':34}{'volup ms':>9}{'frozen':>9}{'best ms':>9}{'ratio':>7}{'default':>9}"
        f"{'floor':>8}{'error':>9}  best way"
    )


def means(rows: list[Row]) -> Iterator[str]:
    """Geometric means of the ratios, by operation and precision."""
    for op in ("conv", "block"):
        for precision in DTYPES:
            chosen = [
                row
                for row in rows
                if (row.get("op"), row["precision"]) == (op, precision)
                and row["volup_ms"]
                and row["best_ms"]
                and row["default_ms"]
            ]
            if chosen:
                best, default, floor = (
                    statistics.geometric_mean(row[key] / row["volup_ms"] for row in chosen)
                    for key in ("best_ms", "default_ms", "floor_ms")
                )
                yield (
                    f"geometric mean {op:6}{precision:5} best/volup {best:.2f}, "
                    f"default/volup {default:.2f}, floor/volup {floor:.2f}  ({len(chosen)} rows)"
                )


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    published = [case["name"] for case in _native.published()]
    small = [case["name"] for case in _native.cases()]
    parser.add_argument(
        "--shapes", nargs="+", metavar="NAME", choices=published + small, default=published
    )
    parser.add_argument("--decoders", action="store_true", help="the layers of three decoders")
    parser.add_argument("--batch", type=int, metavar="N", help="of the decoders' layers")
    parser.add_argument("--random", type=int, metavar="N", help="so many random shapes instead")
    parser.add_argument("--seed", type=int, default=0, help="of the random shapes")
    parser.add_argument("--precisions", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--layouts", nargs="+", choices=FORMATS, default=list(FORMATS))
    parser.add_argument("--seconds", type=float, default=0.3, help="to time each row for")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds for all rows")
    parser.add_argument(
        "--seconds-per-search", type=float, default=45.0, help="for a way's kernels"
    )
    parser.add_argument("--freeze", action="store_true", help="frozen weights as well")
    parser.add_argument("--compile", action="store_true", help="torch.compile the blocks as well")
    parser.add_argument("--seconds-per-compile", type=float, default=60.0)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: to try this script"
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = arguments(argv)
    torch.manual_seed(0)
    # Before any convolution, so that the first plan PyTorch keeps is one that it searched for.
    torch.backends.cudnn.benchmark = True
    clock: Clock = CudaClock() if args.device == "cuda" else CpuClock()
    known = {case["name"]: case for case in _native.published() + _native.cases()}
    cases = [known[name] for name in args.shapes]
    if args.decoders:
        cases = decoder_cases(args.batch)
    elif args.random:
        cases = random_cases(args.random, args.seed)
    meta = describe(clock)
    print(", ".join(f"{name} {value}" for name, value in meta.items()))
    print(header(), flush=True)
    rows: list[Row] = []
    with torch.inference_mode():
        for some in rows_of(cases, clock, args):
            rows += some
            print("\n".join(line_of(row) for row in some), flush=True)
            if args.json:
                args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")
    print("\n".join(means(rows)))
    failed = sum("failure" in row for row in rows)
    print(f"{len(rows)} rows, {failed} failed")
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
