from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.health.cause import (
    Absent,
    Frame,
    Record,
    Silence,
    Verdict,
    find_cause,
    is_peer_failure,
    place_of,
)
from megatron.training.health.exits import ExitCode
from megatron.training.health.progress import Phase

CLOSED = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:5547."
)
LATE = (
    "RuntimeError: [gloo/transport/tcp/unbound_buffer.cc:78] "
    "Timed out waiting 6000ms for recv operation to complete"
)


def rank(number: int, **fields: object) -> Record:
    return replace(
        Record(number, "host", 100 + number, Phase.AGREE, 17, 2, 0.1, waits=True), **fields
    )


def stuck(number: int, **fields: object) -> Record:
    return rank(number, **{"is_stuck": True, "needs_all": True, "idle_seconds": 30.0, **fields})


def lost(number: int, text: str = CLOSED, **fields: object) -> Record:
    return rank(number, **{"failed_collective": text, "needs_all": True, **fields})


def absent(number: int, silence: Silence) -> Absent:
    return Absent(number, silence, "host", 100 + number)


OWN = rank(2, phase=Phase.FORWARD, error="ValueError: boom", error_order=1, waits=False)
LATER = replace(OWN, rank=1, error="KeyError: 3", error_order=2)
DOES_NOT_RESPOND = "rank 1 (host, pid 101) does not respond"
NO_PROGRESS = "has made no progress for 30 s, in iteration 17"
LOST, HANG = ExitCode.LOST_RANK, ExitCode.HANG


@pytest.mark.parametrize(
    ("records", "missing", "code", "ranks", "clause"),
    [
        ([lost(0), lost(1), OWN], [], LOST, (2,), "iteration 17, forward: ValueError: boom"),
        ([lost(0), OWN, LATER], [absent(3, Silence.GONE)], LOST, (2, 1), "(so did rank 1)"),
        ([lost(0), lost(1)], [absent(2, Silence.GONE)], LOST, (2,), "was killed or has crashed"),
        (
            [stuck(0)],
            [absent(1, Silence.SILENT), absent(3, Silence.GONE), absent(2, Silence.GONE)],
            LOST,
            (2, 3, 1),
            f"rank 3 (host, pid 103) were killed or have crashed; {DOES_NOT_RESPOND}",
        ),
        ([stuck(0)], [absent(1, Silence.STOPPED)], HANG, (1,), f"{DOES_NOT_RESPOND}, since its"),
        ([lost(0)], [absent(1, Silence.SILENT)], LOST, (1,), f"{DOES_NOT_RESPOND}: it hangs"),
        ([lost(0), rank(1, signal="SIGTERM", has_left=True)], [], LOST, (1,), "by SIGTERM"),
        (
            [stuck(0), rank(1, waits=False, idle_seconds=29.0, place="a place"), stuck(2)],
            [],
            HANG,
            (1,),
            "no progress for 29 s, in iteration 17, agree, at a place",
        ),
        # A rank that makes progress does not hang.
        (
            [stuck(0), rank(1, waits=False, idle_seconds=0.2), stuck(2, waits=False)],
            [],
            HANG,
            (2,),
            NO_PROGRESS,
        ),
        # All ranks wait, and one is behind the others.
        ([stuck(0), stuck(1, num_marks=1), stuck(2)], [], HANG, (1,), NO_PROGRESS),
        ([stuck(0), stuck(1)], [], HANG, (0, 1), "all 2 ranks wait for one another"),
        # A collective that timed out is a hang as well.
        (
            [lost(0, LATE), lost(1, CLOSED), rank(2, waits=False, idle_seconds=6.0)],
            [],
            HANG,
            (2,),
            "no progress for 6 s",
        ),
        ([lost(0), rank(1)], [], LOST, (0,), f"though all ranks respond: {CLOSED}"),
    ],
)
def test_the_cause_is_the_first_that_applies_in_any_order_of_the_reports(
    records, missing, code, ranks, clause
):
    for ordered in itertools.permutations(records):
        verdict = find_cause(ordered, list(reversed(missing)))
        assert (verdict.code, verdict.ranks) == (code, ranks)
        assert clause in verdict.text
        assert verdict.speaker == min(record.rank for record in records if not record.has_left)
    assert Verdict.from_json(json.loads(json.dumps(verdict.to_json()))) == verdict


@pytest.mark.parametrize(
    ("records", "missing"),
    [
        ([rank(0), rank(1)], []),
        ([rank(0, waits=False, idle_seconds=1e4)], []),
        # No rank needs the silent ones.
        ([rank(0)], [absent(1, Silence.SILENT), absent(2, Silence.STOPPED)]),
        # The launcher may be ending all ranks.
        ([rank(0), rank(1, signal="SIGTERM", has_left=True)], []),
        # All ranks have finished, one without writing so.
        ([], [absent(1, Silence.GONE)]),
    ],
)
def test_a_run_without_a_failure_continues(records, missing):
    assert find_cause(records, missing) is None


records_of_runs = st.lists(
    st.builds(
        Record,
        rank=st.integers(0, 5),
        iteration=st.integers(0, 2),
        num_marks=st.integers(0, 2),
        idle_seconds=st.sampled_from([0.0, 5.0, 30.0]),
        is_stuck=st.booleans(),
        waits=st.booleans(),
        needs_all=st.booleans(),
        error=st.sampled_from([None, None, "ValueError"]),
        error_order=st.integers(0, 3),
        failed_collective=st.sampled_from([None, None, CLOSED, LATE]),
        signal=st.sampled_from([None, None, "SIGTERM"]),
    ),
    unique_by=lambda record: record.rank,
)


@given(
    records_of_runs,
    st.lists(
        st.builds(Absent, st.integers(6, 9), st.sampled_from(list(Silence))),
        unique_by=lambda absent: absent.rank,
    ),
    st.randoms(use_true_random=False),
)
def test_every_state_of_a_run_has_one_cause_in_any_order(records, missing, random):
    verdict = find_cause(records, missing)
    random.shuffle(records)
    random.shuffle(missing)
    assert find_cause(records, missing) == verdict
    is_well = not any(r.error or r.failed_collective or r.is_stuck for r in records) and not missing
    assert (verdict is None) == is_well or (
        verdict is None and not any(r.needs_all for r in records)
    )
    if verdict is not None:
        known = {record.rank for record in records} | {one.rank for one in missing}
        assert verdict.ranks
        assert set(verdict.ranks) <= known
        assert verdict.code in (ExitCode.LOST_RANK, ExitCode.HANG)
        if any(record.error for record in records):
            assert all(record.error for record in records if record.rank in verdict.ranks)


def test_many_ranks_are_counted_and_not_listed():
    verdict = find_cause([lost(0)], [absent(number, Silence.GONE) for number in range(1, 101)])
    assert len(verdict.ranks) == 100
    assert "rank 8 (host, pid 108) and 92 more were killed or have crashed" in verdict.text
    assert "rank 9 " not in verdict.text


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError(CLOSED),
        RuntimeError(LATE),
        RuntimeError("Rank 2 successfully reached monitoredBarrier, but received errors"),
        RuntimeError("Gloo connectFullMesh failed with [gloo/transport/tcp/pair.cc:152]"),
        dist.DistBackendError("NCCL error in: ProcessGroupNCCL.cpp:1234, remote process exited"),
        dist.DistNetworkError("Connection reset by peer"),
        dist.DistStoreError("wait timeout after 300000ms"),
    ],
)
def test_a_failed_collective_may_be_another_ranks_fault_also_as_the_cause_of_another_error(error):
    assert is_peer_failure(error)
    wrapped = ValueError("could not save")
    wrapped.__cause__ = error
    assert is_peer_failure(wrapped)
    later = KeyError("while cleaning up")
    later.__context__ = error
    assert is_peer_failure(later)
    later.__suppress_context__ = True  # raised `from None`
    assert not is_peer_failure(later)


@pytest.mark.parametrize(
    "error",
    [
        ValueError(CLOSED),
        RuntimeError("DataLoader worker (pid 17) is killed by signal: Killed."),
        RuntimeError("mat1 and mat2 shapes cannot be multiplied (2x3 and 4x5)"),
        torch.OutOfMemoryError("out of memory, NCCL had nothing to do with it"),
        BrokenPipeError("the log's reader is gone"),
        MemoryError(),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_a_ranks_own(error):
    assert not is_peer_failure(error)


COLLECTIVE = (
    Frame("/x/megatron/a.py", 1, "f"),
    Frame("/y/torch/distributed/distributed_c10d.py", 2, "all_reduce"),
)


def test_a_place_is_named_without_the_directories_of_a_machine():
    inner = "torch/distributed/distributed_c10d.py:2 in all_reduce"
    assert place_of(COLLECTIVE) == f"megatron/a.py:1 in f, {inner}"
    assert place_of((Frame("/home/someone/train.py", 3, "main"),)) == "train.py:3 in main"
    assert place_of(()) == "an unknown place"


SAVING = rank(0, waits=False, is_excused=True, idle_seconds=20.0, phase=Phase.STEP)


@pytest.mark.parametrize(
    ("records", "missing", "ranks"),
    [
        ([SAVING, stuck(1), stuck(2)], [], None),
        ([SAVING, stuck(1), stuck(2, waits=False)], [], (2,)),
        ([SAVING, stuck(1)], [absent(2, Silence.STOPPED)], (2,)),
        ([SAVING, stuck(1), lost(2, LATE)], [], (0,)),
        ([replace(SAVING, is_excused=False, is_stuck=True), stuck(1), stuck(2)], [], (0,)),
    ],
)
def test_a_rank_that_waits_for_its_save_is_blamed_only_once_the_save_takes_too_long(
    records, missing, ranks
):
    verdict = find_cause(records, missing)
    assert (None if verdict is None else verdict.ranks) == ranks
