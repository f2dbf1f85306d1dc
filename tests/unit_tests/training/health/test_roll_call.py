"""Roll calls among threads that share a store: responses, silence and the agreed verdict."""

from __future__ import annotations

import json
import math
import os
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from megatron.training.health import rank_store, roll_call
from megatron.training.health.cause import Record, Silence, Verdict
from megatron.training.health.exits import ExitCode
from megatron.training.health.progress import Phase
from megatron.training.health.rank_store import RankStore, StoreLostError
from megatron.training.health.roll_call import Member, RollCall
from megatron.training.launch import Launch

WAIT = 300.0  # seconds, for expected events
FOR_EVER = 86400.0  # seconds: no test waits for so long


def well(rank: int) -> Record:
    return Record(rank, "host", 100 + rank, Phase.AGREE, 3, waits=True)


def stuck(rank: int, **fields: object) -> Record:
    return replace(
        well(rank), is_stuck=True, needs_all=True, idle_seconds=9.0, place="a place", **fields
    )


@pytest.fixture
def ranks() -> Iterator[list[RollCall]]:
    """The roll calls of three ranks over one store, all joined."""
    calls = joined(dist.HashStore(), 3)
    yield calls
    for call in calls:
        call.close()


def joined(store: dist.Store, world_size: int, *extra: object) -> list[RollCall]:
    calls = [
        RollCall(store, Launch(rank=rank, world_size=world_size), *extra)
        for rank in range(world_size)
    ]
    for call in calls:
        call.join()
    # A TCP store does not confirm a set: another connection may see it a moment later.
    deadline = time.monotonic() + WAIT
    while not all(call.knows_all for call in calls):
        assert time.monotonic() < deadline
        for call in calls:
            call.learn()
    return calls


def put(keys: dist.Store, values: dict[str, str]) -> None:
    """Sets records, and returns when every connection sees them."""
    for key, value in values.items():
        keys.set(key, value)
    keys.check(list(values))  # processed after the sets of the same connection


def record(**content: object) -> str:
    """A record as a rank writes it."""
    return json.dumps(content)


def hold(calls: dict[int, RollCall], records: list[Record]) -> list:
    """Returns the verdicts of a roll call on the ranks that join it."""
    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(lambda record: calls[record.rank].hold(record), records))


def numbered(calls: list[RollCall]) -> dict[int, RollCall]:
    return dict(enumerate(calls))


def test_all_ranks_have_the_same_verdict_as_soon_as_all_have_responded(ranks, monkeypatch):
    monkeypatch.setattr(roll_call, "_PATIENCE_SECONDS", FOR_EVER)
    verdicts = hold(numbered(ranks), [well(0), stuck(1, waits=False), stuck(2)])
    assert verdicts[0] is not None
    assert verdicts == [verdicts[0]] * 3
    assert (verdicts[0].ranks, verdicts[0].code, verdicts[0].speaker) == ((1,), ExitCode.HANG, 0)


def test_one_roll_call_may_follow_another(ranks):
    """No response of the first counts in the second."""
    assert not any(call.is_called() for call in ranks)
    assert hold(numbered(ranks), [well(0), well(1), well(2)]) == [None] * 3
    verdicts = hold(numbered(ranks), [well(0), well(1), stuck(2, waits=False)])
    assert [verdict.ranks for verdict in verdicts] == [(2,)] * 3
    assert [call.number for call in ranks] == [2, 2, 2]


def test_a_silent_rank_is_waited_for_and_then_blamed_if_it_is_needed(ranks):
    assert hold(numbered(ranks), [well(0), well(1)]) == [None, None]
    begin = time.monotonic()
    verdicts = hold(numbered(ranks), [well(0), stuck(1)])
    assert time.monotonic() - begin > 1.5
    assert [verdict.ranks for verdict in verdicts] == [(2,)] * 2
    assert "does not respond: it hangs" in verdicts[0].text


def test_a_rank_that_has_finished_is_not_waited_for(ranks, monkeypatch):
    monkeypatch.setattr(roll_call, "_PATIENCE_SECONDS", FOR_EVER)
    ranks[2].leave()
    verdicts = hold(numbered(ranks), [well(0), stuck(1)])
    assert [verdict.ranks for verdict in verdicts] == [(0, 1)] * 2


def test_the_record_of_an_exit_counts_as_a_response(ranks):
    ranks[2].leave(replace(well(2), error="ValueError: boom", error_order=1, has_left=True))
    verdicts = hold(numbered(ranks), [well(0), well(1)])
    assert [(verdict.ranks, verdict.speaker) for verdict in verdicts] == [((2,), 0)] * 2


def test_errors_of_all_ranks_are_ordered_in_time(ranks):
    assert [ranks[rank].error_order() for rank in (1, 0, 2)] == [1, 2, 3]


def test_a_late_rank_gets_the_verdict_of_the_others(ranks):
    in_time = hold(numbered(ranks), [stuck(0), stuck(1)])
    assert in_time[0].ranks == (2,)
    assert ranks[2].hold(well(2)) == in_time[0]


def test_ranks_beyond_the_first_ones_only_poll_for_the_verdict():
    calls = joined(dist.HashStore(), 11)
    verdicts = hold(numbered(calls), [well(rank) for rank in range(10)] + [stuck(10, waits=False)])
    assert [verdict.ranks for verdict in verdicts] == [(10,)] * 11
    verdicts = hold(numbered(calls), [stuck(9), stuck(10)])
    assert [verdict.ranks for verdict in verdicts] == [tuple(range(9))] * 2, (
        "also if the first ranks are silent"
    )


class BrokenStore:
    """A store whose connection is lost, or that never responds."""

    def __init__(self, blocks: bool) -> None:
        self._blocks = blocks
        self.num_requests = 0

    def clone(self) -> BrokenStore:
        return self

    def check(self, _keys: list[str]) -> bool:
        self.num_requests += 1
        if self._blocks:
            threading.Event().wait()
        raise RuntimeError("Broken pipe")


@pytest.mark.parametrize("blocks", [False, True])
def test_a_store_that_fails_or_never_responds_gets_one_request(monkeypatch, blocks):
    monkeypatch.setattr(rank_store, "_STORE_SECONDS", 0.2)
    broken = BrokenStore(blocks)
    store = RankStore(broken, print)
    for _ in range(5):
        with pytest.raises(StoreLostError, match="Expected a"):
            store.call(lambda inner: inner.check(["a"]))
    assert broken.num_requests == 1


class HeldStore:
    """A store that does not respond while it is held."""

    def __init__(self, store: dist.Store, held: list[str]) -> None:
        self._store = store
        self._held = held
        self.is_open = threading.Event()
        self.is_open.set()

    def clone(self) -> HeldStore:
        return self

    def __getattr__(self, name: str) -> object:
        if name in self._held:
            assert self.is_open.wait(600)
        return getattr(self._store, name)


def test_a_store_that_responds_late_is_usable_again_and_loses_no_request(monkeypatch):
    monkeypatch.setattr(rank_store, "_STORE_SECONDS", 0.2)
    held = HeldStore(dist.HashStore(), ["add"])
    store = RankStore(held, print)
    assert store.add("a", 1) == 1
    held.is_open.clear()
    with pytest.raises(StoreLostError, match=r"within 0\.2 s, got none"):
        store.add("a", 1)
    with pytest.raises(StoreLostError, match="lost before"):
        store.add("a", 1)
    assert store.is_lost
    monkeypatch.setattr(rank_store, "_STORE_SECONDS", FOR_EVER)
    held.is_open.set()
    assert store._overdue.result(WAIT) == 2
    assert not store.is_lost
    assert store.add("a", 0) == 2
    store.close()


@pytest.mark.parametrize("request_of_hold", ["add", "set"])
def test_a_rank_whose_store_recovers_reads_the_verdict_that_it_missed(monkeypatch, request_of_hold):
    shared = dist.HashStore()
    calls = joined(shared, 2)
    held = HeldStore(PrefixStore("watchdog", shared), [])
    monkeypatch.setattr(roll_call, "_PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(roll_call, "PrefixStore", lambda _prefix, _store: held)
    late = RollCall(shared, Launch(rank=1, world_size=2))
    late.learn()
    monkeypatch.setattr(rank_store, "_STORE_SECONDS", 0.2)
    held._held.append(request_of_hold)
    held.is_open.clear()
    assert late.hold(well(1)) is None
    assert not late.has_peers

    verdict = calls[0].hold(stuck(0, waits=False))
    assert verdict is not None
    monkeypatch.setattr(rank_store, "_STORE_SECONDS", FOR_EVER)
    held.is_open.set()
    late._store._overdue.result(WAIT)
    assert late.has_peers
    assert late.is_called()
    assert late.hold(well(1)) == verdict
    for call in (*calls, late):
        call.close()


def test_a_rank_without_its_store_decides_alone(ranks, monkeypatch):
    monkeypatch.setattr(RollCall, "_neighbours", lambda _: [])
    alone = ranks[1]
    alone._store._has_failed = True
    assert not alone.has_peers
    assert alone.hold(well(1)) is None
    assert alone.hold(replace(well(1), error="ValueError", error_order=0)).ranks == (1,)
    broken = replace(
        well(1), failed_collective="RuntimeError: Connection closed by peer", needs_all=True
    )
    # Without torchrun's agent, the store was in the process of rank 0.
    assert alone.hold(broken).ranks == (0,)
    monkeypatch.setattr(alone, "_agent_has_store", True)
    assert "the ranks' store has been lost too" in alone.hold(broken).text


def test_a_rank_without_others_needs_no_store():
    alone = RollCall(None, Launch())
    alone.join()
    alone.learn()
    assert alone.knows_all
    assert not alone.has_peers
    assert not alone.is_called()
    alone.leave()
    assert alone.hold(well(0)) is None
    assert alone.hold(stuck(0)).ranks == (0,)
    alone.close()


@pytest.mark.parametrize("hidden", ["/proc", "/proc/sys"])
def test_without_parts_of_proc_the_processes_of_a_host_still_see_each_other_die(
    monkeypatch, hidden
):
    read_text = Path.read_text

    def refusing(path: Path) -> str:
        if path.is_relative_to(hidden):
            raise PermissionError(path)
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", refusing)
    with subprocess.Popen(["sleep", "100"]) as process:
        own = Member.of_this_process()
        assert own.machine == socket.gethostname()
        member = replace(own, pid=process.pid, birth=roll_call._stat(process.pid)[1])
        assert member.silence() is Silence.SILENT
        process.kill()
    assert member.silence() is Silence.GONE
    assert replace(member, pid=2**80).silence() is Silence.GONE


def test_a_process_differs_from_a_later_one_of_its_pid():
    with subprocess.Popen(["sleep", "100"]) as process:
        own = Member.of_this_process()
        assert own.silence() is Silence.SILENT
        born = roll_call._stat(process.pid)[1]
        member = Member("host", process.pid, "machine", born)
        assert member.silence() is Silence.SILENT
        assert replace(member, birth="1").silence() is Silence.GONE
        os.kill(process.pid, 19)
        deadline = time.monotonic() + WAIT
        while member.silence() is not Silence.STOPPED and time.monotonic() < deadline:
            time.sleep(0.01)
        assert member.silence() is Silence.STOPPED
        process.kill()
        while member.silence() is not Silence.GONE and time.monotonic() < deadline:
            time.sleep(0.01)
        assert member.silence() is Silence.GONE, "a zombie"
    assert member.silence() is Silence.GONE


@pytest.mark.parametrize("agent_has_store", [False, True])
def test_only_the_rank_with_the_store_waits_until_the_others_have_read_the_verdict(
    monkeypatch, agent_has_store
):
    monkeypatch.setattr(roll_call, "_LINGER_SECONDS", FOR_EVER)
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", str(agent_has_store))
    store = dist.HashStore()
    first, second = joined(store, 2)
    keys = dist.PrefixStore("watchdog", store)
    keys.set("1/record/1", record(record=stuck(1, waits=False).to_json()))
    assert first.hold(well(0)).ranks == (1,)
    second.linger()
    if not agent_has_store:
        lingering = threading.Thread(target=first.linger)
        lingering.start()
        lingering.join(0.3)
        assert lingering.is_alive()
        keys.add("1/done", 1)
        lingering.join()
    first.linger()


VERDICT = Verdict(ExitCode.FAILED, (0,), "invented", 0, ExitCode.BAD_FILES)


@pytest.fixture(params=["hash", "tcp"])
def store(request) -> dist.Store:
    """PyTorch's stores differ in how they compare and set."""
    if request.param == "hash":
        return dist.HashStore()
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def verdict(**fields: object) -> str:
    return record(verdict={**VERDICT.to_json(), **fields}, num_answered=3)


@pytest.mark.parametrize(
    "value",
    [
        "\x00\udcff".encode("utf-8", "surrogateescape").decode("latin-1"),
        "[" * 10**5,
        "[1]",
        record(padding="x" * 2**20, verdict=VERDICT.to_json(), num_answered=3),
        record(verdict=VERDICT.to_json(), num_answered="3"),
        record(verdict=[1], num_answered=3),
        verdict(speaker="\n\x1b[2J"),
    ],
    ids=["binary", "deep", "list", "long", "number", "type", "field"],
)
def test_a_malformed_record_ends_no_run_and_is_one_bounded_warning(store, value):
    warnings: list[str] = []
    calls = joined(store, 3, warnings.append)
    places = ("1/verdict", "left/2", "1/silent/1", "1/record/0")
    put(dist.PrefixStore("watchdog", store), dict.fromkeys(places, value))
    assert hold(numbered(calls), [well(0), well(1), well(2)]) == [None] * 3
    assert 1 <= len(warnings) <= 3
    assert all(text.isprintable() and len(text) < 300 for text in warnings)


def test_a_record_under_the_key_of_another_rank_is_ignored(store):
    calls = joined(store, 3, lambda _: None)
    dead = replace(well(2), error="invented", error_order=1, has_left=True)
    put(dist.PrefixStore("watchdog", store), {"left/0": record(record=dead.to_json())})
    assert hold(numbered(calls), [well(0), well(1), well(2)]) == [None] * 3


def test_a_roll_call_is_not_called_backwards(store):
    """Otherwise, responses of an earlier one would count in this one."""
    first, second = joined(store, 2)
    assert hold({0: first, 1: second}, [well(0), well(1)]) == [None] * 2
    assert hold({0: first, 1: second}, [well(0), well(1)]) == [None] * 2
    put(dist.PrefixStore("watchdog", store), {"round": "1"})
    assert not first.is_called()
    assert first.hold(stuck(0, waits=False)).ranks == (0,)
    assert first.number == 2


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", "0"), ("rank", True), ("iteration", 10**30), ("idle_seconds", math.inf),
        ("waits", 1), ("host", None), ("phase", "lunch"), ("phase", 3), ("error", ["a"]),
        ("error_code", 42), ("of a later version", 1), ("stack", {"a": 1}),
    ],
)  # fmt: skip
def test_a_record_with_a_field_of_another_type_is_an_error(field, value):
    with pytest.raises(ValueError, match=r"Expected .*, got "):
        Record.from_json({**well(0).to_json(), field: value})


def test_texts_of_other_ranks_are_printable_and_bounded_and_a_stack_keeps_its_lines():
    words = replace(
        well(0), error="a\nERROR: b\x1b[2J" + "x" * 10**6, stack="  a\nERROR: b\x07\n  c\n" * 1000
    )
    heard = Record.from_json(words.to_json())
    assert heard.error.startswith(r"a\nERROR: b\x1b[2Jxxx")
    assert len(heard.error) == 2000
    lines = heard.stack.splitlines()
    assert lines[:3] == ["  a", r"  ERROR: b\x07", "  c"]
    assert len(lines) == 100
    assert Record.from_json(heard.to_json()) == heard


def test_a_malformed_member_is_unknown():
    warnings: list[str] = []
    store = dist.HashStore()
    calls = [RollCall(store, Launch(rank=rank, world_size=2), warnings.append) for rank in range(2)]
    calls[0].join()
    dist.PrefixStore("watchdog", store).set("member/1", record(host="h", pid="1"))
    calls[0].learn()
    assert calls[0].knows_all
    assert "member/1" in warnings[0]
    assert 1 not in calls[0]._members
