"""Builds the simulator's C++ for the torch that is installed, when it is first needed.

The library is kept in a cache directory under a name made of the versions of torch and Python and
the hash of the sources, so that it is built once, also when several processes build at once.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType

import torch

_SOURCES = Path(__file__).parent / "csrc"
_CACHE_VARIABLE = "SIMULATED_ACCELERATOR_CACHE"
# Unoptimised: the simulator only queues torch's kernels.
_FLAGS = (
    "-std=c++20",
    "-O0",
    "-fPIC",
    "-Wall",
    "-Wno-deprecated-declarations",
    "-DTORCH_API_INCLUDE_EXTENSION_H",
)
_NUM_KEPT = 8  # libraries in the cache, of 5 MB each


class BuildError(RuntimeError):
    """The library could not be built."""


def missing_for_build() -> str | None:
    """Why the simulator cannot be built on this machine; None if it can, or has been."""
    if _library().exists():
        return None
    if platform.system() != "Linux":
        return f"the simulated accelerator needs Linux, this is {platform.system()}"
    if _compiler() is None:
        return "the simulated accelerator needs g++, which is not installed"
    if not (Path(sysconfig.get_paths()["include"]) / "Python.h").exists():
        return "the simulated accelerator is built with Python's headers, and there are none"
    return None


def ensure_built() -> Path:
    """The library, built if it does not exist yet. BuildError with the compiler's words."""
    library = _library()
    if not library.exists():
        _build(library)
        _prune(library.parent)
    return library


def load() -> ModuleType:
    """The module `_sim`, built first if it is not there yet. As `ensure_built`."""
    library = ensure_built()
    spec = importlib.util.spec_from_file_location("_sim", library)
    if spec is None or spec.loader is None:
        raise BuildError(f"Expected {library} to be a module, got something else.")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiler() -> str | None:
    return shutil.which(os.environ.get("CXX", "g++"))


def _library() -> Path:
    digest = hashlib.sha256(" ".join((torch.__version__, sys.version, *_FLAGS)).encode())
    for path in sorted(_SOURCES.iterdir()):
        digest.update(path.name.encode() + path.read_bytes())
    return _cache() / f"_sim-torch{torch.__version__}-{digest.hexdigest()[:16]}.so"


def _cache() -> Path:
    if _CACHE_VARIABLE in os.environ:
        return Path(os.environ[_CACHE_VARIABLE])
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "megatron-hybrid-tests"


def _build(library: Path) -> None:
    """Compiles in a temporary directory and renames the result, so that it is never partial."""
    compiler = _compiler()
    if compiler is None:
        raise BuildError("Expected g++, got none.")
    library.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=library.parent, prefix="building-") as folder:
        # Most of the time goes into torch's headers, so they are read once, for all sources.
        unit = Path(folder) / "all.cpp"
        unit.write_text(
            "".join(f'#include "{source}"\n' for source in sorted(_SOURCES.glob("*.cpp")))
        )

        linked = Path(folder) / library.name
        libraries = Path(torch.__file__).parent / "lib"
        linking = (
            f"-L{libraries}",
            "-ltorch_python",
            "-ltorch_cpu",
            "-ltorch",
            "-lc10",
            f"-Wl,-rpath,{libraries}",
        )
        done = subprocess.run(
            [compiler, *_compile_flags(), "-shared", str(unit), "-o", str(linked), *linking],
            capture_output=True,
            text=True,
        )
        if done.returncode != 0:
            raise BuildError(
                f"Expected {compiler} to build the simulator, got:\n{done.stderr[-4000:]}"
            )
        linked.rename(library)


def _prune(cache: Path) -> None:
    """Drops the oldest libraries: every change of the sources or of torch leaves one behind."""
    libraries = sorted(cache.glob("_sim-*.so"), key=lambda path: path.stat().st_mtime)
    for library in libraries[:-_NUM_KEPT]:
        # Another process may prune too; processes that have loaded a library keep their mapping.
        library.unlink(missing_ok=True)


def _compile_flags() -> list[str]:
    headers = Path(torch.__file__).parent / "include"
    folders = (headers, headers / "torch/csrc/api/include", sysconfig.get_paths()["include"])
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    return [*_FLAGS, abi, *(flag for folder in folders for flag in ("-isystem", str(folder)))]
