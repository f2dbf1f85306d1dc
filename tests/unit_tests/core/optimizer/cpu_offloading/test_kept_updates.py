"""Updates that a killed process leaves are finished with the bits of an undisturbed update."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
import pytest
import torch

from megatron.core.device import Device
from megatron.core.host_keeper import Keeper, KeptMemory
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.cpu_offloading import kept_updates
from megatron.core.optimizer.cpu_offloading.kept_updates import (
    CHUNK_NUMEL,
    KeptUpdates,
    chunk_sum,
    find_damage,
)
from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import LIBRARY, HostAdam, available_bodies
from megatron.core.optimizer.kernels.piece import (
    COUNTER_STRIDE,
    NOT_STARTED,
    ROW_NUMEL,
    HostKernel,
    Piece,
    RowLog,
)
from megatron.core.optimizer.rules import Adam
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import KILLED, Child, Forks, forks
from tests.unit_tests.core.helpers.keepers import launcher

CPU = Device("cpu")
NUMELS = (3 * CHUNK_NUMEL + 1000, 70, CHUNK_NUMEL)  # of pieces
SCALE = 0.7
DTYPES = [torch.float32, torch.bfloat16]  # of gradients; bf16 ones are overlaid by weights


def _memory(launcher: int) -> KeptMemory:
    keeper = Keeper(launcher, 0, 1)
    keeper.connect(starts=True)
    return KeptMemory(keeper)


class Arrays:
    """The arrays of a bucket in kept memory, and its updates. The bucket of a `KeptUpdates`."""

    def __init__(self, launcher: int, grad_dtype: torch.dtype) -> None:
        memory = _memory(launcher)
        self.numel, self.slots = sum(NUMELS), NUMELS
        self._flat: list[torch.Tensor] = []
        for dtype in (grad_dtype, *3 * (torch.float32,)):
            nbytes = self.numel * dtype.itemsize
            slab = HostSlab(nbytes, CPU, is_pinned=False, purpose="array", kept=memory)
            self._flat.append(slab.tensor(0, self.numel, dtype))
        self.updates = KeptUpdates(memory, CPU, [self])  # type: ignore[list-item]

    def fill(self, step: int) -> None:
        """Gives the gradients values before a step, and before step 2 all arrays."""
        generator = torch.Generator().manual_seed(step)
        for array in self._flat[: None if step == 2 else 1]:
            array.copy_(torch.rand(self.numel, generator=generator))

    def pieces(self, step: int) -> list[Piece]:
        grad, weight, first, second = self._flat
        out = grad if grad.dtype == torch.bfloat16 else None
        whole = Piece(
            AdamStep(step, 1e-2, weight_decay=0.1),
            grad,
            weight,
            {"exp_avg": first, "exp_avg_sq": second},
            out=out,
        )
        starts = [sum(NUMELS[:index]) for index in range(len(NUMELS))]
        return [whole.part(*place) for place in zip(starts, NUMELS, strict=True)]

    def values(self) -> list[torch.Tensor]:
        return [array.clone() for array in self._flat]


@pytest.fixture(scope="module")
def nursery() -> Iterator[Forks]:
    with forks("megatron.core.optimizer.rules", "tests.unit_tests.core.helpers.keepers") as found:
        yield found


def _kernel(is_compiled: bool) -> HostKernel:
    return HostKernel.of(Adam().host_kernel(2)) if is_compiled else HostKernel.of(torch_adam.run)


def _expected(pid: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """The values after steps 2 and 3, without a log."""
    arrays = Arrays(pid, dtype)
    for step in (2, 3):
        arrays.fill(step)
        torch_adam.run(arrays.pieces(step), SCALE)
    return arrays.values()


def _take_steps(
    pid: int, dtype: torch.dtype, kernels: tuple[HostKernel | bool, HostKernel | bool]
) -> None:
    """Takes steps 2 and 3, with slots of the former left in memory."""
    arrays = Arrays(pid, dtype)
    for step, kernel in enumerate(kernels, 2):
        arrays.fill(step)
        arrays.updates.step = step
        chosen = kernel if isinstance(kernel, HostKernel) else _kernel(kernel)
        arrays.updates.start(chosen, 0, arrays.pieces(step), SCALE)()


def _finish(pid: int, dtype: torch.dtype, is_compiled: bool) -> list[torch.Tensor]:
    arrays = Arrays(pid, dtype)
    arrays.updates.step = 3
    arrays.updates.finish(_kernel(is_compiled), {0: arrays.pieces(3)}, SCALE)
    return arrays.values()


def _is_same(values: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, values, others))


def _dying(at: int) -> HostKernel:
    """A kernel that is killed when it has written half of its call number `at`."""
    calls: list[Piece] = []

    def run(pieces: Iterable[Piece], grad_scale: float) -> None:
        (piece,) = pieces
        calls.append(piece)
        if len(calls) > at:
            torch_adam.run([piece.part(0, piece.numel // 2)], grad_scale)
            os.kill(os.getpid(), signal.SIGKILL)
        torch_adam.run([piece], grad_scale)

    return HostKernel.of(run)


def _half_written_rows(dtype: torch.dtype) -> list[bool]:
    with launcher() as other:
        expected = Child(_expected, other, dtype).result()
    found = []
    for at in range(6):
        with launcher() as pid:
            assert Child(_take_steps, pid, dtype, (False, _dying(at))).end() == KILLED
            found.append(_is_same(Child(_finish, pid, dtype, False).result(), expected))
    return found


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_that_is_half_written_is_restored_and_the_rest_updated(nursery, dtype):
    assert nursery.run(_half_written_rows, dtype) == 6 * [True]


def _without_old_values() -> list[bool]:
    KeptUpdates._restore = lambda *_: None  # type: ignore[method-assign]
    return _half_written_rows(torch.float32)


def test_without_old_values_the_bits_differ(nursery):
    assert nursery.run(_without_old_values) == 6 * [False]


def _scribble(pid: int, dtype: torch.dtype) -> int:
    """Takes the last rows of threads for half written. Returns how many there were. Slots of the
    rows before these are still valid.
    """
    arrays = Arrays(pid, dtype)
    arrays.updates.step = 3
    progress = arrays.updates._progress[0]
    progress.head[2] = 2  # the step that is done
    # The last row of each chunk that a slot has a row of.
    slots = {}
    valid = list(arrays.updates._valid_slots())
    for slot in sorted(valid, key=lambda slot: int(slot.header[3])):
        slots[int(slot.header[2])] = slot
    assert len(slots) < len(valid)
    for slot in slots.values():
        _, _, index, start, numel = slot.header[:5].tolist()
        progress.counters[index] = start
        row = kept_updates._chunks(arrays.pieces(3))[index].part(start, numel)
        for _, own in slot._pairs(row):
            own.fill_(torch.nan)
    return len(slots)


def _scribbled_rows(dtype: torch.dtype) -> bool:
    with launcher() as other:
        expected = Child(_expected, other, dtype).result()
    with launcher() as pid:
        Child(_take_steps, pid, dtype, (True, True)).result()
        assert Child(_scribble, pid, dtype).result() > 0
        values = Child(_finish, pid, dtype, True).result()
        return _is_same(values, expected) and Child(_damaged, pid, ()).result() == [0]


compiled = pytest.mark.skipif(not LIBRARY.exists(), reason="the host kernel is not built")


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_keep_the_old_values_of_their_last_rows_and_continue_sums(nursery, dtype):
    assert nursery.run(_scribbled_rows, dtype)


def _are_finished(dtype: torch.dtype) -> list[bool]:
    """Kills threads of the compiled kernel in step 3, and in the rest of it."""
    found = []
    with launcher() as other:
        expected = Child(_expected, other, dtype).result()
    for number in range(6):
        with launcher() as pid:
            Child(_take_steps, pid, dtype, (True, _spun(number))).end()
            Child(_finish_and_die, pid, dtype).end()
            found.append(_is_same(Child(_finish, pid, dtype, True).result(), expected))
    return found


def _spun(number: int) -> HostKernel:
    """The compiled kernel in a process that is killed while its threads work."""
    kernel: list[HostKernel] = []

    def submit(pieces, grad_scale, log):  # type: ignore[no-untyped-def]
        kernel.append(_kernel(True))
        assert kernel[0].submit_logged is not None
        kernel[0].submit_logged(pieces, grad_scale, log)
        limit = log.chunk * number // 4
        while int(log.counters.clamp(min=0).sum()) < min(limit, sum(NUMELS)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    return HostKernel(lambda *_: lambda: None, submit)


def _finish_and_die(pid: int, dtype: torch.dtype) -> None:
    arrays = Arrays(pid, dtype)
    arrays.updates.step = 3
    progress = arrays.updates._progress[0]
    before = int(progress.counters.clamp(min=0).sum())
    kernel = _kernel(True)
    submit = kernel.submit_logged
    assert submit is not None

    def submit_and_die(pieces, grad_scale, log):  # type: ignore[no-untyped-def]
        submit(pieces, grad_scale, log)
        while int(log.counters.clamp(min=0).sum()) < min(before + 3000, sum(NUMELS)):
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    arrays.updates.finish(HostKernel(kernel.submit, submit_and_die), {0: arrays.pieces(3)}, SCALE)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_that_are_killed_twice_leave_updates_that_can_be_finished(nursery, dtype):
    assert nursery.run(_are_finished, dtype) == 6 * [True]


# Sums


def test_every_bit_and_place_of_a_chunk_counts_in_its_sum():
    generator = np.random.default_rng(1)
    arrays = [generator.integers(1 << 32, size=1000, dtype=np.uint32) for _ in range(3)]
    expected = chunk_sum(arrays)
    for array in arrays:
        for bit in range(32):
            array[bit] ^= 1 << bit
            assert chunk_sum(arrays) != expected
            array[bit] ^= 1 << bit

    first, second, third = arrays
    assert chunk_sum([second, first, third]) != expected
    assert chunk_sum([first, third, second]) != expected
    swapped = np.concatenate([first[512:], first[:512]])
    assert chunk_sum([swapped, second, third]) != expected
    first[[3, 700]] ^= 1 << 31
    assert chunk_sum(arrays) != expected
    first[[3, 700]] ^= 1 << 31
    assert chunk_sum(arrays) == expected


@compiled
@pytest.mark.parametrize("body", available_bodies()[:-1])
@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float32),
    ],
)
def test_threads_sum_the_new_values_of_the_elements_that_they_update(body, dtypes):
    weight_dtype, state_dtype = dtypes
    begin, chunk, numels = 3, 4096, (2 * 4096 + 777, 70)  # from between two cache lines
    torch.manual_seed(1)
    grad = torch.randn(begin + sum(numels)).bfloat16()
    weight = torch.randn(len(grad)).to(weight_dtype)
    first, second = torch.rand(2, len(grad)).to(state_dtype)
    whole = Piece(
        AdamStep(3, 1e-2), grad, weight, {"exp_avg": first, "exp_avg_sq": second}, out=grad
    )
    pieces = [whole.part(begin, numels[0]), whole.part(begin + numels[0], numels[1])]
    chunks = [part for piece in pieces for part in piece.parts(chunk)]

    # One is done, and one is continued.
    lines = torch.full((len(chunks), COUNTER_STRIDE), NOT_STARTED)
    counters, sums = lines[:, 0], torch.zeros(len(chunks), dtype=torch.int64)
    counters[0], sums[0] = chunk, 5
    counters[1], sums[1] = 1001, kept_updates._sum_of(chunks[1].part(0, 1001))
    slots = torch.zeros(4, kept_updates.slot_bytes(ROW_NUMEL), dtype=torch.uint8)
    log = RowLog(counters, sums, slots, chunk, step=1, bucket=0)
    HostAdam(2, body=body).submit(pieces, log=log).wait()
    assert counters.tolist() == [part.numel for part in chunks]
    assert lines[:, 1:].eq(NOT_STARTED).all()
    assert sums.tolist() == [5, *map(kept_updates._sum_of, chunks[1:])]


def _damaged(pid: int, places: Sequence[tuple[str, int]]) -> list[int]:
    """How many chunks are damaged in step 3, with a bit flipped at each of these bytes of files in
    turn, and at last without.
    """
    memory = _memory(pid)
    memory.map_files(memory._keeper.files)
    files = memory.files
    found = []
    for name, byte in places:
        files[name][byte] ^= 0x10
        found.append(_num_damaged(files))
        files[name][byte] ^= 0x10
    return [*found, _num_damaged(files)]


def _num_damaged(files: Mapping[str, mmap.mmap]) -> int:
    damage = find_damage(files, 3)
    return int(damage.split()[0]) if damage else 0


STARTS = [
    sum(NUMELS[:piece]) + start
    for piece, numel in enumerate(NUMELS)
    for start in range(0, numel, CHUNK_NUMEL)
]
NUM_CHUNKS = len(STARTS)
ENDS = [*STARTS[1:], sum(NUMELS)]


def _found_damage(dtype: torch.dtype, is_compiled: bool) -> list[int]:
    places = [(f"array {number}", 4 * at) for number in (1, 2, 3) for at in STARTS]
    places += [(f"array {number}", 4 * at - 1) for number in (1, 2, 3) for at in ENDS]
    with launcher() as pid:
        Child(_take_steps, pid, dtype, (is_compiled, is_compiled)).result()
        return Child(_damaged, pid, places).result()


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=compiled)])
def test_a_flipped_bit_of_any_chunk_is_noticed(nursery, is_compiled):
    expected = [*(6 * NUM_CHUNKS * [1]), 0]
    assert nursery.run(_found_damage, torch.bfloat16, is_compiled) == expected


def _damage_within_a_step() -> list[list[int]]:
    found = []
    for at in range(NUM_CHUNKS):
        with launcher() as pid:
            assert Child(_take_steps, pid, torch.float32, (False, _dying(at))).end() == KILLED
            places = [("array 2", 4 * start + 1) for start in STARTS]
            found.append(Child(_damaged, pid, places).result())
    return found


def test_within_a_step_all_chunks_but_the_half_written_one_have_sums(nursery):
    expected = [[*(int(index != at) for index in range(NUM_CHUNKS)), 0] for at in range(NUM_CHUNKS)]
    assert nursery.run(_damage_within_a_step) == expected


def _damage_after_kills() -> list[list[int]]:
    """Of the compiled kernel: killed in step 3, in the rest of it, and finished."""
    found = []
    for number in range(6):
        with launcher() as pid:
            Child(_take_steps, pid, torch.bfloat16, (True, _spun(number))).end()
            found.append(Child(_damaged, pid, ()).result())
            Child(_finish_and_die, pid, torch.bfloat16).end()
            found.append(Child(_damaged, pid, ()).result())
            Child(_finish, pid, torch.bfloat16, True).result()
            places = [("array 1", 4 * start) for start in STARTS]
            found.append(Child(_damaged, pid, places).result())
    return found


@compiled
def test_values_that_killed_threads_leave_have_their_sums(nursery):
    assert nursery.run(_damage_after_kills) == 6 * [[0], [0], [*(NUM_CHUNKS * [1]), 0]]


def _take_other_steps(pid: int, ends: bool) -> None:
    """Takes step 2 of all pieces and, unless it ends there, step 3 of the last two."""
    arrays = Arrays(pid, torch.float32)
    arrays.fill(2)
    for step in (2, 3)[: 1 if ends else 2]:
        arrays.updates.step = step
        arrays.updates.start(_kernel(False), 0, arrays.pieces(step)[step - 2 :], SCALE)()


def _damage_of_other_steps() -> list[list[int]]:
    found = []
    for ends in (True, False):
        with launcher() as pid:
            Child(_take_other_steps, pid, ends).result()
            places = [("array 1", 4 * start) for start in STARTS]
            found.append(Child(_damaged, pid, places).result())
    return found


def test_sums_are_of_the_parameters_that_the_last_step_has_updated(nursery):
    every = NUM_CHUNKS * [1]
    of_the_last = [*(4 * [0]), 1, 1]  # the first piece has four chunks
    assert nursery.run(_damage_of_other_steps) == [[*every, 0], [*of_the_last, 0]]


def _without_elements(pid: int) -> list[int]:
    arrays = Arrays(pid, torch.float32)
    for step in (2, 3):
        arrays.updates.step = step
        arrays.updates.start(_kernel(True), 0, [], SCALE)()
    return _damaged(pid, ())


def _damage_without_elements() -> list[int]:
    with launcher() as pid:
        return Child(_without_elements, pid).result()


def test_a_bucket_of_which_a_rank_has_no_elements_has_no_sums(nursery):
    assert nursery.run(_damage_without_elements) == [0]


def _with_other_numbers(pid: int) -> list[bool]:
    """Whether another value of each of the bucket's numbers is noticed."""
    memory = _memory(pid)
    memory.map_files(memory._keeper.files)
    files = memory.files
    numbers = torch.frombuffer(files["progress 0"], dtype=torch.int64)
    found = []
    for place, before in enumerate(numbers.tolist()):
        noticed = []
        for other in (before ^ 1, -2, 1 << 40):
            numbers[place] = other
            noticed.append(find_damage(files, 3) != "")
        numbers[place] = before
        found.append(all(noticed))
    return found


def _damaged_numbers() -> list[bool]:
    with launcher() as pid:
        assert Child(_take_steps, pid, torch.float32, (False, _dying(2))).end() == KILLED
        return Child(_with_other_numbers, pid).result()


def test_damaged_numbers_of_a_step_are_noticed_where_they_matter(nursery):
    found = nursery.run(_damaged_numbers)
    assert len(found) == 3 + 2 + 2 * 9 + (COUNTER_STRIDE + 6) * 7, "with room for a chunk more"
    assert found[0], "the number of chunks"
    counters = found[3 : 3 + 7 * COUNTER_STRIDE : COUNTER_STRIDE]
    assert counters == [True, True, False, True, True, True, True], "all but the half-written one"
