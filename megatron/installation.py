"""Whether the files of this package are ours: megatron-core installs a `megatron/core` of its own.

pip lets a distribution overwrite the files of another without a word, and what remains is a mixture
of both. Nothing in a package's metadata can forbid that, so the import refuses to go on with it.
`megatron/__init__.py` asks, which megatron-core does not have, and `megatron/training/__init__.py`,
should another distribution bring one.

[Note: what tells foreign files] In order of cost; a millisecond together:

- `megatron/core/package_info.py`: every megatron-core has it, and this project does not. It is
  there whichever of the two was installed first, and also where its folder was merely copied.
- What pip noted when it installed us (`RECORD`): files that are missing, as after `pip uninstall
  megatron-core`, which removes what both have; and an `__init__.py` of another size, by any other
  project's `megatron.core`. Sizes of other files are not compared: they may have been edited.

A clone, and an editable installation, have no `RECORD` beside them, and pip never writes there. But
Python takes an installed megatron-core, which is a namespace, before an editable installation of
ours: `megatron.training` is ours then and `megatron.core` theirs. The path of `megatron` tells.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
_SIGN = "core/package_info.py"
_DISTRIBUTION = "megatron_hybrid-"  # begins the name of the folder that pip makes for our metadata
_REPAIR = (
    "Run `pip uninstall megatron-core`, then `pip install --force-reinstall --no-deps` with the "
    "wheel or clone of megatron-hybrid, and keep megatron-core in an environment of its own."
)


def check_installation() -> None:
    """Raises ImportError, in one line, if Python has imported another `megatron`, or if files of
    this one are another distribution's or missing.
    """
    found = [str(Path(path).resolve()) for path in sys.modules["megatron"].__path__]
    if found[:1] != [str(_PACKAGE)]:
        raise ImportError(
            f"Expected the package megatron of megatron-hybrid at {_PACKAGE}, got that of another "
            f"distribution at {', '.join(found)}. Run `pip uninstall megatron-core`, or take its "
            "folder off PYTHONPATH; keep it in an environment of its own."
        )
    check_files(_PACKAGE)


def check_files(package: Path) -> None:
    """Raises ImportError, in one line, if files of `package` are another distribution's or missing.

    Args:
        package: the folder `megatron`.
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
    # Where several versions left their metadata, nobody knows which one is there.
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
