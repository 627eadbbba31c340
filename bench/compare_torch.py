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
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn import functional

import volup
from volup import _native

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": functional.relu,
    "silu": functional.silu,
    "hardswish": functional.hardswish,
}


class Block:
    """A published shape with random parameters, computable by PyTorch and by volup."""

    def __init__(self, case: dict, batch: int) -> None:
        block = case["block"]
        self.name = case["name"]
        self.sizes = {
            name: block[name]
            for name in ("stride", "padding", "output_padding", "groups", "dilation")
        }
        channels = block["out_channels"]
        weight = torch.randn(
            block["in_channels"], channels // block["groups"], *block["kernel_size"]
        )
        weight /= weight[:, 0].numel() ** 0.5
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.randn(channels) if block["bias"] else None
        self.activation, self.post = block["activation"], block["post_activation"]
        self.norm_groups, self.eps = block["norm_groups"], block["eps"]
        self.gamma = torch.rand(channels) + 0.5 if self.norm_groups else None
        self.beta = torch.randn(channels) if self.norm_groups else None
        self.input = torch.randn(batch, block["in_channels"], *case["input"])

    @property
    def op(self) -> str:
        return "block" if self.activation or self.norm_groups else "conv"

    def run_torch(self, input: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        def cast(tensor: torch.Tensor | None) -> torch.Tensor | None:
            return None if tensor is None else tensor.to(dtype)

        y = functional.conv_transpose3d(
            cast(input), cast(self.weight), cast(self.bias), **self.sizes
        )
        if self.activation:
            y = ACTIVATIONS[self.activation](y)
        if self.norm_groups:
            y = functional.group_norm(
                y, self.norm_groups, cast(self.gamma), cast(self.beta), self.eps
            )
        return ACTIVATIONS[self.post](y) if self.post else y

    def run_volup(self, input: torch.Tensor) -> torch.Tensor:
        return volup.conv_transpose3d_block(
            input,
            self.weight,
            self.bias,
            **self.sizes,
            activation=self.activation,
            norm_groups=self.norm_groups,
            norm_weight=self.gamma,
            norm_bias=self.beta,
            eps=self.eps,
            post_activation=self.post,
        )


def alternate(runs: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """Median milliseconds of each, one call of each in turn, so that all see the same machine."""
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        run()
    for _ in range(rounds):
        for name, run in runs.items():
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


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12"]
    folder = Path(__file__).parent
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return done.stdout.strip()


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
