"""Gathers what a GPU machine with PyTorch but without Rust needs into `.gpu-bundle/`.

    make gpu-bundle

The machine then runs `python3 .gpu-bundle/gpu.py`; see there.
"""

import argparse
import io
import json
import lzma
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).parents[1]
MOST_BYTES = 66_000_000
# Kernels are much alike, and lie far apart.
FILTERS = [{"id": lzma.FILTER_LZMA2, "preset": 1, "dict_size": 32 << 20}]
# What the tests import and PyTorch's machines seldom have.
WHEELS = ("expecttest",)
# Copied as they lie, so that scripts and tests find each other.
SOURCES = (
    "bench/*.py",
    "examples/kernelbench/*",
    "examples/superres/*.py",
    "python/tests/*.py",
    "python/pyproject.toml",
)


def run(*command: str | Path) -> str:
    return subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout


def test_binaries(package: str) -> list[Path]:
    """Builds a package's tests in release mode; the executables, without those of documentation."""
    command = ("cargo", "test", "--release", "--locked", "--no-run", "--message-format=json")
    return executables(run(*command, "--package", package).splitlines())


def executables(messages: Iterable[str]) -> list[Path]:
    """Those of tests among Cargo's messages; unit tests need no GPU."""
    found = []
    for line in messages:
        message = json.loads(line)
        if message["reason"] == "compiler-artifact" and message["target"]["kind"] == ["test"]:
            found.append(message["executable"])
    return [Path(path) for path in found if path]


def copy_binary(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)
    run("strip", "--strip-debug", target)
    # Each holds all kernels.
    packed = lzma.compress(target.read_bytes(), filters=FILTERS)
    target.with_name(f"{target.name}.xz").write_bytes(packed)
    target.unlink()


def copy_wheel(source: Path, target: Path) -> None:
    """Its files as they are, packed together: they hold all kernels as well."""
    stored = io.BytesIO()
    with zipfile.ZipFile(source) as wheel, zipfile.ZipFile(stored, "w") as copy:
        for info in wheel.infolist():
            content = wheel.read(info)
            info.compress_type = zipfile.ZIP_STORED
            copy.writestr(info, content)
    packed = lzma.compress(stored.getvalue(), filters=FILTERS)
    target.with_name(f"{target.name}.xz").write_bytes(packed)


def commit() -> str:
    dirty = "-dirty" if run("git", "status", "--porcelain").strip() else ""
    return run("git", "rev-parse", "HEAD").strip() + dirty


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def bundle(out: Path, cli: Path, wheels: Path, engine: str) -> None:
    binaries = test_binaries(engine)
    if out.exists():
        shutil.rmtree(out)
    for path in binaries:
        # Cargo's names end in a hash: <target>-<hash>.
        copy_binary(path, out / "tests" / path.name.rsplit("-", 1)[0])
    copy_binary(cli, out / "bin" / "volup")
    (out / "wheels").mkdir()
    for wheel in wheels.glob("*.whl"):
        copy_wheel(wheel, out / "wheels" / wheel.name)
    pip = (sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")
    run(*pip, "--only-binary=:all:", "--dest", out / "wheels", *WHEELS)
    for pattern in SOURCES:
        for path in ROOT.glob(pattern):
            # gpu.py belongs at the top, and this file nowhere.
            if path.is_file() and not path.name.startswith("gpu"):
                target = out / path.relative_to(ROOT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
    shutil.copy2(ROOT / "bench" / "gpu.py", out / "gpu.py")
    (out / "commit").write_text(commit() + "\n")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".gpu-bundle")
    parser.add_argument("--cli", type=Path, default=ROOT / "target/release/volup")
    parser.add_argument("--wheels", type=Path, default=ROOT / "target/wheels")
    parser.add_argument("--engine", default="volup-cuda", help="the package whose tests go along")
    args = parser.parse_args()
    bundle(args.out, args.cli, args.wheels, args.engine)
    total = size(args.out)
    print(f"{args.out}: {total / 1e6:.1f} MB of commit {(args.out / 'commit').read_text().strip()}")
    if total > MOST_BYTES:
        files = (path for path in args.out.rglob("*") if path.is_file())
        for path in sorted(files, key=lambda path: -path.stat().st_size)[:8]:
            print(f"{path.stat().st_size / 1e6:8.1f} MB  {path.relative_to(args.out)}")
        print(f"error: a bundle may take {MOST_BYTES / 1e6:.0f} MB at most", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
