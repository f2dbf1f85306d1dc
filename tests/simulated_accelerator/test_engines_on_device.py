"""Every way to train, on the simulated accelerator: the CPU's numbers, one wait a step, and no
memory that grows.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers import engines
from tests.simulated_accelerator.helpers.behaviours import (
    LANES_LAST,
    WITH_PAUSES,
    Behaviour,
    all_behaviours,
)
from tests.simulated_accelerator.helpers.engines import CASES, Course

pytestmark = pytest.mark.sim

STEPS = range(5)
LIMIT = 500.0  # seconds
NUM_GROUPS = 4  # three layers, and the rest of the model
IN_FP32 = ["zero3 fp32", "zero1 fp32"]
IN_BF16 = [name for name, case in CASES.items() if case.dtype == "bf16" and name != "fp16 moments"]
# A cut that has every lane, and every kind of sharding.
SOME = [
    "zero3 fp32",
    "hsdp",
    "offload forward half",
    "activations recomputed",
    "fp16 moments",
]


class Seen(NamedTuple):
    """What a step did, as the simulator counted it."""

    syncs: int  # with streams, of all threads
    syncs_of_main: int  # with streams and events
    fresh_blocks: int
    recorded_streams: int


def _on_cpu(names: list[str]) -> dict[str, Course]:
    return {name: engines.train(engines.make_engine(name, "cpu"), "cpu", STEPS) for name in names}


def _on_device(
    names: list[str], behaviour: Behaviour
) -> tuple[dict[str, Course], dict[str, list[Seen]], set[int]]:
    """The courses, what each of their steps did, and the devices that this rank has used."""
    import torch.distributed as dist

    import tests.simulated_accelerator.device as sim

    def look() -> Any:
        return sim.counters(), sim.syncs_by_thread().get("MainThread", 0)

    courses, seen = {}, {}
    sim.configure(behaviour.settings())
    sim.forget_touched_devices()
    try:
        for name in names:
            engine = engines.make_engine(name, "sim")
            courses[name] = course = engines.train(engine, "sim", STEPS, look)
            engine.state.optimizer.synchronize()
            seen[name] = [_seen(*pair) for pair in course.seen]
            courses[name] = course._replace(seen=[])
            del engine
            gc.collect()
    finally:
        sim.configure(sim.Settings())
    assert dist.is_initialized()
    return courses, seen, set(sim.touched_devices())


def _seen(before: Any, after: Any) -> Seen:
    (first, of_main), (last, of_main_after) = before, after
    done = last - first
    return Seen(
        done.stream_syncs,
        of_main_after - of_main,
        done.fresh_blocks,
        done.recorded_streams,
    )


@pytest.fixture(scope="module")
def expected() -> dict[str, Course]:
    """What training in fp32 comes to on two ranks of the CPU."""
    return run_ranks(2, _on_cpu, IN_FP32, timeout=LIMIT)[0]


def same_course(course: Course, other: Course) -> None:
    """The same weights to the bit. The squares in a norm are added in the order of the shards."""
    assert (course.losses, course.evaluated) == (other.losses, other.evaluated)
    assert course.norms == pytest.approx(other.norms, rel=1e-6)


def check(
    names: list[str], behaviour: Behaviour, expected: dict[str, Course], world_size: int = 2
) -> None:
    results = run_ranks(world_size, _on_device, names, behaviour, device="sim", timeout=LIMIT)
    courses, seen, _ = results[0]
    for rank, (others, _, devices) in enumerate(results):
        assert others == courses, "ranks agree"
        assert devices == {rank}, "no rank opens a context on another's device"

    # Where the optimizer's states are and how weights are cut makes no difference, to the bit.
    in_bf16 = [name for name in names if name in IN_BF16]
    for name in in_bf16[1:]:
        same_course(courses[name], courses[in_bf16[0]])
    # The device's attention gets repeated key heads where the CPU's takes grouped ones, and the CPU
    # adds gradients up in another order: on some processors the last bits differ.
    for name in ("zero1 fp32", "zero3 fp32"):
        if name in names and expected:
            losses = expected[name].losses
            assert courses[name].losses == pytest.approx(losses, rel=1e-6)
    if expected:
        for name, course in courses.items():
            assert course.losses == pytest.approx(expected[IN_FP32[0]].losses, rel=2e-3), name

    for name, steps in seen.items():
        # With the first use, weights that were made in host memory come up: from there copies
        # block.
        settings = CASES[name].optimizer
        first = 1 if settings.optimizer_cpu_offload else 0
        # Copies of pageable memory block the workers that issue them.
        blocking = 0 if settings.pin_cpu_grads else 2 * NUM_GROUPS
        expected_syncs = [1 + blocking] * (len(STEPS) - first)
        assert [step.syncs for step in steps[first:]] == expected_syncs, name
        assert all(step.syncs_of_main == 1 for step in steps[first:]) or not blocking, (name, steps)
        assert all(step.fresh_blocks == 0 for step in steps[3:]), (name, steps)
        assert all(step.recorded_streams == 0 for step in steps), name


@all_behaviours(LANES_LAST)
def test_training_on_the_device_gives_the_numbers_of_the_cpu_with_one_wait_a_step(
    behaviour, expected
):
    check(SOME, behaviour, expected)


@pytest.mark.wide
@pytest.mark.parametrize("behaviour", [LANES_LAST, WITH_PAUSES], ids=str)
@pytest.mark.parametrize("name", [name for name in CASES if name not in SOME])
def test_every_other_way_to_train(name, behaviour, expected):
    check([name], behaviour, expected)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 4])
def test_training_on_other_numbers_of_ranks(world_size):
    names = ["zero3", "offload forward half"] if world_size == 1 else ["hsdp", "offload hsdp"]
    check(names, LANES_LAST, {}, world_size)
