"""The wheel, alone and with a megatron-core: real installations by pip, without a network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from megatron.installation import check_files

ROOT = Path(__file__).resolve().parents[2]
# Files of megatron-core 0.16.1: one that this project has too, and two that it does not have.
FOREIGN = {
    "megatron/core/__init__.py": "import megatron.core.parallel_state  # theirs\n",
    "megatron/core/package_info.py": "MAJOR = 0\n",
    "megatron/core/parallel_state.py": "raise ImportError('theirs was imported')\n",
}
REPAIR = "Run `pip uninstall megatron-core`, then `pip install --force-reinstall"


def without_paths(**others: str) -> dict[str, str]:
    """This process's environment without PYTHONPATH, on which the clone itself may be."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONPATH"} | others


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = without_paths(CXX="false")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Builds the wheel as pip does, without a compiler: the kernel would take most of the time."""
    source = tmp_path_factory.mktemp("source")
    for name in ("megatron", "megatron_hybrid"):
        ignored = shutil.ignore_patterns("__pycache__", "*.so")
        shutil.copytree(ROOT / name, source / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)

    target = tmp_path_factory.mktemp("wheel")
    offline = ("--no-build-isolation", "--no-deps", "--no-index")
    pip("wheel", *offline, "--wheel-dir", target, source)
    (built,) = target.iterdir()
    return built


def megatron_core(folder: Path) -> Path:
    """A wheel under megatron-core's name, with some of its files."""
    info = "megatron_core-0.16.1.dist-info"
    files = {
        **FOREIGN,
        f"{info}/METADATA": "Metadata-Version: 2.1\nName: megatron-core\nVersion: 0.16.1\n",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},,\n" for name in (*files, f"{info}/RECORD"))
    path = folder / "megatron_core-0.16.1-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in {**files, f"{info}/RECORD": record}.items():
            archive.writestr(name, text)
    return path


class Environment:
    """A separate virtual environment without other packages."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        version = f"python{sysconfig.get_python_version()}"
        self.packages = folder / "lib" / version / "site-packages"

    def pip(self, *arguments: str | Path) -> None:
        pip("--python", self.python, *arguments)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """Runs Python in an empty directory, without other entries on its path."""
        return subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env=without_paths(),
            cwd=self.packages.parents[2],
            timeout=600,
        )

    def error_of(self, statement: str) -> str:
        """The last line that an import prints; "" if it succeeds."""
        done = self.run(self.python, "-c", statement)
        return done.stderr.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_the_wheel_supports_every_python_and_has_two_packages_with_their_data(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl"), "its library is of one platform"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        tops = {name.partition("/")[0] for name in names}
        (info,) = (top for top in tops if top.endswith(".dist-info"))
        metadata = archive.read(f"{info}/METADATA").decode()

    assert tops == {"megatron", "megatron_hybrid", info}
    assert {
        "megatron/py.typed",
        "megatron/training/flag_answers.yaml",
        "megatron_hybrid/report/page.html.jinja",
    } <= {*names}
    assert "\nObsoletes: megatron.core\n" in metadata


def test_installing_megatron_core_afterwards_is_a_clear_error_at_every_import(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.pip("install", "--no-deps", "--no-index", wheel)
    modules = ("megatron.training", "megatron.core", "megatron.core.optimizer.cpu_offloading")
    assert environment.error_of("import megatron.training") == ""
    environment.pip("install", "--no-deps", "--no-index", megatron_core(tmp_path))
    assert "theirs" in (environment.packages / "megatron/core/__init__.py").read_text()
    for module in modules:
        line = environment.error_of(f"import {module}")
        assert line.startswith("ImportError: Expected ")
        assert "got files of megatron-core too (core/package_info.py)" in line
        assert REPAIR in line

    done = environment.run(environment.python, "-m", "megatron_hybrid", "status", ".")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("python -m megatron_hybrid status: Expected ")

    # pip deletes the files that both projects have.
    environment.pip("uninstall", "--yes", "megatron-core")
    line = environment.error_of("import megatron.training")
    assert "got an installation without megatron/core/__init__.py" in line
    assert REPAIR in line
    environment.pip("install", "--force-reinstall", "--no-deps", "--no-index", wheel)
    assert environment.error_of("import megatron.training") == ""


def test_importing_megatron_from_another_path_is_an_error_of_one_line(
    wheel: Path, tmp_path: Path
) -> None:
    """As with PYTHONPATH set to a clone of Megatron-LM, whose `megatron` is imported instead."""
    package = unpacked(wheel, tmp_path / "ours", {})
    other = tmp_path / "other" / "megatron" / "training"
    other.mkdir(parents=True)
    (other.parent / "__init__.py").touch()
    paths = [str(tmp_path / "other"), str(package.parent)]
    statement = (
        f"import sys; sys.path[:0] = {paths}; "
        "from megatron_hybrid.command_line import main; sys.exit(main(['status', '.']))"
    )
    line = error_of(statement)
    assert line.startswith("python -m megatron_hybrid status: Expected the package megatron of")
    assert f"got that of another distribution at {other.parent}" in line


def test_megatron_core_next_to_an_editable_installation_is_an_error_of_one_line(
    wheel: Path, tmp_path: Path
) -> None:
    """Python finds the namespace `megatron` in site-packages before it calls setuptools' finder."""
    packages = tmp_path / "site-packages"
    with zipfile.ZipFile(megatron_core(tmp_path)) as archive:
        archive.extractall(packages)
    package = unpacked(wheel, tmp_path / "clone", {})
    command = f"""
import importlib.util, os, sys
class Finder:  # does what setuptools' does
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name.partition(".")[0] != "megatron":
            return None
        folder = {str(package.parent)!r} + "/" + name.replace(".", "/")
        if os.path.isdir(folder):
            return importlib.util.spec_from_file_location(
                name, folder + "/__init__.py", submodule_search_locations=[folder]
            )
        return importlib.util.spec_from_file_location(name, folder + ".py")
sys.path.insert(0, {str(packages)!r})
sys.meta_path.append(Finder)
import megatron.training
"""
    line = error_of(command)
    assert line.startswith(
        f"ImportError: Expected the package megatron of megatron-hybrid at {package}"
    )
    assert f"got that of another distribution at {packages / 'megatron'}" in line


def run_alone(statement: str) -> subprocess.CompletedProcess[str]:
    """Runs a program with a Python that has only the standard library."""
    command = [sys.executable, "-I", "-S", "-c", statement]
    return subprocess.run(command, capture_output=True, text=True, timeout=600)


def error_of(statement: str) -> str:
    """The last line on stderr of a program without packages."""
    return run_alone(statement).stderr.rstrip("\n").rpartition("\n")[2]


def unpacked(wheel: Path, folder: Path, files: Mapping[str, str | None]) -> Path:
    """Unpacks the wheel as pip does, with changed or removed files. Returns the path of
    `megatron`.
    """
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder)
    for name, text in files.items():
        if text is None:
            (folder / name).unlink()
        else:
            (folder / name).write_text(text)
    return folder / "megatron"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("megatron/core/__init__.py", "# of a fork\n", "a megatron/core/__init__.py of 12 bytes"),
        ("megatron/core/lanes.py", None, "an installation without megatron/core/lanes.py"),
        ("megatron/core/package_info.py", "", "files of megatron-core too"),
    ],
)
def test_each_sign_of_foreign_files_is_detected(
    wheel: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    with pytest.raises(ImportError, match=message) as caught:
        check_files(unpacked(wheel, tmp_path, {name: text}))
    assert "\n" not in str(caught.value)


def test_files_of_this_project_may_be_edited_and_others_added(wheel: Path, tmp_path: Path) -> None:
    changed = {"megatron/core/lanes.py": "print()\n", "megatron/core/mine.py": "x = 1\n"}
    check_files(unpacked(wheel, tmp_path / "edited", changed))
    # A clone has no RECORD, so there is no comparison with one.
    package = unpacked(wheel, tmp_path / "clone", {"megatron/core/lanes.py": None})
    for path in (tmp_path / "clone").glob("*.dist-info"):
        shutil.rmtree(path)
    check_files(package)


def test_the_check_adds_little_to_the_time_of_an_import(wheel: Path, tmp_path: Path) -> None:
    """The check reads pip's metadata as text, since importing a parser would take longer than
    `import megatron`.
    """
    package = unpacked(wheel, tmp_path, {})
    statement = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); import megatron; "
        "print(sorted({'csv', 'email', 'hashlib', 'importlib.metadata', 'torch'} & {*sys.modules}))"
    )
    done = run_alone(statement)
    assert (done.stdout, done.stderr) == ("[]\n", "")


@pytest.mark.peer
def test_the_real_megatron_core_is_detected_in_either_order(wheel: Path, tmp_path: Path) -> None:
    """The other project is installed over this one, or this one over it, as by pip."""
    (theirs,) = (ROOT / ".venv-peers" / "megatron-core" / "lib").glob(
        "*/site-packages/megatron/core"
    )
    after = unpacked(wheel, tmp_path / "after", {})
    shutil.copytree(theirs, after / "core", dirs_exist_ok=True)
    shutil.copytree(theirs, tmp_path / "before" / "megatron" / "core")
    before = unpacked(wheel, tmp_path / "before", {})
    for package in (after, before):
        with pytest.raises(ImportError, match="got files of megatron-core too"):
            check_files(package)

    # Removing it deletes the files that both projects have.
    for path in theirs.rglob("*.py"):
        (after / "core" / path.relative_to(theirs)).unlink()
    with pytest.raises(
        ImportError, match=r"got an installation without megatron/core/__init__\.py"
    ):
        check_files(after)


@pytest.mark.wide
def test_an_installation_trains_and_exports_from_an_empty_directory(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    """Runs in a separate environment with this one's packages except for this project."""
    environment.pip("install", "--no-deps", "--no-index", wheel)
    (environment.packages / "borrowed.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    job = tmp_path / "job"
    (job / "texts").mkdir(parents=True)
    (job / "texts" / "a.txt").write_text("def main():\n    return the_answer()\n" * 400)
    command = (str(environment.python), "-m", "megatron_hybrid")

    def run(*words: str) -> str:
        done = subprocess.run(
            words,
            capture_output=True,
            text=True,
            cwd=job,
            env=without_paths(OMP_NUM_THREADS="1"),
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    tokenizer = ("--tokenizer-model", "data/tokenizer.json")
    train_tokenizer = ("--train-tokenizer", "--vocab-size", "300", *tokenizer)
    run(*command, "preprocess", "--input", "texts", "--output-prefix", "data/own", *train_tokenizer)
    settings = (
        "--data-path data/own_text_document --split 90,10,0 --num-layers 1 --hidden-size 32 "
        "--num-attention-heads 2 --seq-length 16 --normalization RMSNorm --swiglu "
        "--disable-bias-linear --ffn-hidden-size 48 --num-workers 0 --micro-batch-size 2 "
        "--train-iters 4 --lr 1e-2 --eval-iters 0 --bf16 --optimizer-cpu-offload --save runs/own"
    ).split()
    torchrun = (str(environment.python), "-m", "torch.distributed.run", "--standalone")
    ranks = ("--nproc-per-node", "2", "-m", "megatron_hybrid", "pretrain")
    run(*torchrun, *ranks, *settings, *tokenizer)

    assert run(*command, "status", "runs/own").startswith("state: finished")
    assert "iter_0000004" in run(*command, "checkpoint", "list", "runs/own")
    assert "LlamaForCausalLM" in run(*command, "checkpoint", "export", "runs/own", "exports/own")
    asked = ("--prompt", "def main", "--max-new-tokens", "4", "--temperature", "0")
    written = run(*command, "generate", "--load", "exports/own", *asked)
    assert written.startswith("--- prompt: 'def main'\ndef main")
    assert run(*command, "generate", "--load", "runs/own", *asked) == written
