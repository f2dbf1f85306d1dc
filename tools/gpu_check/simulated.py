"""The simulated accelerator in place of a GPU. The only file that imports from tests/."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager

import torch

from megatron.core.optimizer.kernels import torch_adam
from megatron.core.optimizer.kernels.adam import AdamPiece
from tests.simulated_accelerator import device as sim
from tools.gpu_check.accelerator import Accelerator, Peak

_LONGEST_PAUSE_US = 300
_MEMORY_BYTES = 1 << 30
_MAIN_THREAD = "MainThread"


class SimulatedAccelerator(Accelerator):
    """Like a GPU as far as possible, but nothing here says how fast anything is."""

    kind = sim.KIND
    shared_backends = (sim.COLLECTIVE_BACKEND,)

    def _check_available(self) -> None:
        # Ranks share the cores, and importing it has made the device available.
        torch.set_num_threads(1)

    def run_adam(self, pieces: Iterable[AdamPiece]) -> None:
        torch_adam.run(pieces)

    def pause(self, seconds: float) -> None:
        # Counted from when it is issued: near enough where nothing else is queued before it.
        gate = ExitStack()
        gate.enter_context(sim.held(torch.accelerator.current_stream()))
        threading.Timer(seconds, gate.close).start()

    def num_segments(self) -> int:
        return sim.counters().fresh_blocks

    def peak(self) -> Peak:
        module = torch.get_device_module(self.kind)
        return Peak(module.max_memory_allocated(), module.max_memory_reserved())

    def reset_peak(self) -> None:
        torch.get_device_module(self.kind).reset_peak_memory_stats()

    def memory_bytes(self) -> int:
        return _MEMORY_BYTES

    @contextmanager
    def counting_syncs(self) -> Iterator[list[str]]:
        places: list[str] = []
        before = sim.syncs_by_thread().get(_MAIN_THREAD, 0)
        yield places
        places += ["somewhere"] * (sim.syncs_by_thread().get(_MAIN_THREAD, 0) - before)

    @contextmanager
    def blocking_launches(self) -> Iterator[None]:
        with sim.configured(queue_depth=1):
            yield

    @contextmanager
    def pauses(self, seed: int) -> Iterator[None]:
        with sim.configured(max_pause_us=_LONGEST_PAUSE_US, seed=seed):
            yield
