"""Detects files of another distribution in this package, such as megatron-core's `megatron/core`.

pip silently lets a distribution overwrite the files of another, which leaves a mixture of both. No
package metadata can forbid that, so the import raises an error. `megatron/__init__.py` runs the
check, which megatron-core does not have, and so does `megatron/training/__init__.py`, in case
another distribution has one.

[Note: signs of foreign files] In order of cost; a millisecond together:

- `megatron/core/package_info.py`: every megatron-core has it, and this project does not. It is
  there whichever of the two was installed first, and also if its directory was copied.
- pip's list of installed files (`RECORD`): files that are missing, as after `pip uninstall
  megatron-core`, which removes the files that both have; and an `__init__.py` of another size, from
  another project's `megatron.core`. Sizes of other files are not compared: they may be edited.

A clone or an editable installation has no `RECORD`, and pip never writes there. But Python prefers
an installed megatron-core, which is a namespace, to an editable installation of this project:
`megatron.training` is then this project's and `megatron.core` is not. The path of `megatron` shows
that.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SIGN = "core/package_info.py"
_DISTRIBUTION = "megatron_hybrid-"  # prefix of the .dist-info directory
_REPAIR = (
    "Run `pip uninstall megatron-core`, then `pip install --force-reinstall --no-deps` with the "
    "wheel or clone of megatron-hybrid, and use a separate environment for megatron-core."
)


def check_installation() -> None:
    """Raises ImportError, in one line, if Python has imported another `megatron`, or if files of
    this one are another distribution's or missing.
    """
    found = [str(Path(path).resolve()) for path in sys.modules["megatron"].__path__]
    if found[:1] != [str(_PACKAGE)]:
        raise ImportError(
            f"Expected the package megatron of megatron-hybrid at {_PACKAGE}, got that of another "
            f"distribution at {', '.join(found)}. Run `pip uninstall megatron-core`, or remove its "
            "directory from PYTHONPATH; use a separate environment for it."
        )
    check_files(_PACKAGE)


def check_files(package: Path) -> None:
    """Raises ImportError, in one line, if files of `package` are another distribution's or missing.

    Args:
        package: the directory `megatron`.
    """
    expected = f"Expected {package} to hold megatron-hybrid alone, got"
    if (package / _SIGN).exists():
        raise ImportError(
            f"{expected} files of megatron-core too ({_SIGN}): both install megatron/core, and "
            f"overwrite each other's files. {_REPAIR}"
        )

    root = str(package.parent)
    for name, size in _recorded(package):
        try:
            found = os.stat(f"{root}/{name}").st_size  # noqa: PTH116  a Path costs ten times that
        except OSError:
            raise ImportError(
                f"{expected} an installation without {name}, which another distribution's "
                f"installation or removal has taken away. {_REPAIR}"
            ) from None
        if found != size and name.endswith("/__init__.py"):
            raise ImportError(
                f"{expected} a {name} of {found} bytes instead of our {size}: another distribution "
                f"has overwritten it. {_REPAIR}"
            )


def _recorded(package: Path) -> Iterator[tuple[str, int]]:
    """Our modules as pip has installed them, with their sizes in bytes; none in a clone."""
    try:
        names = os.listdir(package.parent)  # noqa: PTH208  as above
    except OSError:
        return  # imported from an archive
    folders = [name for name in names if name.startswith(_DISTRIBUTION)]
    # With the metadata of several versions, the installed one is unknown.
    if len(folders) != 1:
        return
    try:
        lines = (package.parent / folders[0] / "RECORD").read_text(encoding="utf-8").splitlines()
    except OSError:
        return

    for line in lines:
        # name,sha256=...,size; our names have no commas, which would be quoted
        name, size = line.partition(",")[0], line.rpartition(",")[2]
        if name.startswith(f"{package.name}/") and name.endswith(".py") and size.isdigit():
            yield name, int(size)
