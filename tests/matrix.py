"""`make test-matrix`: the fast tests with other versions of Python and torch.

    python tests/matrix.py                 # all pairs of requirements/matrix.txt
    python tests/matrix.py 3.12:2.13.0     # this one

Each pair gets a separate environment under `--environments`, made once and kept until its
requirements change. A pair whose Python is not on this machine counts as a failure, unless
`--allow-missing` is given.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAIRS = ROOT / "requirements" / "matrix.txt"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
FAST_TESTS = ROOT / "tests" / "fast_tests.txt"
PIP = ["-m", "pip", "--quiet", "--disable-pip-version-check"]

SIDE_BY_SIDE = (
    "--numprocesses 2 --dist loadfile --no-loadscope-reorder".split()
)  # as the Makefile's

# torch decides which triton it runs with; its CPU builds leave that open.
FOLLOWS_TORCH = ("torch", "triton")

DESCRIPTION = (
    "import torch; "
    "print(torch.__version__, 'with' if torch.cuda.is_available() else 'without', 'a GPU')"
)


@dataclass(frozen=True)
class Pair:
    """A version of Python and one of torch.

    Attributes:
        python: "3.12"
        torch: "2.11.0"
    """

    python: str
    torch: str

    @classmethod
    def parse(cls, text: str) -> Pair:
        """Of "3.12:2.11.0". ValueError for anything else."""
        python, colon, torch = text.partition(":")
        if not colon or python.count(".") != 1 or torch.count(".") != 2:
            raise ValueError(f"Expected versions like 3.12:2.11.0, got {text!r}.")
        return cls(python, torch)

    def __str__(self) -> str:
        return f"Python {self.python}, torch {self.torch}"

    @property
    def folder(self) -> str:
        return f"py{self.python.replace('.', '')}-torch{self.torch}"


def lines_of(path: Path) -> list[str]:
    """The lines of a list, without comments and blank lines."""
    lines = [line.partition("#")[0].strip() for line in path.read_text().splitlines()]
    return [line for line in lines if line]


def find_python(version: str) -> str | None:
    """An interpreter of that version, from PATH or from pyenv, which installs many and has one of
    them on PATH.
    """
    found = shutil.which(f"python{version}")
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    installed = sorted(pyenv.glob(f"versions/{version}.*/bin/python{version}"))
    candidates = [found] if found else []
    candidates += [str(path) for path in reversed(installed)]
    return next((candidate for candidate in candidates if _runs(candidate, version)), None)


def _runs(python: str, version: str) -> bool:
    """Whether it is an interpreter of that version. pyenv has shims for versions that it
    does not run.
    """
    program = "import sys, venv; print('{}.{}'.format(*sys.version_info))"
    result = subprocess.run([python, "-c", program], capture_output=True, text=True, check=False)
    return result.returncode == 0 and result.stdout.strip() == version


def constraints_for(torch: str) -> str:
    """The tested versions of everything, with another torch."""
    lines = lines_of(CONSTRAINTS)
    if f"torch=={torch}" not in lines:
        lines = [line for line in lines if line.partition("==")[0] not in FOLLOWS_TORCH]
        lines.append(f"torch=={torch}")
    return "\n".join(lines) + "\n"


def install(pair: Pair, python: str, folder: Path) -> Path:
    """Makes the environment, unless it exists; returns its interpreter.

    Raises:
        subprocess.CalledProcessError: if it cannot be made.
    """
    environment_python = folder / "bin" / "python"
    stamp = folder / ".installed"
    kernels = sorted((ROOT / "megatron/core/optimizer/kernels").glob("*.[ch]*"))
    sources = [ROOT / "pyproject.toml", ROOT / "setup.py", *kernels]
    constraints = constraints_for(pair.torch)
    made_from = hashlib.sha256(
        "\0".join([constraints, *(path.read_text() for path in sources)]).encode()
    ).hexdigest()
    if stamp.exists() and stamp.read_text() == made_from:
        return environment_python

    stamp.unlink(missing_ok=True)
    subprocess.run([python, "-m", "venv", str(folder)], check=True)
    constraints_path = folder / "constraints.txt"
    constraints_path.write_text(constraints)
    install_us = ["install", "--constraint", str(constraints_path), "--editable", ".[dev]"]
    command = [str(environment_python), *PIP, *install_us]
    subprocess.run(command, cwd=ROOT, check=True)
    stamp.write_text(made_from)
    return environment_python


def outcome_of(pair: Pair, environments: Path) -> tuple[bool | None, str]:
    """Tests one pair: whether it passed (None: that Python is missing), and a
    description.
    """
    python = find_python(pair.python)
    if python is None:
        return None, f"not tested, no python{pair.python} on PATH or in pyenv"

    folder = environments / pair.folder
    print(f"\n=== {pair}: {folder}", flush=True)
    try:
        environment_python = install(pair, python, folder)
    except subprocess.CalledProcessError as error:
        return False, f"could not be installed, {error.cmd[0]} ended with {error.returncode}"

    # The installed version and its build: the same version may be a CUDA or a CPU build.
    result = subprocess.run(
        [environment_python, "-W", "ignore", "-c", DESCRIPTION],
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        *_, last_line = ["no message", *result.stderr.strip().splitlines()]
        return False, f"torch could not be imported, {last_line}"
    described = result.stdout.strip()
    if not described.startswith(pair.torch):
        return False, f"expected torch {pair.torch}, got {described}"

    start = time.monotonic()
    command = [environment_python, "-m", "pytest", "-q", *SIDE_BY_SIDE, *lines_of(FAST_TESTS)]
    tests = subprocess.run(command, cwd=ROOT, check=False)
    word = "passed" if tests.returncode == 0 else f"failed (pytest ended with {tests.returncode})"
    return tests.returncode == 0, f"{word} in {time.monotonic() - start:.0f} s, torch {described}"


def main(arguments: list[str] | None = None) -> int:
    """The process's exit code: 0 if all pairs passed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "pairs",
        nargs="*",
        type=Pair.parse,
        help="like 3.12:2.11.0; default: requirements/matrix.txt",
    )
    parser.add_argument(
        "--environments", type=Path, default=ROOT / ".venv-matrix", help="folder to make them in"
    )
    parser.add_argument(
        "--allow-missing", action="store_true", help="a Python that is not here is no failure"
    )
    options = parser.parse_args(arguments)

    pairs = options.pairs or [Pair.parse(line) for line in lines_of(PAIRS)]
    outcomes = {pair: outcome_of(pair, options.environments) for pair in pairs}

    print("\n=== the matrix")
    for pair, (_, text) in outcomes.items():
        print(f"{pair}: {text}")
    good = (True, None) if options.allow_missing else (True,)
    return 0 if all(passed in good for passed, _ in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
