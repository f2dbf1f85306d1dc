"""Every way to train, on accelerators: the CPU's numbers, one wait a step, and no memory that
grows.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import pytest
import torch

from tests.helpers import gpu
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers import engines
from tests.simulated_accelerator.helpers.behaviours import (
    GPU,
    GPU_WITH_PAUSES,
    LANES_LAST,
    ONE_QUEUE,
    WITH_PAUSES,
    Behaviour,
    all_behaviours,
    these_behaviours,
)
from tests.simulated_accelerator.helpers.engines import CASES, Course

STEPS = range(4)
LIMIT = 500.0  # seconds
NUM_GROUPS = 4  # three layers, and the rest of the model
IN_FP32 = ["zero3 fp32", "zero1 fp32"]
IN_BF16 = [name for name, case in CASES.items() if case.dtype == "bf16" and name != "fp16 moments"]
# Together these use every lane. `test_checkpoints_on_device.py` trains with fp16 moments.
SOME = [
    "zero3 fp32",
    "hsdp",
    "offload forward half",
    "offload streamed",
    "offload early half",
    "activations recomputed",
]
ON_ONE_RANK = [
    name for name, case in CASES.items() if case.parallel.num_distributed_optimizer_instances == 1
]
WIDE = (pytest.mark.sim, pytest.mark.wide)
NUM_FIRST_STEPS = 3  # in which memory may be taken from the device


class Seen(NamedTuple):
    """Counts of a rank so far, or of a step, as far as its kind of device counts them."""

    syncs: int  # with streams, of all threads; on a GPU, of the main thread and with events too
    syncs_of_main: int  # with streams and events
    fresh_blocks: int  # of memory, taken from the device; on a GPU, bytes
    recorded_streams: int

    def since(self, earlier: Seen) -> Seen:
        return Seen(*(now - before for now, before in zip(self, earlier, strict=True)))


@contextmanager
def _looking(kind: str) -> Iterator[Callable[[], Seen]]:
    """Yields a function that returns the counts of this rank so far."""
    if kind == "cuda":
        with gpu.counted_waits() as waits:
            # In bytes: segments that grow in place are not allocated anew.
            yield lambda: Seen(
                waits(), waits(), torch.cuda.memory_stats()["reserved_bytes.all.allocated"], 0
            )
        return

    import tests.simulated_accelerator.device as sim

    def look() -> Seen:
        counted = sim.counters()
        of_main = sim.syncs_by_thread().get("MainThread", 0)
        return Seen(counted.stream_syncs, of_main, counted.fresh_blocks, counted.recorded_streams)

    sim.forget_touched_devices()
    yield look


def _on_cpu(names: list[str], length: int) -> dict[str, Course]:
    return {
        name: engines.train(engines.make_engine(name, "cpu"), "cpu", STEPS, length=length)
        for name in names
    }


def _on_device(
    names: list[str], behaviour: Behaviour
) -> tuple[dict[str, Course], dict[str, list[Seen]], set[int]]:
    """The courses, the counts of each of their steps, and the simulated devices that were used."""
    courses, seen, used = {}, {}, set[int]()
    with behaviour.applied(), _looking(behaviour.kind) as look:
        for name in names:
            engine = engines.make_engine(name, behaviour.kind)
            course = engines.train(engine, behaviour.kind, STEPS, look)
            engine.state.optimizer.synchronize()
            seen[name] = [after.since(before) for before, after in course.seen]
            courses[name] = course._replace(seen=[])
            del engine
            gc.collect()
        if behaviour.kind == "sim":
            import tests.simulated_accelerator.device as sim

            used = set(sim.touched_devices())
    return courses, seen, used


Expected = Callable[[str], dict[str, Course]]


def _sent_dtypes(kind: str) -> list[str]:
    return engines.make_engine("zero3", kind)._sent_dtypes()


@pytest.mark.sim
def test_the_log_reports_that_accelerators_send_gradients_in_fp32():
    assert run_ranks(2, _sent_dtypes, "cpu") == [["bf16"]] * 2
    assert run_ranks(2, _sent_dtypes, "sim", device="sim") == [["fp32"]] * 2
    assert run_ranks(1, _sent_dtypes, "sim", device="sim") == [[]]


@pytest.fixture(scope="module")
def expected() -> Expected:
    """expected(kind) -> what training in fp32 comes to on two ranks of the CPU, with its batches"""

    @functools.cache
    def courses(length: int) -> dict[str, Course]:
        return run_ranks(2, _on_cpu, IN_FP32, length, timeout=LIMIT)[0]

    return lambda kind: courses(engines.seq_length(kind))


def check(
    names: list[str], behaviour: Behaviour, expected: dict[str, Course], world_size: int = 2
) -> None:
    is_simulated = behaviour.kind == "sim"
    results = run_ranks(
        world_size, _on_device, names, behaviour, device=behaviour.kind, timeout=LIMIT
    )
    courses, seen, _ = results[0]
    assert all(others == courses for others, _, _ in results), "ranks agree"
    if is_simulated:
        assert [used for _, _, used in results] == [{rank} for rank in range(world_size)]
    in_bf16 = [name for name in names if name in IN_BF16]
    check_same_bits(
        {name: courses[name] for name in in_bf16}, by_shards=not is_simulated and world_size > 1
    )

    # The device's attention gets repeated key heads where the CPU's takes grouped ones, and the CPU
    # adds gradients up in another order: on some processors the last bits differ. On a GPU all
    # matrix products are added up in another order.
    for name in ("zero1 fp32", "zero3 fp32"):
        if name in names and expected:
            tolerance = 1e-6 if is_simulated else 2e-3
            assert courses[name].losses == pytest.approx(expected[name].losses, rel=tolerance)
    if expected:
        for name, course in courses.items():
            assert course.losses == pytest.approx(expected[IN_FP32[0]].losses, rel=2e-3), name
    for name, steps in seen.items():
        check_steps(name, steps, is_simulated)


def check_same_bits(courses: dict[str, Course], *, by_shards: bool) -> None:
    """Where states are, and how weights are cut, makes no difference to the bit.

    The squares in a norm are added in the order of the shards, so norms may differ in the last
    bits. On ranks of a GPU these may reach the losses, where shards differ (`by_shards`).
    """
    compared: list[tuple[str, Course]] = []
    for name, course in courses.items():
        parallel = CASES[name].parallel
        alike = [
            other
            for earlier, other in compared
            if not by_shards or CASES[earlier].parallel == parallel
        ]
        if alike:
            assert (course.losses, course.evaluated) == (alike[0].losses, alike[0].evaluated), name
        elif compared:
            assert course.losses == pytest.approx(compared[0][1].losses, rel=2e-3), name
        if compared:
            assert course.norms == pytest.approx(
                compared[0][1].norms, rel=2e-3 if by_shards else 1e-6
            )
        compared.append((name, course))


def check_steps(name: str, steps: list[Seen], is_simulated: bool) -> None:
    """Each step waits once for the device, and after the first few none takes memory from it."""
    settings, parallel = CASES[name].optimizer, CASES[name].parallel
    late = steps[NUM_FIRST_STEPS:]
    assert all(step.recorded_streams == 0 for step in steps), name
    if not is_simulated and parallel.use_torch_fsdp2:
        return  # PyTorch's engine waits and allocates as it likes
    assert all(step.fresh_blocks == 0 for step in late), (name, steps)

    is_in_order = settings.optimizer_cpu_offload and not settings.overlap_cpu_optimizer_d2h_h2d
    if not is_simulated:
        # The main thread waits for every copy in order, and for copies of pageable memory.
        if settings.pin_cpu_grads and not is_in_order:
            assert [step.syncs_of_main for step in late] == [1] * len(late), (name, steps)
        return

    # With the first use, weights that were made in host memory come up: from there copies block.
    first = 1 if settings.optimizer_cpu_offload else 0
    # Copies of pageable memory block the workers that issue them.
    blocking = 0 if settings.pin_cpu_grads else 2 * NUM_GROUPS
    expected_syncs = [1 + blocking] * (len(STEPS) - first)
    assert [step.syncs for step in steps[first:]] == expected_syncs, name
    assert all(step.syncs_of_main == 1 for step in steps[first:]) or not blocking, (name, steps)


@all_behaviours(LANES_LAST, ONE_QUEUE, GPU, GPU_WITH_PAUSES)
def test_training_on_the_device_gives_the_numbers_of_the_cpu_with_one_wait_a_step(
    behaviour, expected
):
    check(SOME, behaviour, expected(behaviour.kind))


@pytest.mark.wide
@these_behaviours(LANES_LAST, ONE_QUEUE, WITH_PAUSES, GPU_WITH_PAUSES)
@pytest.mark.parametrize("name", [name for name in CASES if name not in SOME])
def test_every_other_way_to_train(name, behaviour, expected):
    check([name], behaviour, expected(behaviour.kind))


@pytest.mark.parametrize(
    ("world_size", "behaviour", "names"),
    [
        pytest.param(1, LANES_LAST, ["zero3", "offload forward half"], marks=WIDE, id="1"),
        pytest.param(4, LANES_LAST, ["hsdp", "offload hsdp"], marks=WIDE, id="4"),
        pytest.param(1, GPU, ON_ONE_RANK, marks=GPU.mark, id="1, GPU"),
        pytest.param(1, GPU_WITH_PAUSES, ON_ONE_RANK, marks=GPU.mark, id="1, GPU, pauses"),
    ],
)
def test_training_on_other_numbers_of_ranks(world_size, behaviour, names):
    check(names, behaviour, {}, world_size)
