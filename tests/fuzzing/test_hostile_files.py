"""Hostile files, wherever a load or a data set reads one: each is rejected by name, or loaded.

An example ends in an error that the reader names, or in a load. It takes bounded time and memory,
executes no code, changes no file outside of its directory, and an error leaves model and optimizer
unchanged. The loaded bits are the same wherever a checksum covers them:

    run         all of it, unless somebody has computed the digests anew
    torch_dcp   the data, which has the CRC-32 of torch.save; `.metadata` and train state have none
    data set    the cache of the sample index: it has no checksum, but is held against the data
    others      none: a file of other values is another file

`make test` runs a few examples of each; `-m wide` thousands.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing.harness import Outcome, Worker
from tests.fuzzing.variants import Intact, Variant, variants

TARGETS = (
    "run, run without verification, torch_dcp, torch_dcp without verification, "
    "torch_dcp weights, tool, tool on torch_dcp, weights, data set, "
    "tokenizer, settings, events"
).split(", ")
MOST_BYTES = 128 << 20  # of memory in use; of address space it is `harness.MAX_BYTES`
QUIET = settings(
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    print_blob=False,
)


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    worker = Worker(tmp_path_factory.mktemp("fuzzing"))
    yield worker
    worker.close()


def problems(worker: Worker, target: str, variant: Variant, outcome: Outcome) -> list[str]:
    """The errors in an outcome."""
    found = outcome.problems()
    if outcome.nbytes > MOST_BYTES:
        found.append(f"it took {outcome.nbytes >> 20} MiB")
    if outcome.death is None and outcome.error is not None:
        if outcome.is_touched and not _is_read_into_place(target, variant):
            found.append("an error left another state behind")
    elif outcome.death is None:
        found += _differences(worker, target, variant, outcome)
    return found


def _is_read_into_place(target: str, variant: Variant) -> bool:
    """Whether other data than was saved may be noticed only once it has been put into place."""
    # At the start of a run, blocks are compared with their digests as they arrive.
    names = {name.rpartition("/")[2] for name in variant.changed}
    is_of_data = any(name.endswith(".distcp") or name.startswith("manifest") for name in names)
    return "without verification" in target or (target == "run" and is_of_data)


def _differences(worker: Worker, target: str, variant: Variant, outcome: Outcome) -> list[str]:
    """Whether the loaded state may differ from the saved one."""
    intact, value = worker.value(target), outcome.value
    if value == intact:
        return []
    changed = {name.rpartition("/")[2] for name in variant.changed}
    data = {name for name in changed if name.endswith(".distcp")}
    is_damaged_data = changed == data and not variant.is_prepared

    if target.startswith("run") and not variant.is_sealed:
        is_unverified = target != "run" and changed == data
        may_differ = {"state"} if is_unverified else set()
    elif target == "tool" and not variant.is_sealed:
        # `list` and `show` look at sizes and metadata; `list` at the tracker, too.
        may_differ = {"show", "list", "diff", "verify"}
        if value["verify"] == 0:
            may_differ = {"list"}
    elif target in ("torch_dcp", "torch_dcp weights") and is_damaged_data:
        may_differ = set()
    elif target == "data set":
        if not changed & {"tokens.idx", "tokens.bin"}:
            may_differ = set()
        else:
            # A stale index of samples is as good as none.
            rest = {name for name in variant.files if not name.startswith("cache/")}
            alone = worker.read(target, {name: variant.files[name] for name in rest})
            intact, may_differ = alone.value, set()
    else:
        return []
    different = {key for key in {*intact, *value} if intact.get(key) != value.get(key)}
    return [f"it loaded other {sorted(different - may_differ)}"] if different - may_differ else []


def run_examples(worker: Worker, target: str, num_examples: int, seconds: float) -> int:
    """Reads variants of a target's files; returns how many. AssertionError for the smallest bad."""
    intact, end, num_done = Intact(worker.make(target)), time.monotonic() + seconds, 0

    @settings(QUIET, max_examples=num_examples)
    @given(variants(intact))
    def example(variant: Variant) -> None:
        nonlocal num_done
        if time.monotonic() > end:
            return
        outcome = worker.read(target, variant.files)
        num_done += 1
        found = problems(worker, target, variant, outcome)
        assert not found, f"{target}: {'; '.join(found)}\n{variant!r}\n{outcome}"

    example()
    return num_done


def test_other_bits_and_a_state_that_was_touched_are_reported(worker: Worker) -> None:
    """Unless an attacker has computed the checksums anew: then they are other files."""
    files = worker.make("run")
    damaged = Variant(files, ("iter_0000003/__0_0.distcp",), False, False, "")
    other = Outcome(value={**worker.value("run"), "state": "other"})
    assert problems(worker, "run", damaged, other) == ["it loaded other ['state']"]
    assert problems(worker, "torch_dcp", damaged, other) == ["it loaded other ['state']"]
    assert problems(worker, "run", replace(damaged, is_sealed=True), other) == []
    nothing = Outcome(value={"nothing": True})
    assert problems(worker, "run", damaged, nothing) != [], "a checkpoint that is no longer visible"

    refused = Outcome(error="CheckpointError", is_expected=True, message="no")
    assert problems(worker, "run", damaged, refused) == []
    touched = replace(refused, is_touched=True)
    assert problems(worker, "run", damaged, touched) == [], "data is verified in its place"
    index = replace(damaged, changed=("iter_0000003/index.json",))
    for target, variant in (("run", index), ("torch_dcp", damaged)):
        assert problems(worker, target, variant, touched) == ["an error left another state behind"]
    large = replace(refused, nbytes=MOST_BYTES + 1)
    assert problems(worker, "run", damaged, large) == [f"it took {MOST_BYTES >> 20} MiB"]


@pytest.mark.parametrize("target", TARGETS)
def test_no_file_does_more_than_be_read(worker: Worker, target: str) -> None:
    assert run_examples(worker, target, 20, 20.0) > 5


@pytest.mark.wide
@pytest.mark.parametrize("target", TARGETS)
def test_no_file_of_thousands_does_more_than_be_read(worker: Worker, target: str) -> None:
    assert run_examples(worker, target, 5000, 25.0) > 100
