"""The directory that these tests save to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit_tests.core.dist_checkpointing.helpers.scenes import memory_folder


@pytest.fixture(scope="module")
def home() -> Iterator[Path]:
    with memory_folder() as folder:
        yield folder
