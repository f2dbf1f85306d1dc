"""Updates that a killed process leaves are finished with the bits of an undisturbed update."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator

import pytest
import torch

from megatron.core.device import Device
from megatron.core.host_keeper import Keeper, KeptMemory
from megatron.core.host_memory import HostSlab
from megatron.core.optimizer.cpu_offloading import kept_updates
from megatron.core.optimizer.cpu_offloading.kept_updates import CHUNK_NUMEL, KeptUpdates
from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import LIBRARY
from megatron.core.optimizer.kernels.piece import HostKernel, Piece
from megatron.core.optimizer.rules import Adam
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import KILLED, Child, Forks, forks
from tests.unit_tests.core.helpers.keepers import launcher

CPU = Device("cpu")
NUMELS = (3 * CHUNK_NUMEL + 1000, 70, CHUNK_NUMEL)  # of pieces
SCALE = 0.7
DTYPES = [torch.float32, torch.bfloat16]  # of gradients; bf16 ones are overlaid by weights


class Arrays:
    """The arrays of a bucket in kept memory, and its updates. The bucket of a `KeptUpdates`."""

    def __init__(self, launcher: int, grad_dtype: torch.dtype) -> None:
        keeper = Keeper(launcher, 0, 1)
        keeper.connect(starts=True)
        memory = KeptMemory(keeper)
        self.numel, self.slots = sum(NUMELS), NUMELS
        self._flat: list[torch.Tensor] = []
        for dtype in (grad_dtype, *3 * (torch.float32,)):
            nbytes = self.numel * dtype.itemsize
            slab = HostSlab(nbytes, CPU, is_pinned=False, purpose="array", kept=memory)
            self._flat.append(slab.tensor(0, self.numel, dtype))
        self.updates = KeptUpdates(memory, CPU, [self])  # type: ignore[list-item]

    def fill(self, seed: int) -> None:
        """Gives all arrays values, as before a step."""
        generator = torch.Generator().manual_seed(seed)
        for array in self._flat:
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
    """The values after step 3, without a log."""
    arrays = Arrays(pid, dtype)
    arrays.fill(3)
    torch_adam.run(arrays.pieces(3), SCALE)
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
    progress[1] = 2  # the step that is done
    # The last row of each chunk that a slot has a row of.
    slots = {}
    for slot in sorted(arrays.updates._valid_slots(), key=lambda slot: int(slot.header[3])):
        slots[int(slot.header[2])] = slot
    assert len(slots) < len(list(arrays.updates._valid_slots()))
    for slot in slots.values():
        _, _, index, start, numel = slot.header[:5].tolist()
        progress[2 + index] = start
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
        return _is_same(Child(_finish, pid, dtype, True).result(), expected)


compiled = pytest.mark.skipif(not LIBRARY.exists(), reason="the host kernel is not built")


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_keep_the_old_values_of_their_last_rows(nursery, dtype):
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
        while int(log.counters.sum()) < min(limit, sum(NUMELS)):
            pass
        os.kill(os.getpid(), signal.SIGKILL)

    return HostKernel(lambda *_: lambda: None, submit)


def _finish_and_die(pid: int, dtype: torch.dtype) -> None:
    arrays = Arrays(pid, dtype)
    arrays.updates.step = 3
    progress = arrays.updates._progress[0]
    before = int(progress[2:].sum())
    kernel = _kernel(True)
    submit = kernel.submit_logged
    assert submit is not None

    def submit_and_die(pieces, grad_scale, log):  # type: ignore[no-untyped-def]
        submit(pieces, grad_scale, log)
        while int(log.counters.sum()) < min(before + 3000, sum(NUMELS)):
            time.sleep(0)
        os.kill(os.getpid(), signal.SIGKILL)

    arrays.updates.finish(HostKernel(kernel.submit, submit_and_die), {0: arrays.pieces(3)}, SCALE)


@compiled
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_that_are_killed_twice_leave_updates_that_can_be_finished(nursery, dtype):
    assert nursery.run(_are_finished, dtype) == 6 * [True]
