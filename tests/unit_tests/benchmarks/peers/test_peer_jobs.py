"""Jobs whose ranks reply, fail, exit and hang, and the channels to them."""

from __future__ import annotations

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from benchmarks.peers.jobs import Job, JobError, Side
from benchmarks.peers.protocol import Channel, ClosedError

FAKE_RANK = "tests.unit_tests.benchmarks.peers.helpers.fake_rank"


def job_of(tmp_path: Path, side: str = "fake") -> Job:
    return Job(
        Side("the fake", Path(sys.executable), side),
        2,
        {},
        tmp_path / "log",
        rank_module=FAKE_RANK,
    )


def is_running(process: int) -> bool:
    """Returns whether a process exists and is not a zombie. Containers may not reap orphans."""
    try:
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    except FileNotFoundError:
        return False


def two_channels() -> tuple[Channel, Channel]:
    (read_one, write_one), (read_other, write_other) = os.pipe(), os.pipe()
    return Channel(read_one, write_other), Channel(read_other, write_one)


def test_messages_arrive_whole_and_in_order_however_large() -> None:
    one, other = two_channels()
    sent = [{"text": "x" * 300_000}, {"text": "line\nbreak"}, {"text": ""}]
    sender = threading.Thread(target=lambda: [one.send(message) for message in sent])
    sender.start()
    assert [other.receive(timeout_seconds=300) for _ in sent] == sent
    sender.join()
    with pytest.raises(TimeoutError):
        other.receive(timeout_seconds=0.01)
    one.close()
    with pytest.raises(ClosedError):
        other.receive(timeout_seconds=300)
    with pytest.raises(ClosedError):
        other.send({})


def test_all_ranks_reply_and_their_output_is_not_a_reply(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.wait_built()
        answers = job.ask("echo", say="hello")
        again = job.ask("echo", say="more")

    assert [(answer["rank"], answer["said"]) for answer in answers] == [(0, "hello"), (1, "hello")]
    assert [answer["said"] for answer in again] == ["more", "more"]
    assert (tmp_path / "log").read_text().count('{"answer": "printed"}') == 4
    assert not any(is_running(answer["pid"]) for answer in answers)


def test_the_error_of_one_rank_is_raised_while_the_other_waits_for_it(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.wait_built()
        processes = [answer["pid"] for answer in job.ask("echo", say="")]
        with pytest.raises(JobError, match="the fake, rank 1: ValueError: Expected more, got less"):
            job.ask("fail", on_rank=1)

    assert not any(map(is_running, processes))


def test_the_error_of_a_rank_that_exits_has_its_code_and_last_output(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.wait_built()
        with pytest.raises(JobError, match=r"(?s)rank 0 ended with code 7.*the last words"):
            job.ask("die", on_rank=0)


def test_a_hanging_job_times_out_and_is_killed(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.wait_built()
        processes = [answer["pid"] for answer in job.ask("echo", say="")]
        message = r"within 0\.5 s, got none from ranks \[0, 1\]"
        with pytest.raises(JobError, match=message):
            job.ask("hang", timeout_seconds=0.5)

    assert not any(map(is_running, processes))


def test_a_failure_to_build_a_side_has_its_reason(tmp_path: Path) -> None:
    with (
        job_of(tmp_path, "never_built") as job,
        pytest.raises(JobError, match="ImportError: no such peer"),
    ):
        job.wait_built()


def test_child_processes_of_a_rank_end_with_it(tmp_path: Path) -> None:
    with job_of(tmp_path) as job:
        job.wait_built()
        children = [answer["child"] for answer in job.ask("start_child")]
        assert all(map(is_running, children))

    # Orphans are reaped by the system, which may take a while.
    deadline = time.monotonic() + 300
    while any(map(is_running, children)) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(map(is_running, children))
