"""Times volup beside PyTorch, alternately in one process, and checks volup's result.

    python bench/compare_torch.py                       # the published shapes, batch 1, this CPU
    python bench/compare_torch.py --shape kb2-61 --batch 4 --json out.json

PyTorch gets both memory formats; `default` is contiguous (NCDHW), as users have it. Every timed
call allocates its output, as a model's forward does. Inputs are random normal, weights are
parameters as a layer's are (volup keeps the packed form of a parameter from call to call).
"""

import argparse
import datetime
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

import volup
from blocks import Block, commit
from volup import _native


def alternate(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, one call of each in turn, so that all see the same machine.

    Every other round is in the opposite order: what a call leaves of memory is felt by the next.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for round in range(rounds):
        for name, run in list(runs.items())[:: -1 if round % 2 else 1]:
            start = time.perf_counter()
            run()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(values) for name, values in times.items()}


def measure(block: Block, rounds: int) -> dict:
    last = block.input.contiguous(memory_format=torch.channels_last_3d)
    ms = alternate(
        {
            "default": lambda: block.run_torch(block.input),
            "volup": lambda: block.run_volup(block.input),
            "channels_last_3d": lambda: block.run_torch(last),
        },
        rounds,
    )
    exact = block.run_torch(block.input, torch.float64)
    error = block.run_volup(block.input).double() - exact
    how = min("default", "channels_last_3d", key=ms.__getitem__)
    return {
        "op": block.op,
        "shape": block.name,
        "batch": block.input.shape[0],
        "precision": "ieee",
        "layout": "ncdhw",
        "volup_ms": ms["volup"],
        "best_ms": ms[how],
        "best_how": "contiguous" if how == "default" else how,
        "default_ms": ms["default"],
        "rel_err": float(error.norm() / exact.norm()),
        "max_abs_err": float(error.abs().max()),
    }


def cpu_name() -> str:
    """The model and core count; virtual machines may hide the model."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
        return f"{names[0]}, {len(names)} cores"
    except (OSError, IndexError):
        return platform.processor() or platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    published = {case["name"]: case for case in _native.published()}
    parser.add_argument("--shape", nargs="*", choices=published, default=list(published))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--json", type=Path, help="also write the figures to this file")
    args = parser.parse_args()

    torch.manual_seed(0)
    meta = {
        "cpu": cpu_name(),
        "threads": torch.get_num_threads(),
        "engine": dict(_native.describe_cpu(torch.get_num_threads())),
        "torch": torch.__version__,
        "volup": volup.__version__,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    print(", ".join(f"{name} {value}" for name, value in meta.items()))
    print(f"{'shape':28}{'volup ms':>10}{'torch ms':>10}{'ratio':>7}{'best ms':>10}{'ratio':>7}")
    rows = []
    with torch.inference_mode():
        for name in args.shape:
            row = measure(Block(published[name], args.batch), args.rounds)
            rows.append(row)
            volup_ms, default, best = row["volup_ms"], row["default_ms"], row["best_ms"]
            print(
                f"{name:28}{volup_ms:10.1f}{default:10.1f}{default / volup_ms:7.2f}"
                f"{best:10.1f}{best / volup_ms:7.2f}   error {row['rel_err']:.1e}",
                flush=True,
            )
    ratios = [
        statistics.geometric_mean(r[k] / r["volup_ms"] for r in rows)
        for k in ("default_ms", "best_ms")
    ]
    print(f"{'geometric mean':48}{ratios[0]:7.2f}{ratios[1]:17.2f}")
    if args.json:
        args.json.write_text(json.dumps({"meta": meta, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
