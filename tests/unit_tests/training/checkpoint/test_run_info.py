from __future__ import annotations

import json
import logging
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.load.checkpoint import parse_train_state
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.loss_scaler import build_loss_scaler
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.health.earlier_starts import EarlierFindings
from megatron.training.step import StepInfo

SCHEDULE = LRSchedule.build(LRScheduleConfig(lr=1e-3, lr_warmup_iters=3), 10)


def info(**values: object) -> RecoverInfo:
    return RecoverInfo(StepInfo(7, 28, 2, 1), SCHEDULE.state(), **values)


def test_what_a_checkpoint_says_of_its_run_survives_json():
    given_info = info(
        loss_scaler={"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 1},
        data={"samples_per_epoch": 5},
        logger={"interval_losses": [0.1 + 0.2, 1e-300]},
        evaluator={"iteration": 5, "validation": 4.25},
        world_size=3,
        versions={"torch": "2.13.0"},
        config={"lr": 1e-3},
    )
    assert (
        RecoverInfo.from_plain(json.loads(json.dumps(given_info.to_plain())), "there") == given_info
    )


@pytest.mark.parametrize("name", info().to_plain())
def test_a_missing_field_is_an_error_that_names_it(name):
    plain = info().to_plain()
    del plain[name]
    with pytest.raises(CheckpointError, match=f"Expected {name} in there"):
        RecoverInfo.from_plain(plain, "there")


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        *(
            ("format_version", value, f"to be 1, got {value!r}")
            for value in (2, None, True, 1.0, "1")
        ),
        (
            "progress",
            {"iteration": 1, "speed": 2},
            "to be the counters iteration, consumed_samples,",
        ),
        ("progress", {"iteration": 1}, "to be the counters iteration, consumed_samples,"),
        ("progress", {}, "to be the counters iteration, consumed_samples,"),
        *(("progress", value, "to be the counters") for value in ([], None, 7)),
        *(("schedule", value, "to be an object, got ") for value in ([], None, "linear")),
        *(
            (name, [1], "to be an object, got [1]")
            for name in ("data", "logger", "evaluator", "config")
        ),
        *(("versions", value, f"to be an object, got {value!r}") for value in (None, 0, [], "")),
        ("loss_scaler", [1], "to be an object, got [1]"),
        *(
            ("world_size", value, f"to be a number of ranks, got {value!r}")
            for value in ("two", 0, True, 2.0)
        ),
    ],
    ids=str,
)
def test_a_field_of_another_type_is_an_error_that_names_the_file_and_the_field(
    name, value, message
):
    with pytest.raises(CheckpointError) as caught:
        RecoverInfo.from_plain(info().to_plain() | {name: value}, "there")
    assert str(caught.value).startswith(f"Expected {name} in there to be ")
    assert message in str(caught.value)


@pytest.mark.parametrize(
    "name", ["iteration", "consumed_samples", "skipped_iterations", "nan_iterations"]
)
@pytest.mark.parametrize(
    "value",
    ["7", 7.0, 7.5, -1, True, None, [7], {}, math.nan, math.inf, 2**63, 10**4000],
    ids=lambda v: str(v)[:9],
)
def test_a_counter_is_a_whole_number_and_nothing_is_made_one(name, value):
    plain = info().to_plain()
    plain["progress"] |= {name: value}
    with pytest.raises(
        CheckpointError, match=f"Expected progress.{name} in there to be an integer"
    ) as caught:
        RecoverInfo.from_plain(plain, "there")
    assert len(str(caught.value)) < 200


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda each: (
        st.lists(each, max_size=3) | st.dictionaries(st.text(max_size=9), each, max_size=3)
    ),
    max_leaves=6,
)
PLAIN = info(
    loss_scaler={"scale": 65536.0, "growth_tracker": 3, "hysteresis_tracker": 1}
).to_plain()
PLACES = [(name,) for name in [*PLAIN, "other"]] + [
    (name, inner)
    for name in ("progress", "schedule", "loss_scaler")
    for inner in [*PLAIN[name], "other"]
]


@given(place=st.sampled_from(PLACES), value=JSON)
def test_whatever_stands_in_a_field_is_taken_over_as_it_is_or_is_one_line(place, value):
    plain = json.loads(json.dumps(PLAIN))
    within = plain if len(place) == 1 else plain[place[0]]
    within[place[-1]] = value
    plain = json.loads(json.dumps(plain))
    try:
        found = RecoverInfo.from_plain(plain, "there")
        schedule = LRSchedule.from_state(found.schedule)
        scaler = build_loss_scaler(OptimizerConfig())
        if found.loss_scaler is not None:
            scaler = scaler.from_state(found.loss_scaler)
    except (CheckpointError, ValueError) as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017  it may as well not be raised
        assert len(str(error)) < 400  # noqa: PT017
        return
    # Compared as text, since what is not a number is not equal to itself.
    taken = found.to_plain() | {"schedule": schedule.state()}
    if found.loss_scaler:
        taken["loss_scaler"] = scaler.state()
    given_text, text = (
        {name: str(each[name]) for name in each if each[name] is not None}
        for each in (plain, taken)
    )
    assert text == given_text or place == ("loss_scaler", "scale")
    assert all(rate >= 0 for rate in (schedule(0), schedule(1), schedule(10**9)))


def test_a_field_that_nobody_knows_is_an_error():
    with pytest.raises(
        CheckpointError, match=r"Expected the fields of a run in there, got \['speed'\] besides"
    ):
        RecoverInfo.from_plain(info().to_plain() | {"speed": 3}, "there")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b'{"progress": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "Expected JSON"),
        (
            b'{"data": ' + b"[" * 40 + b"]" * 40 + b"}",
            "Expected JSON in there, got more than 32 levels",
        ),
        (
            b'{"data": ' + b'{"a": ' * 40 + b"1" + b"}" * 41,
            "Expected JSON in there, got more than 32 levels",
        ),
        (
            b'{"progress": {"iteration": ' + b"1" * 5000 + b"}}",
            "Expected JSON in there, got an integer of 5000 digits",
        ),
        (b'{"progress": {"iteration": 1, "iteration": 2}}', "the key 'iteration' twice"),
        (b'{"a": 1, "b": 2, "a": 1}', "the key 'a' twice"),
        (b'{"a": "\xff"}', "Expected JSON in there, got 'utf-8' codec can't decode byte 0xff"),
        (b"[1]", "Expected a JSON object in there, got list"),
        (b"", "Expected JSON in there"),
    ],
    ids=range(9),
)
def test_a_file_that_is_no_plain_object_is_an_error_within_bounds(text, message):
    with pytest.raises(CheckpointDamagedError) as caught:
        parse_train_state(text, "there")
    assert message in str(caught.value)
    assert len(str(caught.value)) < 300


def events_of(folder, *events):
    lines = [{"event": "start", "restart": 0}, *events]
    (folder / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return EarlierFindings.read(folder)


def test_a_relaunch_remembers_what_its_earlier_starts_have_found(tmp_path):
    resume = {"event": "resume", "iteration": 4}
    damaged = {"event": "damaged", "checkpoint": "a", "reason": "short"}
    found = events_of(
        tmp_path, resume, damaged, {"event": "damaged", "checkpoint": "b", "reason": "long"}, resume
    )
    assert found == EarlierFindings({"a": "short", "b": "long"}, {4: 2}, has_saved=False, begun=4)
    found = events_of(tmp_path, resume, damaged, {"event": "save_published", "checkpoint": "a"})
    assert found == EarlierFindings({}, {4: 1}, has_saved=True, begun=4)
    found = events_of(
        tmp_path,
        resume,
        damaged,
        {"event": "start", "restart": 1},
        {"event": "start", "restart": 0},
    )
    assert found == EarlierFindings(), "a launch by hand forgets"
    found = events_of(tmp_path, resume, damaged, {"event": "start", "restart": False})
    assert found.damaged == {"a": "short"}, "false is no count of restarts"


@pytest.mark.parametrize(
    ("event", "name"),
    [
        *(
            ({"event": "resume", "iteration": value}, "iteration")
            for value in ("4", 4.0, -4, True, None, [4])
        ),
        ({"event": "resume"}, "iteration"),
        ({"event": "damaged", "checkpoint": 7, "reason": "short"}, "checkpoint"),
        ({"event": "damaged", "checkpoint": "a", "reason": ["short"]}, "reason"),
        ({"event": "save_published", "checkpoint": None}, "checkpoint"),
        ({"event": "set_aside"}, "checkpoint"),
    ],
    ids=str,
)
def test_an_event_that_a_relaunch_cannot_understand_is_an_error_that_names_the_field(
    tmp_path, event, name
):
    with pytest.raises(CheckpointError) as caught:
        events_of(tmp_path, event)
    expected = f"Expected {name} of the event '{event['event']}' in {tmp_path}/events.jsonl to be "
    assert str(caught.value).startswith(expected)


PATHS = ("/runs/a/iter_0000010", "/runs/a/iter_0000020")


def remembered(folder: Path, *lines: object) -> EarlierFindings:
    """What is remembered of a log with these lines."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    (folder / "events.jsonl").write_text("\n".join(texts) + "\n")
    memory = EarlierFindings.read(str(folder))
    assert EarlierFindings.from_plain(json.loads(json.dumps(memory.to_plain()))) == memory
    return memory


def test_the_event_log_is_the_memory_of_a_job_since_it_was_last_launched_by_hand(tmp_path):
    resume = {"event": "resume", "iteration": 10}
    memory = remembered(
        tmp_path,
        {"event": "damaged", "checkpoint": PATHS[0], "reason": "of the launch before"},
        {"event": "start", "restart": 0},
        {"event": "resume", "iteration": 0},
        {"event": "save_published", "checkpoint": PATHS[0]},
        {"event": "start", "restart": 1},
        {"event": "damaged", "checkpoint": PATHS[1], "reason": "a bit"},
        resume,
        resume,
    )
    assert memory == EarlierFindings({PATHS[1]: "a bit"}, {0: 1, 10: 2}, True, 0)


@pytest.mark.parametrize(
    "line",
    [
        {"event": ["damaged"], "checkpoint": PATHS[0], "reason": "x"},
        '{"event": "resume", "iteration": ' + "9" * 5000 + "}",
        '{"event": "damaged", "checkpoint": ' + "[" * 10**5,
        '{"event": "resume", "iteration": 3, "more": ' + "[" * 20 + "]" * 20 + "}",
        '{"event": "resume", "iteration": 3, "more": "' + "x" * 2**20 + '"}',
        "[" * 10**6,
        "\0\x1b[2J",
    ],
)
def test_a_line_of_the_log_that_is_torn_or_without_bounds_says_nothing(tmp_path, line):
    resume = {"event": "resume", "iteration": 3}
    assert remembered(tmp_path, resume, line, resume) == EarlierFindings({}, {3: 2}, False, 3)


def test_a_reason_in_the_log_is_one_harmless_line_of_bounded_length(tmp_path):
    reason = "gone\n\x1b[2JERROR: all is lost" + "x" * 10**5
    memory = remembered(tmp_path, {"event": "damaged", "checkpoint": PATHS[0], "reason": reason})
    assert memory.damaged[PATHS[0]].startswith(r"gone\n\x1b[2JERROR: all is lostxxx")
    assert len(memory.damaged[PATHS[0]]) == 1000


def test_of_a_log_without_end_the_last_megabytes_are_read(tmp_path):
    with (tmp_path / "events.jsonl").open("w") as stream:
        stream.truncate(2**40)  # a hole, which takes no room on disk
        stream.seek(2**40)
        stream.write('\n{"event": "resume", "iteration": 3}\n')
    assert EarlierFindings.read(str(tmp_path)).attempts == {3: 1}


def test_a_log_that_is_no_file_is_not_opened_and_costs_a_warning(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    os.mkfifo(tmp_path / "events.jsonl")
    assert EarlierFindings.read(str(tmp_path)) == EarlierFindings({}, {}, False, None)
    (warning,) = [record.getMessage() for record in caplog.records]
    assert "Expected a regular file of JSON lines, got a FIFO" in warning
