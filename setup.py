"""Packaging. Everything declarative stands in pyproject.toml; here the host kernel is compiled.

The kernel is a plain shared library, loaded by ctypes: one binary for every version of Python and
torch, and one wheel: py3-none-<platform>. Without a compiler the installation succeeds all the same
and torch computes what the kernel would.
"""

import os
import shlex
import subprocess
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_ext import build_ext

KERNELS = "megatron/core/optimizer/kernels"
FLAGS = [
    "-std=c++17",
    "-O3",
    "-ffp-contract=off",
    "-fno-math-errno",
    "-fPIC",
    "-shared",
    "-pthread",
    "-Wall",
    "-Wextra",
]


class BuildLibrary(build_ext):
    """Compiles with the C++ compiler named by CXX, c++ by default, and never fails the
    installation.
    """

    def get_ext_filename(self, fullname: str) -> str:
        """Without the tag of a Python version."""
        return str(Path(*fullname.split("."))) + ".so"

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        target.parent.mkdir(parents=True, exist_ok=True)
        command = [
            *shlex.split(os.environ.get("CXX", "c++")),
            *FLAGS,
            *ext.sources,
            "-o",
            str(target),
        ]
        try:
            subprocess.run(command, check=True)
        except (OSError, subprocess.CalledProcessError) as error:
            target.unlink(missing_ok=True)
            print(
                "The host kernel was not built, torch will compute the optimizer's step instead: "
                f"{error}"
            )


class TaggedWheel(bdist_wheel):
    """A wheel that every Python 3 takes, on the platform of its library."""

    def get_tag(self) -> tuple[str, str, str]:
        """(Python, ABI, platform)."""
        _, _, platform = super().get_tag()
        return "py3", "none", platform


setup(
    ext_modules=[
        Extension(
            f"{KERNELS.replace('/', '.')}.libhost_adam",
            [f"{KERNELS}/host_adam.cpp"],
            depends=[f"{KERNELS}/host_adam_body.h"],
            optional=True,
        )
    ],
    cmdclass={"bdist_wheel": TaggedWheel, "build_ext": BuildLibrary},
    # The metadata's only word for distributions that must not be installed at the same time. pip
    # ignores it; megatron/installation.py does not.
    obsoletes=["megatron.core"],
)
