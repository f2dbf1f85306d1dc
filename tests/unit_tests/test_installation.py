"""The wheel, and what becomes of it beside a megatron-core: real installations by pip, without a
network.
"""

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

from megatron.installation import check_installation

ROOT = Path(__file__).resolve().parents[2]
# Of megatron-core 0.16.1, for the purpose: one file that we have too, and two that we have not.
FOREIGN = {
    "megatron/core/__init__.py": "import megatron.core.parallel_state  # theirs\n",
    "megatron/core/package_info.py": "MAJOR = 0\n",
    "megatron/core/parallel_state.py": "raise ImportError('theirs was imported')\n",
}
REPAIR = "Run `pip uninstall megatron-core` and `pip install --force-reinstall"


def without_paths(**others: str) -> dict[str, str]:
    """This process's environment without PYTHONPATH, on which the clone itself may be."""
    return {key: text for key, text in os.environ.items() if key != "PYTHONPATH"} | others


def pip(*arguments: str | Path) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    environment = without_paths(CXX="false")
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300)
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built as pip builds it, but without a compiler: the kernel would take most of the time."""
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
    """A virtual environment of its own, which has nothing but what is installed here."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.python = folder / "bin" / "python"
        version = f"python{sysconfig.get_python_version()}"
        self.packages = folder / "lib" / version / "site-packages"

    def pip(self, *arguments: str | Path) -> None:
        pip("--python", self.python, *arguments)

    def run(self, *command: str | Path) -> subprocess.CompletedProcess[str]:
        """From an empty folder, with no other path of Python's."""
        return subprocess.run(
            list(map(str, command)),
            capture_output=True,
            text=True,
            env=without_paths(),
            cwd=self.packages.parents[2],
            timeout=60,
        )

    def error_of(self, statement: str) -> str:
        """The last line that an import prints; "" if it succeeds."""
        done = self.run(self.python, "-c", statement)
        return done.stderr.rstrip("\n").rpartition("\n")[2]


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(tmp_path / "environment")


def test_one_wheel_serves_every_python_and_has_two_packages_and_a_script(wheel: Path) -> None:
    assert "-py3-none-" in wheel.name
    assert not wheel.name.endswith("-any.whl"), "its library is of one platform"
    with zipfile.ZipFile(wheel) as archive:
        tops = {name.partition("/")[0] for name in archive.namelist()}
        (info,) = (top for top in tops if top.endswith(".dist-info"))
        metadata = archive.read(f"{info}/METADATA").decode()
        scripts = archive.read(f"{info}/entry_points.txt").decode()

    assert tops == {"megatron", "megatron_hybrid", info}
    assert "megatron-hybrid = megatron_hybrid.command_line:main" in scripts
    assert "\nObsoletes: megatron.core\n" in metadata


def test_megatron_core_after_us_is_one_clear_line_at_every_import(
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

    script = environment.python.parent / "megatron-hybrid"
    done = environment.run(script, "status", ".")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("megatron-hybrid status: Expected ")

    # It takes along what both have.
    environment.pip("uninstall", "--yes", "megatron-core")
    line = environment.error_of("import megatron.training")
    assert "got an installation without megatron/core/__init__.py" in line
    assert REPAIR in line
    environment.pip("install", "--force-reinstall", "--no-deps", "--no-index", wheel)
    assert environment.error_of("import megatron.training") == ""


def test_megatron_core_before_us_is_the_same_line(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    environment.pip("install", "--no-deps", "--no-index", megatron_core(tmp_path))
    environment.pip("install", "--no-deps", "--no-index", wheel)
    assert "theirs" not in (environment.packages / "megatron/core/__init__.py").read_text()
    line = environment.error_of("import megatron.core")
    assert "got files of megatron-core too" in line


def test_a_package_of_another_path_is_one_line_of_the_script(
    wheel: Path, environment: Environment, tmp_path: Path
) -> None:
    """As in a clone of Megatron-LM that PYTHONPATH names: no line of our `megatron` is run."""
    environment.pip("install", "--no-deps", "--no-index", wheel)
    other = tmp_path / "other" / "megatron" / "training"
    other.mkdir(parents=True)
    statement = (
        f"import sys; sys.path.insert(0, {str(tmp_path / 'other')!r}); "
        "from megatron_hybrid.command_line import main; sys.exit(main(['status', '.']))"
    )
    (other.parent / "__init__.py").touch()
    line = environment.error_of(statement)
    assert line.startswith("megatron-hybrid status: Expected the package megatron of")
    assert f"got that of another distribution at {other.parent}" in line


def unpacked(wheel: Path, folder: Path, files: Mapping[str, str | None]) -> Path:
    """The wheel as pip would install it, with files that are changed, or taken away. Returns
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
def test_each_sign_of_foreign_files_is_enough(
    wheel: Path, tmp_path: Path, name: str, text: str | None, message: str
) -> None:
    with pytest.raises(ImportError, match=message) as caught:
        check_installation(unpacked(wheel, tmp_path, {name: text}))
    assert "\n" not in str(caught.value)


def test_files_of_ours_may_be_edited_and_others_may_lie_beside_them(
    wheel: Path, tmp_path: Path
) -> None:
    changed = {"megatron/core/lanes.py": "print()\n", "megatron/core/mine.py": "x = 1\n"}
    check_installation(unpacked(wheel, tmp_path / "edited", changed))
    # A clone has no RECORD: nothing is compared with one.
    package = unpacked(wheel, tmp_path / "clone", {"megatron/core/lanes.py": None})
    for path in (tmp_path / "clone").glob("*.dist-info"):
        shutil.rmtree(path)
    check_installation(package)


def test_the_question_costs_an_import_next_to_nothing(wheel: Path, tmp_path: Path) -> None:
    """pip's metadata is one file of text here: the library that parses it takes longer than all of
    `import megatron`.
    """
    package = unpacked(wheel, tmp_path, {})
    statement = (
        f"import sys; sys.path.insert(0, {str(package.parent)!r}); import megatron; "
        "print(sorted({'csv', 'email', 'hashlib', 'importlib.metadata', 'torch'} & {*sys.modules}))"
    )
    command = [sys.executable, "-I", "-S", "-c", statement]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")
