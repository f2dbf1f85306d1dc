"""What all tests share."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

# One thread a rank: the pools' ranks and this process would otherwise fight over the cores. Before
# torch is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# On a machine that others use, a first example may take a second; and what fails must fail again,
# without a folder of examples, which a read-only checkout could not have.
settings.register_profile("project", deadline=None, derandomize=True, database=None)
settings.load_profile("project")

ROOT = Path(__file__).resolve().parent.parent
# The scripts at the root (pretrain_gpt.py), tools/ and the tests' own helpers (tests/helpers) are
# not installed.
sys.path.insert(0, str(ROOT))


def pytest_collection_finish() -> None:
    """Takes what has been imported and collected out of every later look for garbage."""
    gc.collect()
    gc.freeze()


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
