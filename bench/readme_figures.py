"""Prints the README's rows of GPU figures as results hold them, or checks that it has them.

python bench/readme_figures.py            # whole rows of the first table, cells of the second
python bench/readme_figures.py --check    # fails if the README says something else
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PRECISIONS = ("ieee", "tf32", "bf16")
LAYOUTS = ("ncdhw", "ndhwc")
# Results that the second table compares, of which the first is the first table's.
RUNS = ("h200", "h200-again", "h100")

Row = dict[str, Any]


def rows_of(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text())["rows"]


def ratio(row: Row) -> float:
    return row["best_ms"] / row["volup_ms"]


def mean(rows: Iterable[Row]) -> float:
    """The geometric mean of how many times as fast rows are."""
    return statistics.geometric_mean(map(ratio, rows))


def chosen(rows: list[Row], op: str, precision: str, layout: str) -> list[Row]:
    wanted = {"op": op, "precision": precision, "layout": layout}
    return [row for row in rows if wanted.items() <= row.items()]


def shape_rows(rows: list[Row], layout: str) -> list[str]:
    """A line for each shape, and the means."""
    of_layout = [row for row in rows if row["layout"] == layout]
    lines = []
    for shape in dict.fromkeys(row["shape"] for row in of_layout):
        by = {row["precision"]: row for row in of_layout if row["shape"] == shape}
        cells = [
            f"{by[p]['volup_ms']:.3g} | {by[p]['best_ms']:.3g} | {ratio(by[p]):.2f}"
            for p in PRECISIONS
        ]
        lines.append(f"| {shape} | {' | '.join(cells)} |")
    for op, what in (("conv", "convolutions"), ("block", "blocks")):
        means = [f"**{mean(chosen(rows, op, p, layout)):.2f}**" for p in PRECISIONS]
        lines.append(f"| geometric mean, {what} | | | {' | | | '.join(means)} |")
    return lines


def means_of(rows: list[Row]) -> str:
    """The cells of a run in the second table."""
    groups = [(op, layout) for op in ("conv", "block") for layout in LAYOUTS]
    cells = [
        ", ".join(f"{mean(chosen(rows, op, p, layout)):.2f}" for p in PRECISIONS)
        for op, layout in groups
    ]
    return " | ".join(cells)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="whether the README has these rows")
    args = parser.parse_args()
    expected = shape_rows(rows_of(RUNS[0]), "ncdhw")
    expected += [f"{means_of(rows_of(name))} |" for name in RUNS]
    if not args.check:
        print("\n".join(expected))
        return 0
    readme = (ROOT / "README.md").read_text()
    missing = [line for line in expected if line not in readme]
    for line in missing:
        print(f"error: README.md has no row {line}", file=sys.stderr)
    return int(bool(missing))


if __name__ == "__main__":
    sys.exit(main())
