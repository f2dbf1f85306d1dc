from __future__ import annotations

import errno
import math
import os
import re
import signal
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.store import LocalStore, RemoteStore, open_store
from megatron.core.options import ConfigError
from megatron.training.health import inject
from megatron.training.health.events import EventLog, read_events
from megatron.training.health.inject import (
    KINDS,
    PHASES,
    InjectConfig,
    Injection,
    Injections,
    check_paths,
)
from megatron.training.health.progress import Phase

ROOT = Path(__file__).resolve().parents[4]


def injections(folder: Path, *specs: str, rank: int = 0, restart: int = 0) -> Injections:
    return Injections(
        InjectConfig(specs),
        rank=rank,
        restart=restart,
        events=EventLog(folder, rank=rank, restart=restart),
    )


def told(folder: Path) -> list[tuple[str, str, int]]:
    """The faults that the event log names, with phase and iteration."""
    return [(event["spec"], event["phase"], event["iteration"]) for event in read_events(folder)]


@pytest.fixture
def struck(monkeypatch) -> list[str]:
    """The faults that struck, instead of ending or blocking the process."""
    strikes: list[str] = []
    monkeypatch.setattr(
        inject.os, "kill", lambda pid, number: strikes.append(f"kill {pid} {number}")
    )
    monkeypatch.setattr(inject, "hang_for_ever", lambda: strikes.append("hang"))
    monkeypatch.setattr(inject.time, "sleep", lambda seconds: strikes.append(f"sleep {seconds}"))
    return strikes


KILLED = f"kill {os.getpid()} {signal.SIGKILL}"


# Specifications.


def test_a_specification_names_rank_iteration_phase_delay_and_restart():
    assert Injection.parse("kill:rank=1,step=17,at=step,delay=0.004,restart=2") == Injection(
        "kill:rank=1,step=17,at=step,delay=0.004,restart=2",
        "kill",
        rank=1,
        step=17,
        at="step",
        restart=2,
        delay=0.004,
    )
    assert Injection.parse("slow:step=3,seconds=0.5,times=1,rank=any,restart=any") == Injection(
        "slow:step=3,seconds=0.5,times=1,rank=any,restart=any",
        "slow",
        rank=None,
        step=3,
        restart=None,
        seconds=0.5,
        times=1,
    )
    default = Injection.parse("nan:step=5")
    assert (default.rank, default.restart, default.at) == (0, 0, "forward")
    assert Injection.parse("hang:at=data").step is None


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("reboot:step=1", "a kind among kill"),
        ("", "a non-empty string"),
        ("kill:", "step=, "),
        ("kill:step", "step= a whole number"),
        ("kill:step=1,,rank=0", "keys among rank"),
        ("kill:step=1,step=2", "step once"),
        ("kill:step=-1", "step= a whole number"),
        ("kill:step=0", "step= of at least 1 at forward"),
        ("kill:step=1,rank=first", "rank= a whole number, 0 or more, or any"),
        ("kill:step=any", "step= a whole number"),
        ("kill:step=1,at=lunch", "at= one of build"),
        ("kill:step=1,delay=inf", "delay= a number of seconds"),
        ("kill:step=3,at=build", "step=0 at build"),
        ("hang:step=1,delay=0.1", "keys among rank, step, restart, at for hang"),
        ("nan:rank=1", "step=, "),
        ("slow:step=1", "seconds=, more than 0"),
        ("slow:step=1,seconds=1,times=0", "times= of at least 1"),
        ("disk-full:step=2,at=save", "keys among rank, step, restart for disk-full"),
    ],
)
def test_an_invalid_specification_is_an_error_of_one_line(spec, expected):
    with pytest.raises(ConfigError, match=re.escape(expected)) as caught:
        InjectConfig((spec,))
    assert str(caught.value).startswith("--inject: expected ")
    assert repr(spec) in str(caught.value)
    assert "\n" not in str(caught.value)


@given(
    st.text(max_size=40)
    | st.from_regex(r"(kill|slow|nan):([a-z]+=[a-z0-9.]+,?){0,4}", fullmatch=True)
)
def test_any_text_is_a_specification_or_a_configuration_error(text):
    try:
        (injection,) = InjectConfig((text,)).injections
    except ConfigError:
        return
    assert injection.kind in KINDS
    assert injection.at in PHASES


# Moments.


def test_without_the_flag_no_fault_is_injected_and_no_event_written(tmp_path, struck):
    none = injections(tmp_path)
    for phase in PHASES:
        none.at(phase, 1)
    store = LocalStore(tmp_path)
    assert none.store(store) is store
    assert none.forward_step(loss_of_batch, 1) is loss_of_batch
    assert struck == told(tmp_path) == []


@pytest.mark.parametrize("phase", PHASES)
def test_a_rank_is_killed_once_at_the_beginning_of_its_phase_and_in_no_other(
    tmp_path, struck, phase
):
    spec = f"kill:rank=1,step={0 if phase == 'build' else 2},at={phase}"
    doomed, other = (injections(tmp_path, spec, rank=rank) for rank in (1, 0))
    for _ in range(2):
        for iteration in range(4):
            for at in PHASES:
                doomed.at(at, iteration)
                other.at(at, iteration)
    assert struck == [KILLED]
    assert told(tmp_path) == [(spec, phase, 0 if phase == "build" else 2)]
    (event,) = read_events(tmp_path)
    assert (event["event"], event["rank"], event["restart"]) == ("inject", 1, 0)


@pytest.mark.parametrize(
    ("key", "strikes"), [("", [0]), (",restart=2", [2]), (",restart=any", [0, 1, 2])]
)
def test_a_fault_strikes_only_in_its_restart(tmp_path, struck, key, strikes):
    for restart in range(3):
        injections(tmp_path, f"hang:at=data{key}", restart=restart).at(Phase.DATA, 40)
    assert [event["restart"] for event in read_events(tmp_path)] == strikes
    assert struck == ["hang"] * len(strikes)


def test_any_rank_is_every_rank(tmp_path, struck):
    for rank in range(3):
        injections(tmp_path, "kill:rank=any,step=1", rank=rank).at(Phase.FORWARD, 1)
    assert [event["rank"] for event in read_events(tmp_path)] == [0, 1, 2]
    assert len(struck) == 3


def test_a_delay_strikes_from_a_thread_in_the_middle_of_what_follows(tmp_path, monkeypatch):
    """The main thread continues, and the event names its present phase."""
    has_struck, threads = threading.Event(), []

    def kill(_pid: int, _number: int) -> None:
        threads.append(threading.current_thread())
        has_struck.set()

    monkeypatch.setattr(inject.os, "kill", kill)
    spec = "kill:step=1,at=step,delay=0.05"
    doomed = injections(tmp_path, spec)
    doomed.at(Phase.STEP, 1)
    assert not has_struck.is_set()
    doomed.at(Phase.BATCH, 2)
    assert has_struck.wait(600)
    assert threads != [threading.main_thread()]
    assert told(tmp_path) == [(spec, "batch", 2)]


def test_a_slow_rank_sleeps_once_in_each_of_its_iterations(tmp_path, struck):
    spec = "slow:step=2,seconds=0.5,at=backward"
    endless = injections(tmp_path, spec)
    twice = injections(tmp_path / "twice", "slow:step=2,seconds=0.25,times=2", "kill:step=3")
    for iteration in (1, 2, 3, 4):
        for phase in (Phase.FORWARD, Phase.BACKWARD) * 2:
            endless.at(phase, iteration)
            twice.at(phase, iteration)
    assert struck.count("sleep 0.5") == 3
    assert struck.count("sleep 0.25") == 2
    assert struck.count(KILLED) == 1
    assert told(tmp_path) == [(spec, "backward", 2)], "only the first one is an event"


# The faults themselves.


PROGRAM = (
    "import sys\n"
    "from megatron.training.health.events import EventLog\n"
    "from megatron.training.health.inject import InjectConfig, Injections\n"
    "from megatron.training.health.progress import Phase\n"
    "config = InjectConfig((sys.argv[2],))\n"
    "Injections(config, rank=0, restart=0, events=EventLog(sys.argv[1])).at(Phase.FORWARD, 1)\n"
)


def test_a_process_is_killed_after_its_event_is_written(tmp_path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path), "kill:step=1"]
    done = subprocess.run(command, cwd=ROOT, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    assert told(tmp_path) == [("kill:step=1", "forward", 1)]


def loss_of_batch(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["x"]).sum()


def test_the_loss_is_nan_in_all_microbatches_of_its_iteration_and_no_other(tmp_path):
    model, batch = torch.nn.Linear(2, 1), {"x": torch.ones(1, 2)}
    spec = "nan:step=2"
    poison = injections(tmp_path, spec)
    for iteration, is_bad in ((1, False), (2, True), (3, False), (2, False)):
        forward_step = poison.forward_step(loss_of_batch, iteration)
        for _ in range(2):
            loss = forward_step(model, batch)
            assert math.isnan(loss.item()) == is_bad, iteration
            loss.backward()
    assert told(tmp_path) == [(spec, "forward", 2)], "once"


def test_a_kill_in_a_save_strikes_after_the_last_write_and_before_the_close(tmp_path, monkeypatch):
    killed = []
    monkeypatch.setattr(os, "kill", lambda pid, number: killed.append((pid, number)))
    spec = "kill-in-save:step=4"
    store = injections(tmp_path / "events", spec).store(open_store(str(tmp_path / "saves")))
    for iteration in (2, 4):
        draft = store.draft_name(f"iter_{iteration:07d}", "0a1b2")
        store.make_folder(draft)
        sink = store.open_data(f"{draft}/__0_0.distcp")
        sink.write([memoryview(b"data")])
        assert killed == []
        sink.close()
    assert killed == [(os.getpid(), signal.SIGKILL)]
    assert told(tmp_path / "events") == [(spec, "save", 4)]


@pytest.mark.parametrize("kind", [LocalStore, RemoteStore])
def test_a_full_disk_fails_the_writes_of_one_checkpoint(tmp_path, kind):
    folder = tmp_path / "saves"
    root = str(folder) if kind is LocalStore else f"memory:/{folder}"
    spec = "disk-full:step=4"
    real = open_store(root)
    assert type(real) is kind
    store = injections(tmp_path / "events", spec).store(real)
    for iteration, is_full in ((2, False), (4, True), (40, False)):
        draft = store.draft_name(f"iter_{iteration:07d}", "0a1b2")
        store.make_folder(draft)
        sink = store.open_data(f"{draft}/__0_0.distcp")
        for write in (
            partial(sink.write, [memoryview(b"data")]),
            partial(store.write, f"{draft}/.metadata", b"data"),
        ):
            if is_full:
                with pytest.raises(OSError, match="No space left on device") as caught:
                    write()
                assert caught.value.errno == errno.ENOSPC
                assert f"{real.root}/{draft}/" in str(caught.value.filename)
            else:
                write()
        if is_full:
            sink.abort()
            assert not store.exists(f"{draft}/__0_0.distcp"), "the sink is the store's"
            store.write(f"{draft}/failed_0.json", b"")
        else:
            sink.close()
            assert (
                store.read(f"{draft}/__0_0.distcp") == store.read(f"{draft}/.metadata") == b"data"
            )
    store.write("latest_checkpointed_iteration.txt", b"40\n")
    assert store.folders() == real.folders()
    assert (store.root, store.is_rename_atomic) == (real.root, real.is_rename_atomic)
    assert told(tmp_path / "events") == [(spec, "save", 4)], "once"


# Production.


def test_paths_that_look_like_production_are_an_error():
    faults = InjectConfig(("kill:step=1",))
    for path in (
        "s3://bucket/try",
        "/data/prod/gpt",
        "/mnt/release-2/x",
        "runs/LIVE",
        "/x/gpt_live3",
    ):
        with pytest.raises(ConfigError, match="--inject: expected local paths"):
            check_paths(faults, ["/tmp/run", path])
        check_paths(InjectConfig(), [path])
    for path in ("/tmp/run", "/data/products/alive", "/home/oliver/reproduction", ""):
        check_paths(faults, [path])
