#!/usr/bin/env python3
"""What recording a timeline costs a training step: `--profile-lanes`, on and off.

    OMP_NUM_THREADS=1 torchrun --standalone --nproc-per-node 2 -m benchmarks.lane_profile

Two engines with every lane there is: ZeRO-3, bf16 compute, the optimizer in host memory with all
overlaps. One is that of a run with the flag, and a step of it is recorded, or comes before or after
those that are; the other is that of a run without the flag. Their steps take turns, in an order
drawn anew each round, two microbatches each; a step ends when the host's update has. The second
group is a single piece of work that does nothing, on this thread alone: what is added to each.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from functools import partial

import torch.distributed as dist
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.models import OFFLOADED
from benchmarks.helpers.ranks import launched
from benchmarks.helpers.result import Ratio, Result, measured
from benchmarks.helpers.steps import SEED, add_model_arguments, batch_of, model_on_meta
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.timeline import NO_TIMELINE, AnyTimeline, Timeline
from megatron.core.trace_file import GATHER
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from megatron.training.step import Batch

BENCHMARK = Benchmark(
    name="lane_profile",
    question="A recorded training step against one without --profile-lanes",
    ranks=2,
    full=("--layers=8", "--hidden=256", "--micro-batch=1", "--sequence=128", "--rounds=60"),
    quick=("--layers=4", "--hidden=128", "--micro-batch=1", "--sequence=64", "--rounds=10"),
)

# Of a run with the flag, while it records and while it does not; of a run without it.
RECORDING, WAITING, OFF = "recording", "with the flag, not recording", "off"
MOST = 1.01  # times a step of a run without the flag
_NUM_MICROBATCHES, _WARM_UP, _NUM_CALLS = 2, 3, 2000


def build(
    arguments: argparse.Namespace, device: Device, ranks: int, *, has_flag: bool
) -> MegatronEngine:
    """An engine as a run with or without the flag has it, on all ranks of this machine."""
    config = EngineConfig(
        OFFLOADED,
        LRScheduleConfig(lr=1e-4, lr_decay_style="constant"),
        DataParallelConfig(main_grads_dtype="bf16"),
        train_iters=10**6,
        compute_dtype="bf16",
        records_timings=has_flag,
    )
    engine = MegatronEngine(config, device, build_mesh(device.kind, ranks), num_local_ranks=ranks)
    engine.initialize(model_on_meta(arguments))
    return engine


class Steps:
    """Steps of one engine, which are recorded if it is one of a run with the flag."""

    def __init__(self, engine: MegatronEngine, batches: list[Batch]) -> None:
        self._engine = engine
        self._batches = batches
        self.timeline = Timeline(engine.device)
        if engine.config.records_timings:
            engine.record_to(self.timeline)
        self.num_slices = 0  # of the last step that was recorded

    def recorded(self) -> float:
        """Milliseconds of a step."""
        self.timeline.forget()

        def step() -> None:
            self.timeline.begin_iteration(1)
            self._step()
            self.timeline.end_iteration()

        milliseconds = _timed(step)
        self.num_slices = len(self.timeline.slices(0.0, is_final=True) or ())
        return milliseconds

    def plain(self) -> float:
        """The same, of a step that is not recorded."""
        return _timed(self._step)

    def _step(self) -> None:
        self._engine.train_batch(self._batches, forward_step, mark=self.timeline.phase)
        self._engine.state.optimizer.synchronize()


def forward_step(model: nn.Module, batch: Batch) -> object:
    """A microbatch's mean loss."""
    return model(batch["tokens"], batch["labels"]).mean()


def _timed(step: Callable[[], None]) -> float:
    dist.barrier()
    return 1e3 * report.seconds(step)


def microseconds_of_a_piece(timeline: AnyTimeline) -> float:
    """Of a piece of work that does nothing, handed over and run as engines do it."""
    begin = time.perf_counter()
    for _ in range(_NUM_CALLS):
        timeline.timed(GATHER, "layers.0", _nothing, 8)()
    return 1e6 * (time.perf_counter() - begin) / _NUM_CALLS


def _nothing() -> None:
    pass


def pieces(device: Device, num_rounds: int) -> dict[str, list[float]]:
    """The second group."""
    timeline = Timeline(device)
    timeline.begin_iteration(1)

    def recorded() -> float:
        timeline.forget()
        return microseconds_of_a_piece(timeline)

    sides = {RECORDING: recorded, OFF: partial(microseconds_of_a_piece, NO_TIMELINE)}
    return report.interleaved(sides, num_rounds, warm_up=1, seed=SEED)


def main(argv: Sequence[str] | None = None) -> None:
    """Measures; rank 0 reports."""
    parser = report.parser_of(__doc__)
    add_model_arguments(parser)
    arguments = parser.parse_args(argv)

    with launched() as (launch, device):
        tokens, labels = batch_of(arguments, launch.rank, device)
        batches = [{"tokens": tokens, "labels": labels}] * _NUM_MICROBATCHES
        steps, off = (
            Steps(build(arguments, device, launch.world_size, has_flag=has_flag), batches)
            for has_flag in (True, False)
        )
        sides = {RECORDING: steps.recorded, WAITING: steps.plain, OFF: off.plain}
        times = report.interleaved(sides, arguments.rounds, warm_up=_WARM_UP, seed=SEED)
        own = pieces(device, arguments.rounds)
    if launch.rank == 0:
        medians = report.medians(times)
        result = Result(
            (*measured(times, "ms", "a step"), *measured(own, "us", "a piece of work")),
            (
                Ratio(f"{RECORDING} / {OFF}", medians[RECORDING] / medians[OFF], at_most=MOST),
                Ratio(f"{WAITING} / {OFF}", medians[WAITING] / medians[OFF]),
            ),
            settings=report.settings_of(arguments),
            facts={"device": device.description, "slices_a_step": steps.num_slices},
        )
        report.hand_over(result, arguments.output)


if __name__ == "__main__":
    main()
