"""What all tests share."""

from __future__ import annotations

import gc
import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis.configuration import set_hypothesis_home_dir

# One thread a rank: the pools' ranks and this process would otherwise fight over the cores. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# PyTorch's compiler fails in a folder with blanks in its path, which TMPDIR may be.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", f"/tmp/torchinductor_{os.getuid()}")

# On a machine that others use, a first example may take a second; and what fails must fail again.
# Hypothesis's own files are not in the checkout, which may be read-only.
set_hypothesis_home_dir(Path(tempfile.gettempdir(), f"hypothesis-{os.getuid()}"))
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

ROOT = Path(__file__).resolve().parent.parent
# The scripts at the root (pretrain_gpt.py), tools/ and the tests' own helpers (tests/helpers) are
# not installed.
sys.path.insert(0, str(ROOT))


@pytest.fixture(
    params=[
        pytest.param("sim", marks=pytest.mark.sim),
        pytest.param("cuda", marks=pytest.mark.gpu),
    ]
)
def accelerator(request: pytest.FixtureRequest) -> str:
    """The kind of device that a test's ranks have: the simulated accelerator, and a GPU."""
    return str(request.param)


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips tests that need a GPU where PyTorch can use none, before their fixtures are made."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("needs a GPU that PyTorch can use")


def pytest_collection_finish() -> None:
    """Takes what has been imported and collected out of every later look for garbage."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _the_logger_is_as_it_was() -> Iterator[None]:
    """A program that was called has set it up: pytest captures its lines in another place then."""
    logger = logging.getLogger("megatron")
    before = (list(logger.handlers), logger.level, logger.propagate)
    yield
    logger.handlers, logger.level, logger.propagate = before


@pytest.fixture(autouse=True)
def _no_process_group_is_left() -> Iterator[None]:
    """Blames the test that has left one, rather than the tests after it."""
    yield
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_initialized():
        distributed.destroy_process_group()
        pytest.fail(
            "Expected a test that leaves no process group in pytest's own process, got one: run "
            "it on a rank of `run_ranks`."
        )
