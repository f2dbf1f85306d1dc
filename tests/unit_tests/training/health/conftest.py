"""Jobs that end with their test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import cloudpickle
import pytest

from tests.unit_tests.training.health.helpers.jobs import NAMES, Body, Job


@pytest.fixture
def start(request, tmp_path, monkeypatch) -> Iterator[Callable[..., Job]]:
    """start(body, world_size=2, is_elastic=True, **options of the watchdog) -> Job"""
    # The ranks cannot import test files, so their functions are pickled by value.
    cloudpickle.register_pickle_by_value(request.module)
    for name in (*NAMES, "RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    jobs: list[Job] = []

    def begin(body: Body, world_size: int = 2, is_elastic: bool = True, **options: Any) -> Job:
        jobs.append(Job(tmp_path, body, world_size, is_elastic, **options))
        return jobs[-1]

    yield begin
    for job in jobs:
        for process in job.processes:
            process.kill()
            process.join()
