"""The front page's examples run as they stand there."""

import re
from pathlib import Path

import pytest

README = Path(__file__).parents[2] / "README.md"
TEXT = README.read_text() if README.exists() else ""
EXAMPLES = re.findall(r"^```python\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.skipif(not EXAMPLES, reason="the tests are not in the repository")
@pytest.mark.parametrize("example", EXAMPLES)
def test_example(example: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(example, str(README), "exec"), {"__name__": "__main__"})
