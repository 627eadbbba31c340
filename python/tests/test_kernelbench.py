"""The KernelBench solutions in the examples, against their references, at a reduced size."""

import runpy
from pathlib import Path

import pytest

CHECK = runpy.run_path(
    str(Path(__file__).parents[2] / "examples" / "kernelbench" / "check.py"), run_name="check"
)


@pytest.mark.parametrize("name", CHECK["PROBLEMS"])
def test_problem(name: str) -> None:
    results = list(CHECK["check"](name, device="cpu", full=False, trials=1))
    assert len(results) == 3
    for what, passed, difference in results:
        assert passed, f"{what}: {difference}"
