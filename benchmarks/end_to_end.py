#!/usr/bin/env python3
"""Training, saving and resuming from end to end: this project, PyTorch FSDP2 and DeepSpeed.

    python -m benchmarks.end_to_end

The same GPT in plain PyTorch, from the same weights, on the same data, on two ranks: bf16 compute
over fp32 main weights, AdamW whose states are in host memory, gradients clipped by their norm. Each
side is a separate job in a separate environment. All jobs are alive for all rounds and sleep until
it is their turn; their order is drawn anew each round.

    training            tokens a second of all ranks, until a round's steps are complete
    peak memory         of all ranks together: their allocations, without their libraries. On the
                        CPU all memory is host memory.
    a save              until the call returns; how much longer the next steps take than as many did
                        just before; and until all files are on the disk, fsync included
    load                in new processes, on the same number of ranks

Facts: whether the new processes compute the same bits as the old ones, whether the checkpoint loads
on other numbers of ranks as it is, and each side's settings. The losses of all sides must agree in
the first steps, or no result is reported. docs/benchmarks.md has the method.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.helpers import report
from benchmarks.helpers.benchmark import Benchmark
from benchmarks.helpers.result import Measurement, NotRun, Ratio, Result
from benchmarks.peers import rounds
from benchmarks.peers.environments import interpreter, not_made, peers_that_cannot_run
from benchmarks.peers.gpt import Shape, build_gpt
from benchmarks.peers.jobs import Conversion, Job, JobError, Side
from benchmarks.peers.resume import Loader, Loading, Saved, differences
from benchmarks.peers.rounds import Rounds
from benchmarks.peers.trainer import Training

BENCHMARK = Benchmark(
    name="end_to_end",
    question="Training, saving and resuming with offloaded states on two ranks, against FSDP2 with "
    "CPUOffloadPolicy and DeepSpeed ZeRO-3",
    ranks=1,
    full=(),
    quick=(
        "--layers",
        "2",
        "--hidden",
        "128",
        "--vocabulary",
        "2048",
        "--sequence",
        "64",
        "--rounds",
        "3",
        "--saves",
        "2",
        "--other-ranks",
        "1",
    ),
)

OURS, FSDP2, DEEPSPEED = "ours", "FSDP2 + CPUOffloadPolicy", "DeepSpeed ZeRO-3 offload"
PEERS = ("fsdp2", "deepspeed_zero3")
RANKS, WARM_UP = 2, 2
TRAINING, MEMORY, MEMORY_SAVING = "training", "peak memory, training", "peak memory, with a save"
CALL, LOST, DURABLE = "a save: the call", "a save: training lost", "a save: until on the disk"
LOAD = "load"
# Sides round differently, and differences grow with the steps: this is of losses of about 9.
COMPARED_STEPS, LOSSES_DIFFER = 8, 0.02


def sides(peers: Sequence[str]) -> tuple[dict[str, Side], list[NotRun]]:
    """This project and the peers that can run here; and the peers that cannot.

    Args:
        peers: Modules of `benchmarks.peers`.
    """
    here = Path(sys.executable)
    found: list[Side | NotRun] = [Side(OURS, here, "ours")]
    if "fsdp2" in peers:
        found.append(Side(FSDP2, here, "fsdp2"))
    if "deepspeed_zero3" in peers:
        found.append(_deepspeed())
    runnable = {side.name: side for side in found if isinstance(side, Side)}
    return runnable, [side for side in found if isinstance(side, NotRun)]


def _deepspeed() -> Side | NotRun:
    python = interpreter("deepspeed")
    if python is None:
        return not_made(DEEPSPEED, "deepspeed")
    return Side(
        DEEPSPEED,
        python,
        "deepspeed_zero3",
        variables=(("DS_ACCELERATOR", "cpu"),),
        converted=Conversion("deepspeed.checkpoint.ds_to_universal", "deepspeed_universal"),
    )


class Comparison:
    """All sides through all phases."""

    def __init__(
        self, arguments: argparse.Namespace, sides: Mapping[str, Side], folder: Path
    ) -> None:
        """
        Args:
            folder: The directory of all files, on the disk that is saved to.
        """
        self._arguments = arguments
        self._sides = sides
        self._training = Training(shape_of(arguments))
        self.found: dict[str, Rounds] = {}
        self.not_run: list[NotRun] = []
        self.about: dict[str, Any] = {}
        self.loadings: dict[str, Loading] = {}
        self._folders = {name: folder / side.module for name, side in sides.items()}
        for each in self._folders.values():
            (each / "checkpoints").mkdir(parents=True)

    def run(self) -> None:
        """Rounds first, with all jobs alive; then, side after side, new processes that load."""
        roots = {name: folder / "checkpoints" for name, folder in self._folders.items()}
        arguments = self._arguments
        with ExitStack() as stack:
            jobs = self._built(stack)
            for name, job in jobs.items():
                self.about[name] = {**job.ask("about")[0], **self._initial(name, job)}
            steps = arguments.steps
            rounds.train(jobs, self.found, warm_up=WARM_UP, rounds=arguments.rounds, steps=steps)
            check_losses({name: found.losses for name, found in self.found.items()})
            rounds.save(jobs, self.found, roots, rounds=arguments.saves, steps=steps)
            for name, job in jobs.items():
                job.ask("write_state", path=str(self._folders[name] / "went_on.pt"))

        for name in self.found:
            self.loadings[name] = self._load(name, self._sides[name])

    def _built(self, stack: ExitStack) -> dict[str, Job]:
        """The jobs of all sides. A peer whose job cannot be built is not run."""
        started = {name: stack.enter_context(self._job(side)) for name, side in self._sides.items()}
        jobs = {}
        for name, job in started.items():
            try:
                job.wait_built()
            except JobError as error:
                if name == OURS:
                    raise
                self.not_run.append(NotRun(name, str(error).partition("\n")[0]))
            else:
                jobs[name], self.found[name] = job, Rounds()
        return jobs

    def _job(self, side: Side) -> Job:
        log = self._folders[side.name] / "job.log"
        return Job(side, RANKS, self._training.to_plain(), log)

    def _initial(self, name: str, job: Job) -> dict[str, Any]:
        """How far its main weights are from the first side's, before any step."""
        path, first = (
            self._folders[each] / "initial.pt" for each in (name, next(iter(self.found)))
        )
        job.ask("write_state", path=str(path), with_moments=False)
        return {"initial_weights_differ_by": differences(first, path).weights}

    def _load(self, name: str, side: Side) -> Loading:
        folder, found = self._folders[name], self.found[name]
        saved = Saved(
            folder / "checkpoints", found.last_saved, found.losses_after_save, folder / "went_on.pt"
        )
        loader = Loader(side, saved, self._training, folder)
        return loader.run(RANKS, self._arguments.other_ranks)


def check_losses(losses: Mapping[str, Sequence[float]]) -> None:
    """RuntimeError if two sides are not the same training."""
    for step, values in enumerate(zip(*losses.values(), strict=True)):
        if step < COMPARED_STEPS and max(values) - min(values) > LOSSES_DIFFER:
            found = ", ".join(
                f"{name} {value:.4f}" for name, value in zip(losses, values, strict=True)
            )
            raise RuntimeError(
                f"Expected losses that differ by at most {LOSSES_DIFFER} in the first "
                f"{COMPARED_STEPS} steps, got in step {step}: {found}."
            )


def shape_of(arguments: argparse.Namespace) -> Shape:
    """The model's and the batch's."""
    return Shape(
        arguments.layers,
        arguments.hidden,
        arguments.vocabulary,
        arguments.micro_batch,
        arguments.sequence,
    )


def measurements(comparison: Comparison, arguments: argparse.Namespace) -> Iterator[Measurement]:
    """Of all sides, group by group."""
    shape = shape_of(arguments)
    tokens = arguments.steps * RANKS * shape.micro_batch * shape.sequence
    for name, found in comparison.found.items():
        rates = tuple(tokens / seconds for seconds in found.seconds)
        yield Measurement(TRAINING, name, "tokens/s", rates)

        yield Measurement(MEMORY, name, "MiB", (found.peak_bytes / 2**20,))
        yield Measurement(MEMORY_SAVING, name, "MiB", (found.peak_bytes_saving / 2**20,))

        yield Measurement(CALL, name, "s", tuple(found.saves["called"]))
        yield Measurement(LOST, name, "s", tuple(found.saves["lost"]))
        yield Measurement(DURABLE, name, "s", tuple(found.saves["durable"]))
        yield Measurement(LOAD, name, "s", (comparison.loadings[name].seconds,))


def result_of(
    comparison: Comparison, not_run: Sequence[NotRun], arguments: argparse.Namespace
) -> Result:
    """All that was found."""
    found = tuple(measurements(comparison, arguments))
    medians = {(one.group, one.side): one.median for one in found}
    others = [name for name in comparison.found if name != OURS]
    # The bars: not slower, not larger, and not later to resume than any other project.
    compared = [(TRAINING, "tokens/s"), (MEMORY, "peak memory"), (LOAD, "load")]
    ratios = tuple(
        Ratio(
            f"{what}, ours over {name}",
            medians[group, OURS] / medians[group, name],
            at_least=1.0 if group == TRAINING else None,
            at_most=None if group == TRAINING else 1.0,
        )
        for group, what in compared
        for name in others
    )
    facts = {
        "parameters": sum(p.numel() for p in build_gpt(shape_of(arguments), 0).parameters()),
        "sides": {
            name: {
                **comparison.about[name],
                "checkpoint_bytes": rounds_of.checkpoint_bytes,
                "resume": comparison.loadings[name].facts,
                "losses": [round(loss, 5) for loss in rounds_of.losses],
            }
            for name, rounds_of in comparison.found.items()
        },
    }
    settings = {
        **report.settings_of(arguments),
        "ranks": RANKS,
        "warm_up": WARM_UP,
        "training": asdict(Training(shape_of(arguments))),
        "losses_compared": {"steps": COMPARED_STEPS, "differ_at_most": LOSSES_DIFFER},
    }
    return Result(found, ratios, tuple(not_run), settings, facts)


def main(argv: Sequence[str] | None = None) -> None:
    """Compares."""
    parser = report.parser_of(__doc__)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=16384)
    parser.add_argument("--micro-batch", type=int, default=1)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=10, help="of training that are counted")
    parser.add_argument("--steps", type=int, default=4, help="in a round")
    parser.add_argument("--saves", type=int, default=5, help="that are counted")
    parser.add_argument("--other-ranks", type=int, nargs="+", default=[1, 3])
    parser.add_argument("--disk", default="runs", help="a directory on it")
    parser.add_argument("--peers", nargs="*", default=PEERS, choices=PEERS)
    arguments = parser.parse_args(argv)
    Path(arguments.disk).mkdir(parents=True, exist_ok=True)
    running, missing = sides(arguments.peers)
    not_run = [*missing, *peers_that_cannot_run()]
    with tempfile.TemporaryDirectory(prefix="end-to-end-", dir=arguments.disk) as folder:
        comparison = Comparison(arguments, running, Path(folder).resolve())
        comparison.run()
    not_run += comparison.not_run
    report.hand_over(result_of(comparison, not_run, arguments), arguments.output)


if __name__ == "__main__":
    main()
