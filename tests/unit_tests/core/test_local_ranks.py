"""How many cores a process may use: its affinity's, or as many as a quota pays for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from megatron.core import local_ranks
from megatron.core.local_ranks import cpu_quota, num_usable_cores


class Groups:
    """Control groups as Linux shows them, and which of them a process is in."""

    def __init__(self, folder: Path, own: str) -> None:
        self.root = folder / "cgroup"
        self.own = folder / "own"
        self.own.write_text(own)

    def write(self, path: str, content: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(content)

    @property
    def quota(self) -> float | None:
        return cpu_quota(self.root, self.own)


def test_the_least_quota_on_the_way_to_the_root_counts(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/pods/one/main\n")
    assert groups.quota is None
    groups.write("cpu.max", "max 100000\n")
    groups.write("pods/cpu.max", "1200000 100000\n")
    assert groups.quota == 12.0
    groups.write("pods/one/cpu.max", "250000 100000\n")
    groups.write("pods/one/main/cpu.max", "max 100000\n")
    groups.write("pods/other/cpu.max", "100000 100000\n")
    assert groups.quota == 2.5


def test_a_container_sees_its_group_as_the_root(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "0::/../../outside\n")
    groups.write("cpu.max", "400000 100000\n")
    assert groups.quota == 4.0


def test_version_1_has_two_files_and_no_limit_is_minus_one(tmp_path: Path) -> None:
    groups = Groups(tmp_path, "5:memory:/job\n4:cpu,cpuacct:/job\n")
    groups.write("cpu/cpu.cfs_quota_us", "-1\n")
    groups.write("cpu/cpu.cfs_period_us", "100000\n")
    assert groups.quota is None
    groups.write("cpu/job/cpu.cfs_quota_us", "350000\n")
    groups.write("cpu/job/cpu.cfs_period_us", "100000\n")
    assert groups.quota == 3.5


@pytest.mark.parametrize("content", ["", "max", "a b", "1 2 3", "100000 0", "-5 100000"])
def test_an_invalid_quota_sets_no_limit(tmp_path: Path, content: str) -> None:
    groups = Groups(tmp_path, "0::/\nnonsense\n::\n")
    groups.write("cpu.max", content)
    assert groups.quota is None


@pytest.mark.parametrize(("quota", "expected"), [(None, 8), (12.0, 8), (2.5, 2), (0.5, 1)])
def test_affinity_and_quota_both_bind(
    monkeypatch: pytest.MonkeyPatch, quota: float | None, expected: int
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(local_ranks, "cpu_quota", lambda: quota)
    assert num_usable_cores() == expected
