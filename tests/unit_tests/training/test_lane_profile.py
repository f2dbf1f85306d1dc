"""`--profile-lanes`: the recorded iterations, the files, and warnings about missing iterations."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from megatron.core.device import Device
from megatron.core.options import ConfigError
from megatron.core.trace_file import GATHER, ITERATION, PHASE, Trace
from megatron.training.config import iterations_of
from megatron.training.health.progress import Phase
from megatron.training.lane_profile import NO_LANE_PROFILE, REPORT, LaneProfile, NoLaneProfile
from megatron.training.loop import Loop
from tests.unit_tests.training.helpers.fake_runs import config_of

CPU = Device("cpu")


@pytest.fixture(autouse=True)
def heard(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


def profile_of(root: Path, text: str = "20:23", rank: int = 0) -> LaneProfile:
    return LaneProfile(iterations_of(text), root, CPU, rank=rank, world_size=2)


def make(profile: LaneProfile, first: int, last: int, train_iters: int = 30) -> None:
    """Runs the iterations of one start of a run, as the loop does."""
    profile.prepare(first - 1, train_iters)
    for number in range(first, last + 1):
        profile.begin(number)
        profile.phase(Phase.BATCH)
        profile.timeline.timed(GATHER, "layers.0", lambda: None, 8)()
        profile.phase(Phase.AGREE)
        profile.phase(REPORT)
    profile.finish(last)


def read(root: Path, folder: str, rank: int = 0) -> Trace:
    return Trace.from_json((root / folder / f"trace_rank{rank}.json").read_bytes())


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


def test_a_range_is_a_slice():
    assert list(iterations_of("20:23")) == [20, 21, 22]
    assert list(iterations_of("1:2")) == [1]


@pytest.mark.parametrize(
    "text",
    ["20", "23:20", "20:20", "0:3", "20:-1", "a:b", "20:", ":3", "20:23:2", "1:102", "1:9999999999",
     "20:23\n", "\uff120:23", " 20:23"],
)  # fmt: skip
def test_an_invalid_range_is_an_error_of_one_line(text: str):
    with pytest.raises(ConfigError, match="--profile-lanes: expected FIRST:STOP, as 20:23") as got:
        config_of("--events-dir", "events", "--profile-lanes", text)
    assert "\n" not in str(got.value)


def test_recording_requires_a_directory_and_training():
    with pytest.raises(
        ConfigError, match="--profile-lanes: expected --profile-lanes-dir, --events-dir or"
    ):
        config_of("--profile-lanes", "20:23")
    with pytest.raises(ConfigError, match="--profile-lanes: expected training, got '--skip-train'"):
        config_of("--profile-lanes", "20:23", "--events-dir", "events", "--skip-train")
    with pytest.raises(ConfigError, match="since --profile-lanes-dir is given"):
        config_of("--profile-lanes-dir", "timelines")
    with pytest.raises(ConfigError, match="--profile-lanes-dir: expected a directory of the file"):
        config_of("--profile-lanes", "20:23", "--profile-lanes-dir", "s3://bucket")


def test_the_default_directory_is_next_to_the_event_log():
    beside = config_of("--profile-lanes", "20:23", "--events-dir", "events")
    assert beside.timelines_dir == "events/timelines"
    assert beside.engine().records_timings
    other = config_of("--profile-lanes", "20:23", "--profile-lanes-dir", "elsewhere")
    assert other.timelines_dir == "elsewhere"
    assert not config_of("--events-dir", "events").engine().records_timings


def test_without_the_flag_nothing_is_recorded():
    assert Loop.__dataclass_fields__["profile"].default is NO_LANE_PROFILE
    assert isinstance(NO_LANE_PROFILE, NoLaneProfile)
    NO_LANE_PROFILE.begin(1)
    assert vars(NO_LANE_PROFILE) == {}, "nothing is kept"


def test_each_rank_writes_its_trace_of_the_iterations(tmp_path: Path):
    for rank in (0, 1):
        make(profile_of(tmp_path, rank=rank), 1, 30)
        if rank == 0:
            # All ranks use rank 0's name for the recording.
            (tmp_path / "iterations_20-22").rename(tmp_path / "of_rank_0")
    trace = read(tmp_path, "iterations_20-22", rank=1)
    assert (trace.rank, trace.world_size) == (1, 2)
    assert list(trace.iterations) == [20, 21, 22]
    of_one = [one for one in trace.slices if one.iteration == 21]
    assert [one.name for one in of_one if one.kind == PHASE] == ["data", "norm", "report"]
    assert [one.name for one in of_one if one.row == GATHER] == ["layers.0"]
    assert abs(trace.iterations[20].begin) < 60, "seconds since the recording began"


def test_a_rank_on_a_separate_disk_creates_the_directory(tmp_path: Path):
    profile = profile_of(tmp_path / "timelines", "1:2", rank=1)
    profile.prepare(0, 30)
    (tmp_path / "timelines").rmdir()  # created by rank 0 on its machine
    profile.begin(1)
    profile.finish(1)
    assert files(tmp_path) == ["timelines/iterations_1-1/trace_rank1.json"]


def test_a_trace_is_written_once_all_of_its_work_is_done(tmp_path: Path):
    profile = profile_of(tmp_path, "1:2")
    profile.prepare(0, 30)
    profile.begin(1)
    span = CPU.span()
    profile.timeline.note(GATHER, "late", span)
    for number in (2, 3):
        profile.begin(number)
        assert files(tmp_path) == []
    with span:
        pass
    profile.begin(4)
    assert files(tmp_path) == ["iterations_1-1/trace_rank0.json"]
    assert {one.name for one in read(tmp_path, "iterations_1-1").slices} == {"iteration 1", "late"}


def test_unfinished_work_is_left_out_at_the_end(tmp_path: Path):
    profile = profile_of(tmp_path, "1:3")
    profile.prepare(0, 30)
    profile.begin(1)
    profile.timeline.note(GATHER, "for ever", CPU.span())
    profile.finish(1)
    (only,) = read(tmp_path, "iterations_1-2").slices
    assert only.kind == ITERATION


def test_a_restarted_run_does_not_overwrite_traces(tmp_path: Path):
    for start in range(3):
        make(profile_of(tmp_path), 1 + start, 30)
    folders = {str(Path(file).parent) for file in files(tmp_path)}
    assert folders == {"iterations_20-22", "iterations_20-22.2", "iterations_20-22.3"}


def test_a_run_that_dies_while_recording_leaves_no_files(tmp_path: Path):
    profile = profile_of(tmp_path)
    profile.prepare(0, 30)
    for number in range(1, 22):
        profile.begin(number)
    assert files(tmp_path) == []


@pytest.mark.parametrize(
    ("first", "last", "expected"),
    [
        (1, 30, []),
        (1, 21, ["iteration 22 was not recorded, since this start of the run makes iterations"]),
        (22, 30, ["iterations 20 to 21 were not recorded"]),
        (21, 21, ["iteration 20 and iteration 22 were not recorded"]),
        (24, 30, ["iterations 20 to 22 will not be recorded", "iterations 20 to 22 were not"]),
    ],
)  # fmt: skip
def test_iterations_that_were_not_recorded_are_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, first: int, last: int, expected: list[str]
):
    make(profile_of(tmp_path), first, last)
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(expected)
    for warning, text in zip(warnings, expected, strict=True):
        assert text in warning


def test_a_range_beyond_the_end_of_the_run_is_logged_at_its_start(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    profile_of(tmp_path).prepare(0, 19)
    assert "iterations 20 to 22 will not be recorded, since this start" in caplog.text


def test_an_unwritable_directory_is_rejected_at_the_start_of_the_run(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--profile-lanes: expected a writable directory"):
        profile_of(tmp_path / "file" / "timelines").prepare(0, 30)


def test_training_continues_if_a_trace_cannot_be_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    profile = profile_of(tmp_path)
    profile.prepare(0, 30)
    (tmp_path / "iterations_20-22").write_text("in the way")
    for number in range(20, 25):
        profile.begin(number)
    assert "Training continues." in caplog.text
    assert files(tmp_path) == ["iterations_20-22"]
