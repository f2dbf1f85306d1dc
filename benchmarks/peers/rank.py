"""One rank of a side: builds its trainer, then executes commands until "stop".

Started by `jobs.py`. Does not import this project's package, so that it runs in any peer's
environment; only a side's module imports the side's packages.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.peers import memory
from benchmarks.peers.gpt import batch_of
from benchmarks.peers.protocol import Channel, ClosedError
from benchmarks.peers.trainer import Trainer, Training


class Rank:
    """What can be asked of a rank: the methods without an underscore, whose results are sent."""

    def __init__(self, trainer: Trainer, training: Training) -> None:
        self._trainer = trainer
        self._training = training
        self._step = 0

    def about(self) -> dict[str, Any]:
        """Settings and versions, reported once."""
        return {"settings": dict(self._trainer.settings), "torch": torch.__version__}

    def train(self, steps: int) -> dict[str, Any]:
        """Seconds of so many steps, until they are complete; and their losses."""
        batches = self._batches(steps)
        dist.barrier()
        start = time.perf_counter()
        losses = self._steps(batches)
        return {"seconds": time.perf_counter() - start, "losses": self._means(losses)}

    def save(self, root: str, steps: int) -> dict[str, Any]:
        """Saves, and takes so many steps meanwhile.

        Seconds from the beginning: until the call has returned, until the steps are done, and until
        the checkpoint is on the disk.
        """
        batches, saved_after = self._batches(steps), self._step
        dist.barrier()
        start = time.perf_counter()
        self._trainer.begin_save(Path(root), saved_after)
        called = time.perf_counter() - start
        losses = self._steps(batches)
        stepped = time.perf_counter() - start

        self._trainer.finish_save()
        dist.barrier()
        if dist.get_rank() == 0:
            _flush(Path(root))
        durable = time.perf_counter() - start
        return {
            "step": saved_after,
            "called": called,
            "stepped": stepped,
            "durable": durable,
            "losses": self._means(losses),
        }

    def load(self, root: str, step: int) -> dict[str, Any]:
        """Loads, and returns the seconds that it took. Training continues after that step."""
        dist.barrier()
        start = time.perf_counter()
        self._trainer.load(Path(root), step)
        self._step = step
        return {"seconds": time.perf_counter() - start}

    def write_state(self, path: str, with_moments: bool = True) -> dict[str, Any]:
        """Writes the whole state to a file, for a comparison."""
        state = self._trainer.whole_state(with_moments=with_moments)
        if dist.get_rank() == 0:
            torch.save(state, path)
        return {}

    def reset_peak(self) -> dict[str, Any]:
        memory.reset_peak()
        return {}

    def peak(self) -> dict[str, Any]:
        return {"bytes": memory.peak_bytes()}

    def _batches(self, number: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Of the next steps."""
        shape, seed = self._training.shape, self._training.seed
        steps = range(self._step, self._step + number)
        return [batch_of(shape, step, dist.get_rank(), seed) for step in steps]

    def _steps(self, batches: list[tuple[torch.Tensor, torch.Tensor]]) -> list[torch.Tensor]:
        losses = [self._trainer.step(tokens, labels) for tokens, labels in batches]
        self._step += len(batches)
        self._trainer.finish_steps()
        return losses

    def _means(self, losses: list[torch.Tensor]) -> list[float]:
        """Over ranks."""
        if not losses:
            return []
        means = torch.stack([loss.detach().to("cpu", torch.float64) for loss in losses])
        dist.all_reduce(means)
        return (means / dist.get_world_size()).tolist()


def serve(rank: Rank, channel: Channel) -> None:
    """Executes commands until "stop", or until the other end is closed."""
    while True:
        try:
            message = channel.receive()
        except ClosedError:
            return
        command = message.pop("command")
        if command == "stop":
            return
        answer = getattr(rank, command)(**message)
        channel.send({"answer": answer})


def _flush(root: Path) -> None:
    """Flushes these files to the disk."""
    for path in sorted(path for path in root.rglob("*") if path.is_file()):
        descriptor = os.open(path, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def main() -> None:
    """Replies {"answer": ...} or {"error": ...} to each command, and once when it is built."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--side", required=True, help="the module of this package")
    parser.add_argument("--training", required=True, help="JSON")
    parser.add_argument("--store", required=True, help="where the ranks find each other, a file")
    parser.add_argument("--channel", type=int, nargs=2, required=True, help="file descriptors")
    arguments = parser.parse_args()
    channel = Channel(*arguments.channel)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{arguments.store}",
            rank=int(os.environ["RANK"]),
            world_size=int(os.environ["WORLD_SIZE"]),
        )
        training = Training.from_plain(json.loads(arguments.training))
        side = importlib.import_module(f"benchmarks.peers.{arguments.side}")
        trainer: Trainer = side.build(training)
        channel.send({"answer": {}})
        serve(Rank(trainer, training), channel)
        trainer.close()
    except BaseException as error:
        try:
            traceback.print_exc()
            channel.send({"error": "".join(traceback.format_exception_only(error)).strip()})
        finally:
            # Without the interpreter's shutdown, where threads may wait for the other ranks; the
            # parent process ends all ranks.
            os._exit(1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
