"""One rank's saves and loads: this project's, DCP's, and the raw bytes."""

from __future__ import annotations

import argparse
import gc
import os
import shutil
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from benchmarks.helpers import report
from benchmarks.helpers.checkpoint.known_values import check, clear
from benchmarks.helpers.checkpoint.state import State
from benchmarks.helpers.checkpoint.system import BytesRead, evict, growth, resident_share
from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, check_data, load_entries
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.entries import Contents

Figures = dict[str, float]
Variant = tuple[str, str]  # (operation, side)


class Bench:
    """One rank's side of one process group."""

    def __init__(
        self, arguments: argparse.Namespace, folders: dict[str, Path], rank: int, world_size: int
    ) -> None:
        self.device = Device("cpu")
        self.rank, self.world_size = rank, world_size
        self.folders = folders
        self.state = State(arguments, self.device, rank, world_size)
        self.managers = {
            where: CheckpointManager.start(str(self._ours(where)), self.device, rank, world_size)
            for where in folders
        }
        self.buffers = BufferPool(self.device).lend()
        for buffer in self.buffers:
            buffer[:] = os.urandom(len(buffer))
        self.iteration = world_size  # of the checkpoint that is kept, see `keep`
        self._reserve = folders["tmpfs"] / f"reserve_{rank}"

    def run(
        self, variants: Mapping[Variant, Callable[[], Figures]], num_rounds: int
    ) -> dict[Variant, list[Figures]]:
        """The figures of each variant in each round."""
        works = {key: partial(self._run_one, variant) for key, variant in variants.items()}
        return report.interleaved(works, num_rounds)

    def _run_one(self, variant: Callable[[], Figures]) -> Figures:
        """Runs a variant with memory at hand: a copy of the state, and as much page cache."""
        gc.collect()
        self._reserve.unlink(missing_ok=True)
        try:
            return self._slowest(variant())
        finally:
            with self._reserve.open("xb", buffering=0) as file:
                for _ in range(0, 2 * self.state.file_nbytes, len(self.buffers[0])):
                    file.write(self.buffers[0])

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()

    # Saving

    def write_raw(self, where: str) -> Figures:
        path = self.folders[where] / f"raw_{self.rank}"

        def work() -> None:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
            descriptor = os.open(path, flags | (os.O_DIRECT if where == "disk" else 0))
            for number, position in enumerate(
                range(0, self.state.file_nbytes, len(self.buffers[0]))
            ):
                nbytes = min(len(self.buffers[0]), self.state.file_nbytes - position) // 4096 * 4096
                os.write(descriptor, self.buffers[number % len(self.buffers)][:nbytes])
            os.fsync(descriptor)
            os.close(descriptor)

        seconds = self._time(work)
        dist.barrier()
        path.unlink()
        return {"seconds": seconds}

    def save_ours(self, where: str) -> Figures:
        self.iteration += 1

        def work() -> None:
            self._begin_ours(where)
            self.managers[where].finish()

        seconds = self._time(work)
        self._remove(self._ours(where) / checkpoint_name(self.iteration))
        return {"seconds": seconds}

    def save_dcp(self, where: str) -> Figures:
        folder = self.folders[where] / "dcp"
        seconds = self._time(lambda: dcp.save(self.state.even, checkpoint_id=folder))
        self._remove(folder)
        return {"seconds": seconds}

    def save_ours_async(self) -> Figures:
        self.iteration += 1
        with growth() as grown:
            blocked = self._time(lambda: self._begin_ours("disk"))
            total = blocked + report.seconds(self.managers["disk"].finish)
        self._remove(self._ours("disk") / checkpoint_name(self.iteration))
        return {"seconds": total, "blocked_seconds": blocked, "growth_bytes": grown[0]}

    def save_dcp_async(self) -> Figures:
        folder = self.folders["disk"] / "dcp"
        futures = []
        with growth() as grown:
            blocked = self._time(
                lambda: futures.append(dcp.async_save(self.state.even, checkpoint_id=folder))
            )
            total = blocked + report.seconds(futures[0].result)
        self._remove(folder)
        return {"seconds": total, "blocked_seconds": blocked, "growth_bytes": grown[0]}

    def keep(self) -> None:
        """Saves the checkpoints for later loads: on disk, as iteration `world_size`, and by DCP as
        `dcp_<world_size>`.
        """
        self.iteration = self.world_size
        self._begin_ours("disk")
        self.managers["disk"].finish()
        dcp.save(self.state.even, checkpoint_id=self.kept("dcp", self.world_size))

    def kept(self, who: str, num_ranks: int) -> Path:
        """The directory in which `num_ranks` ranks have kept their state."""
        return (
            self._ours("disk") / checkpoint_name(num_ranks)
            if who == "ours"
            else self.folders["disk"] / f"dcp_{num_ranks}"
        )

    # Loading

    def load(
        self,
        who: str,
        num_ranks: int,
        *,
        is_cold: bool = False,
        verify: bool = True,
        checks: bool = False,
    ) -> Figures:
        """Loads what `num_ranks` ranks have kept."""
        folder = self.kept("dcp" if who == "dcp" else "ours", num_ranks)
        works: dict[str, Callable[[], object]] = {
            "ours": partial(self._load_ours, num_ranks, self.state.contents(), verify, checks),
            "dcp": partial(dcp.load, self.state.even, checkpoint_id=folder),
            "raw": partial(self._read_raw, folder),
        }
        if self.rank == 0:
            evict(folder) if is_cold else self._read_all(folder)
        dist.barrier()
        resident = resident_share(folder)
        before = BytesRead.now()
        seconds = self._time(works[who])
        after = BytesRead.now()
        own = folder / f"__{self.rank}_0.distcp"
        return {
            "seconds": seconds,
            "bytes_read": after.files - before.files,
            "disk_bytes_read": after.disk - before.disk,
            # Of small files all ranks read the same; they are counted once.
            "bytes_there": sum(
                path.stat().st_size
                for path in folder.iterdir()
                if path == own or (self.rank == 0 and path.suffix != own.suffix)
            ),
            "resident_share": resident,
        }

    def check_loads(self, num_ranks: int) -> None:
        """Warms up. RuntimeError if a load does not restore the saved values."""
        for who, parts in {"ours": self.state.parts, "dcp": self.state.even_parts}.items():
            clear(parts)
            self.load(who, num_ranks)
            check(parts)

    def _load_ours(self, num_ranks: int, contents: Contents, verify: bool, checks: bool) -> None:
        store = self.managers["disk"].store
        checkpoint = PublishedCheckpoint.open(store, checkpoint_name(num_ranks), verify=verify)
        wanted = check_contents(checkpoint, contents)
        if checks:
            check_data(checkpoint, wanted)
        load_entries(checkpoint, contents, wanted)

    def _read_raw(self, folder: Path) -> None:
        with (folder / f"__{self.rank}_0.distcp").open("rb", buffering=0) as file:
            while file.readinto(self.buffers[0]):
                pass

    def _read_all(self, folder: Path) -> None:
        for path in folder.iterdir():
            with path.open("rb", buffering=0) as file:
                while file.readinto(self.buffers[0]):
                    pass

    # Both

    def _ours(self, where: str) -> Path:
        return self.folders[where] / "ours"

    def _begin_ours(self, where: str) -> None:
        self.managers[where].save(
            self.iteration, self.state.contents(), {"iteration": self.iteration}
        )

    def _time(self, work: Callable[[], object]) -> float:
        dist.barrier()
        return report.seconds(work)

    def _remove(self, folder: Path) -> None:
        dist.barrier()
        if self.rank == 0:
            shutil.rmtree(folder)
            os.sync()
        dist.barrier()

    def _slowest(self, figures: Figures) -> Figures:
        """The largest of each figure on all ranks; but the sum of bytes of files."""
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, figures)
        return {
            name: (sum if "bytes" in name and name != "growth_bytes" else max)(
                figures[name] for figures in gathered
            )
            for name in figures
        }
