"""The script behind `make test-matrix`, and the list of fast tests, without installing anything."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import matrix
from tests.matrix import Pair, constraints_for, find_python, lines_of

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
PACKAGES = [
    path
    for path in (matrix.ROOT / "tests" / "unit_tests").rglob("*")
    if list(path.glob("test_*.py"))
]


def script(path: Path, content: str) -> None:
    path.write_text(f"#!/bin/sh\n{content}\n")
    path.chmod(0o755)


@pytest.fixture
def machine(tmp_path, monkeypatch) -> Path:
    """A machine whose PATH is an empty directory that tests fill."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setenv("PYENV_ROOT", str(tmp_path / "pyenv"))
    return folder


def test_the_matrix_has_every_supported_python_and_the_torch_that_all_tests_run_with():
    pairs = [Pair.parse(line) for line in lines_of(matrix.PAIRS)]
    assert {pair.python for pair in pairs} == {"3.10", "3.11", "3.12"}
    assert f"torch=={next(pair.torch for pair in pairs if pair.python == '3.11')}" in lines_of(
        matrix.CONSTRAINTS
    )


@pytest.mark.parametrize("text", ["3.12", "3.12:2.11", "3:2.11.0", "3.12.1:2.11.0", ":"])
def test_an_invalid_pair_of_versions_is_rejected(text):
    with pytest.raises(ValueError, match=r"Expected versions like 3\.12:2\.11\.0, got"):
        Pair.parse(text)


def test_an_interpreter_is_found_on_the_path_by_its_version(machine):
    (machine / f"python{HERE}").symlink_to(sys.executable)
    assert find_python(HERE) == str(machine / f"python{HERE}")
    script(machine / "python3.10", "echo 3.9")
    assert find_python("3.10") is None


def test_a_shim_that_does_not_run_is_skipped_for_the_interpreter_that_pyenv_installed(
    machine,
):
    script(machine / f"python{HERE}", "exit 127")
    real = machine.parent / "pyenv" / "versions" / f"{HERE}.7" / "bin" / f"python{HERE}"
    real.parent.mkdir(parents=True)
    real.symlink_to(sys.executable)
    assert find_python(HERE) == str(real)


@pytest.mark.usefixtures("machine")
def test_a_missing_python_fails_the_run_unless_allowed(capsys):
    assert matrix.main(["3.10:2.12.1"]) == 1
    assert "Python 3.10, torch 2.12.1: not tested" in capsys.readouterr().out
    assert matrix.main(["--allow-missing", "3.10:2.12.1"]) == 0


def test_a_pair_that_cannot_import_torch_fails_alone_and_the_next_one_is_tested(
    tmp_path, capsys, monkeypatch
):
    def install(pair: Pair, _: str, folder: Path) -> Path:
        folder.mkdir()
        lacks = "echo 'ImportError: libcudart.so.13: no such file' >&2; exit 1"
        script(folder / "python", lacks if pair.torch == "2.11.0" else "echo 2.12.1 without a GPU")
        return folder / "python"

    monkeypatch.setattr(matrix, "install", install)
    assert matrix.main(["--environments", str(tmp_path), f"{HERE}:2.11.0", f"{HERE}:2.12.1"]) == 1
    summary = capsys.readouterr().out.partition("=== the matrix\n")[2].splitlines()
    assert summary[0].endswith("ImportError: libcudart.so.13: no such file")
    assert "torch 2.12.1: passed" in summary[1]


def test_another_torch_takes_its_own_triton_and_the_tested_versions_of_the_rest():
    tested = lines_of(matrix.CONSTRAINTS)
    other = constraints_for("2.11.0").splitlines()
    assert set(other) - set(tested) == {"torch==2.11.0"}
    left_out = {line.partition("==")[0] for line in set(tested) - set(other)}
    assert left_out == {"torch", "triton"}


def test_the_torch_that_all_tests_run_with_takes_all_tested_versions():
    tested = lines_of(matrix.CONSTRAINTS)
    torch = next(line for line in tested if line.startswith("torch=="))
    assert constraints_for(torch.partition("==")[2]).splitlines() == tested


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_every_package_has_a_fast_test(package):
    files = [matrix.ROOT / line.partition("::")[0] for line in lines_of(matrix.FAST_TESTS)]
    assert any(package in (file, file.parent) for file in files)
