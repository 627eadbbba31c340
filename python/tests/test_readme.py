"""The front page's examples run as they stand there; Rust's run with the crate `volup-cpu`."""

import os
import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

README = Path(__file__).parents[2] / "README.md"
CLI = os.environ.get("VOLUP_CLI")


def blocks(language: str) -> list[str]:
    pattern = rf"^```{language}\n(.*?)^```$"
    return re.findall(pattern, README.read_text(), flags=re.DOTALL | re.MULTILINE)


def test_examples(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    examples = blocks("python")
    assert examples
    for example in examples:
        exec(compile(example, str(README), "exec"), {"__name__": "__main__"})

    # The commands run on the decoder that the Python example has exported.
    commands = [line for block in blocks("sh") for line in block.splitlines()]
    commands = [line for line in commands if line.startswith("volup ")]
    assert len(commands) >= 4
    if CLI is None:
        pytest.skip("VOLUP_CLI does not name the command-line program")
    monkeypatch.setenv("PATH", str(Path(CLI).parent), prepend=os.pathsep)
    np.save("features.npy", np.ones((1, 32, 3, 4, 5), dtype=np.float32))
    for command in commands:
        subprocess.run(command.split(), check=True, capture_output=True)
    assert np.load("volume.npy").shape == (1, 1, 6, 8, 10)
