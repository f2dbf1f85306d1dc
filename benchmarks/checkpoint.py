#!/usr/bin/env python3
"""Saving and loading beside PyTorch DCP: the same names, shapes and values, on the same disk, in
one run.

    OMP_NUM_THREADS=1 python benchmarks/checkpoint.py --write

A GPT of about 200M parameters on 2 ranks, fp32 main weights and moments in host memory (2.4 GB),
ZeRO-3. DCP gets as many bytes as DTensors that are sharded evenly, as FSDP2 does it. Digests are
written and verified throughout.

    raw                 the same number of bytes from three buffers of 8 MiB: O_DIRECT where the
                        file system has it, one write after the other, fsync; or read through one
    ours, dcp           a save from the call until it is published, on disk and on tmpfs
    ours, dcp async     how long the call blocks, and the most that resident memory grows by until
                        the save is done
    load                into the state where it lies; warm: all files are in the page cache; cold:
                        none is
    ours                a load at the start of a run: each byte is read once, and verified as it is
                        put into place
    ours, two passes    a load into a live engine: everything is read and verified, then read again
                        and put into place
    2 -> 4, 4 -> 4      loads on 4 ranks of what 2 and 4 have saved, warm: seconds and bytes read

Each number is the slowest rank's; variants run in an order drawn anew each round, and medians are
printed with the smallest and the largest. Before the first round each runs once, untimed, and that
loads bring back every value is checked. Between two variants their memory is kept busy: in a
virtual machine the host may take what is free, and touching it again is slow, which would be
charged to whoever comes first.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import itertools
import math
import mmap
import os
import queue
import shutil
import statistics
import sys
import tempfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing as mp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from benchmarks.helpers import report
from benchmarks.helpers.models import swiglu_config
from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, check_data, load_entries
from megatron.core.dist_checkpointing.plan.file_plan import plan_index
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import (
    build_optimizer,
    offloaded_modules,
    plan_offload,
)

OFFLOADED = OptimizerConfig(
    optimizer_cpu_offload=True,
    overlap_cpu_optimizer_d2h_h2d=True,
    overlap_optimizer_with_forward=True,
)
PIECE = 1 << 20  # elements that are made or checked at a time
Figures = dict[str, float]


class Part(NamedTuple):
    """A rank's rows of a tensor."""

    key: str
    begin: int  # elements before it in the whole tensor
    values: torch.Tensor  # fp32


def pattern(part: Part, start: int, stop: int) -> torch.Tensor:
    """What belongs at these elements of a part: positive numbers about 0.01, as bits."""
    places = torch.arange(part.begin + start, part.begin + stop, dtype=torch.int32)
    return (
        places.mul_(-1640531527)
        .add_(zlib.crc32(part.key.encode()) & 0xFFFFFF)
        .bitwise_and_(0x7FFFFF)
        .add_(0x3C000000)
    )


def pieces(part: Part) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The memory of a part as bits, and what belongs there."""
    bits = part.values.detach().view(torch.int32).view(-1)
    for start in range(0, bits.numel(), PIECE):
        stop = min(start + PIECE, bits.numel())
        yield bits[start:stop], pattern(part, start, stop)


class State:
    """The model with its optimizer; and the same values in DTensors for DCP."""

    def __init__(
        self, arguments: argparse.Namespace, device: Device, rank: int, world_size: int
    ) -> None:
        self.rank, self.world_size = rank, world_size
        config = swiglu_config(arguments.layers, arguments.hidden)
        with torch.device("meta"):
            self.model = GPTModel(config, arguments.vocabulary)
        self.num_parameters = sum(parameter.numel() for parameter in self.model.parameters())
        mesh = build_mesh(device.kind, world_size)
        plan = plan_offload(self.model, OFFLOADED)
        megatron_fsdp.shard_model(
            self.model,
            mesh,
            device,
            DataParallelConfig(),
            compute_dtype=torch.bfloat16,
            reset_parameters=seeded_reset(self.model, device.torch_device, 0),
            offloaded=offloaded_modules(self.model, plan),
        )
        self.optimizer = build_optimizer(
            self.model, OFFLOADED, 1e-4, world_size, plan=plan
        ).optimizer
        contents = self.contents()
        self.parts = []
        for entry in contents.entries:
            if entry.saved_as.shape:
                row = int(np.prod(entry.saved_as.shape[1:]))
                self.parts.append(
                    Part(entry.key, entry.offsets[0] * row, entry.part_of(entry.values.target()))
                )
        self.even_parts: list[Part] = []
        self.even = self._even(contents, mesh)
        index = plan_index("", [entry.saved_as for entry in contents.entries], {}, rank)
        self.file_nbytes = max(
            chunk.offset + tensor.chunk_nbytes(chunk)
            for tensor in index.tensors.values()
            for chunk in tensor.chunks
        )
        for part in (*self.parts, *self.even_parts):
            for bits, wanted in pieces(part):
                bits.copy_(wanted)

    def contents(self) -> Contents:
        return collect(self.model, self.optimizer, rank=self.rank, world_size=self.world_size)

    def _even(self, contents: Contents, mesh: DeviceMesh) -> dict[str, torch.Tensor]:
        state: dict[str, torch.Tensor] = {}
        for entry in contents.entries:
            shape = torch.Size(entry.saved_as.shape)
            if not shape:
                state[entry.key] = entry.values.read().clone()
                continue
            sizes, offsets = compute_local_shape_and_global_offset(shape, mesh, [Shard(0)])
            local = torch.empty(sizes)
            strides = torch.empty(shape, device="meta").stride()
            state[entry.key] = DTensor.from_local(
                local, mesh, [Shard(0)], run_check=False, shape=shape, stride=strides
            )
            self.even_parts.append(Part(entry.key, offsets[0] * strides[0], local))
        return state


def clear(parts: list[Part]) -> None:
    for part in parts:
        part.values.detach().zero_()


def check(parts: list[Part]) -> None:
    """Raises RuntimeError if a value is not what it was."""
    for part in parts:
        for bits, wanted in pieces(part):
            if not torch.equal(bits, wanted):
                raise RuntimeError(
                    f"Expected the values that were saved in {part.key}, got others."
                )


# What the system says.


def of_status(name: str) -> int:
    """Bytes, from /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


class BytesRead(NamedTuple):
    """By this process so far."""

    files: int  # whether or not they were in the page cache
    disk: int  # by the block device

    @classmethod
    def now(cls) -> BytesRead:
        lines = Path("/proc/self/io").read_text().splitlines()
        found = {name: int(value) for name, value in (line.split(": ") for line in lines)}
        return cls(found["rchar"], found["read_bytes"])


def resident_share(folder: Path) -> float:
    """How much of the files in a folder is in the page cache."""
    resident = total = 0
    libc = ctypes.CDLL(None, use_errno=True)
    for path in filter(lambda path: path.stat().st_size, folder.iterdir()):
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as mapped:
            num_pages = -(-len(mapped) // mmap.PAGESIZE)
            found = np.zeros(num_pages, np.uint8)
            view = np.frombuffer(mapped, np.uint8)
            status = libc.mincore(
                ctypes.c_void_p(view.ctypes.data),
                ctypes.c_size_t(len(mapped)),
                ctypes.c_void_p(found.ctypes.data),
            )
            del view
            if status:
                raise OSError(ctypes.get_errno(), "mincore")
            resident += int((found & 1).sum())
            total += num_pages
    return resident / total


def evict(folder: Path) -> None:
    """Takes the files of a folder out of the page cache."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


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
        self.iteration = world_size  # of what is kept, see `keep`
        self._reserve = folders["tmpfs"] / f"reserve_{rank}"

    def run(
        self, variants: dict[str, Callable[[], Figures]], num_rounds: int
    ) -> dict[str, list[Figures]]:
        """What each variant has measured in each round."""
        figures: dict[str, list[Figures]] = {name: [] for name in variants}
        for number, name in enumerate(report.schedule(list(variants), num_rounds)):
            figures[name].append(self._slowest(self._run_one(variants[name])))
            if self.rank == 0 and not (number + 1) % len(variants):
                print(
                    f"{self.world_size} ranks: round {(number + 1) // len(variants)} of "
                    f"{num_rounds}",
                    file=sys.stderr,
                )
        return figures

    def _run_one(self, variant: Callable[[], Figures]) -> Figures:
        """Runs a variant with memory at hand: a copy of the state, and as much page cache."""
        gc.collect()
        self._reserve.unlink(missing_ok=True)
        try:
            return variant()
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
        """Saves what is loaded later: on disk, as iteration `world_size`, and by DCP as
        `dcp_<world_size>`.
        """
        self.iteration = self.world_size
        self._begin_ours("disk")
        self.managers["disk"].finish()
        dcp.save(self.state.even, checkpoint_id=self.kept("dcp", self.world_size))

    def kept(self, who: str, num_ranks: int) -> Path:
        """The folder in which so many ranks have kept their state."""
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
        """Warms up. RuntimeError if a load does not bring back what was saved."""
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


@contextlib.contextmanager
def growth() -> Iterator[list[int]]:
    """How many bytes more than at the beginning were resident at most; a list that has it in the
    end.
    """
    found: list[int] = []
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before = of_status("VmRSS")
    yield found
    found.append(of_status("VmHWM") - before)


def measure_two(bench: Bench, num_rounds: int) -> dict[str, list[Figures]]:
    """Saves, asynchronous saves and loads on the ranks that have saved."""
    own = bench.world_size
    variants: dict[str, Callable[[], Figures]] = {
        "async save, ours": bench.save_ours_async,
        "async save, dcp": bench.save_dcp_async,
    }
    for where in bench.folders:
        variants[f"save to {where}, raw"] = partial(bench.write_raw, where)
        variants[f"save to {where}, ours"] = partial(bench.save_ours, where)
        variants[f"save to {where}, dcp"] = partial(bench.save_dcp, where)
    for kind in ("warm", "cold"):
        for who in ("raw", "ours", "dcp"):
            variants[f"{kind} load, {who}"] = partial(bench.load, who, own, is_cold=kind == "cold")
        unverified = partial(bench.load, "ours", own, is_cold=kind == "cold", verify=False)
        variants[f"{kind} load, ours without digests"] = unverified
        two_passes = partial(bench.load, "ours", own, is_cold=kind == "cold", checks=True)
        variants[f"{kind} load, ours, two passes"] = two_passes
    bench.keep()
    bench.check_loads(own)
    bench.iteration = own + 1000  # what is saved from here on is thrown away
    bench.run({name: variant for name, variant in variants.items() if "save" in name}, 1)
    return bench.run(variants, num_rounds)


def measure_four(bench: Bench, num_rounds: int) -> dict[str, list[Figures]]:
    """Loads of what fewer ranks, and what as many have saved."""
    bench.keep()
    variants: dict[str, Callable[[], Figures]] = {}
    for num_ranks in (bench.world_size // 2, bench.world_size):
        bench.check_loads(num_ranks)
        for who in ("ours", "dcp"):
            variants[f"load {num_ranks} -> {bench.world_size}, {who}"] = partial(
                bench.load, who, num_ranks
            )
    return bench.run(variants, num_rounds)


def serve(
    rank: int,
    world_size: int,
    arguments: argparse.Namespace,
    folders: dict[str, Path],
    results: Any,
    store: str,
) -> None:
    """A rank's life."""
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    os.environ["LOCAL_WORLD_SIZE"] = str(world_size)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, world_size), rank=rank, world_size=world_size
    )
    bench = Bench(arguments, folders, rank, world_size)
    figures = (measure_two if world_size == 2 else measure_four)(bench, arguments.rounds)
    if rank == 0:
        results.put((figures, bench.state.num_parameters))
    bench.close()
    dist.destroy_process_group()


def measure(
    world_size: int, arguments: argparse.Namespace, folders: dict[str, Path]
) -> tuple[Any, int]:
    """(figures, number of parameters) from ranks of their own."""
    results = mp.get_context("spawn").Queue()
    with tempfile.TemporaryDirectory() as folder:
        context = mp.spawn(
            serve,
            (world_size, arguments, folders, results, f"{folder}/store"),
            nprocs=world_size,
            join=False,
        )
        while True:
            with contextlib.suppress(queue.Empty):
                found = results.get(timeout=1)
                break
            context.join(timeout=0)  # raises what a rank has raised
        while not context.join():
            pass
    figures, num_parameters = found
    return figures, num_parameters


def summary(figures: dict[str, list[Figures]]) -> dict[str, Figures]:
    """Medians, and the range of the seconds."""
    found = {}
    for name, rounds in figures.items():
        found[name] = {key: statistics.median(each[key] for each in rounds) for key in rounds[0]}
        for extreme, of in (("fastest", min), ("slowest", max)):
            found[name][f"{extreme}_seconds"] = of(each["seconds"] for each in rounds)
    return found


class Bar(NamedTuple):
    """A ratio, and what it must be, if there is a limit."""

    name: str
    value: float
    least: float = -math.inf
    most: float = math.inf

    def __str__(self) -> str:
        limits = [f">= {self.least:g}"] * (self.least > -math.inf) + [f"<= {self.most:g}"] * (
            self.most < math.inf
        )
        missed = [] if self.least <= self.value <= self.most else ["MISSED"]
        return "  ".join([f"{self.name:>44} {self.value:8.3f}", *limits, *missed])


def bars(medians: dict[str, Figures]) -> list[Bar]:
    def ratio(one: str, other: str, figure: str = "seconds") -> float:
        return medians[one][figure] / medians[other][figure]

    found = [
        Bar(
            "save to disk, raw over ours",
            ratio("save to disk, raw", "save to disk, ours"),
            least=0.9,
        ),
        Bar("save to disk, dcp over ours", ratio("save to disk, dcp", "save to disk, ours")),
        Bar(
            "save to tmpfs, dcp over ours",
            ratio("save to tmpfs, dcp", "save to tmpfs, ours"),
            least=1.4,
        ),
        Bar(
            "async save, blocked, ours over dcp",
            ratio("async save, ours", "async save, dcp", "blocked_seconds"),
            most=0.05,
        ),
        Bar(
            "async save, growth of ours in MB",
            medians["async save, ours"]["growth_bytes"] / 1e6,
            most=64,
        ),
        Bar("warm load, dcp over ours", ratio("warm load, dcp", "warm load, ours"), least=2.0),
        Bar("warm load, raw over ours", ratio("warm load, raw", "warm load, ours")),
        Bar("cold load, dcp over ours", ratio("cold load, dcp", "cold load, ours"), least=1.3),
        Bar("cold load, raw over ours", ratio("cold load, raw", "cold load, ours"), least=0.9),
    ]
    for kind, who in itertools.product(("warm", "cold"), ("dcp", "raw")):
        two_passes = ratio(f"{kind} load, {who}", f"{kind} load, ours, two passes")
        found.append(Bar(f"{kind} load, {who} over ours, two passes", two_passes))
    cold = medians["cold load, ours"]
    share = cold["disk_bytes_read"] / cold["bytes_there"]
    found.append(Bar("cold load, ours, from the disk over in files", share, most=1.01))
    for figure in ("seconds", "bytes_read"):
        name = f"load 2 -> 4 over 4 -> 4, ours, {figure}"
        found.append(Bar(name, ratio("load 2 -> 4, ours", "load 4 -> 4, ours", figure), most=1.2))
    return found


def show(medians: dict[str, Figures]) -> None:
    for name in sorted(medians):
        each = medians[name]
        extra = [
            f"{each['seconds']:8.3f} s ({each['fastest_seconds']:.3f} to "
            f"{each['slowest_seconds']:.3f})"
        ]
        if "blocked_seconds" in each:
            extra.append(
                f"blocks {each['blocked_seconds'] * 1e3:.1f} ms, grows by "
                f"{each['growth_bytes'] / 1e6:.0f} MB"
            )
        if "bytes_read" in each:
            extra.append(
                f"reads {each['bytes_read'] / 1e6:.0f} MB, of which {each['resident_share']:.0%} "
                f"were in memory, and {each['disk_bytes_read'] / 1e6:.0f} MB from the disk"
            )
        print(f"{name:>34} " + "  ".join(extra))


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=13)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--vocabulary", type=int, default=32768)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--disk", default="runs", help="a folder on the disk to measure")
    parser.add_argument("--tmpfs", default="/dev/shm", help="a folder on a tmpfs")
    parser.add_argument("--write", action="store_true")
    arguments = parser.parse_args()
    Path(arguments.disk).mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as stack:
        folders = {
            name: Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="benchmark-", dir=parent))
            )
            for name, parent in {"disk": arguments.disk, "tmpfs": arguments.tmpfs}.items()
        }
        figures, num_parameters = measure(2, arguments, folders)
        figures |= measure(4, arguments, folders)[0]
    medians = summary(figures)
    print(f"{num_parameters / 1e6:.1f}M parameters, {arguments.rounds} rounds")
    show(medians)
    for bar in bars(medians):
        print(bar)
    if arguments.write:
        content = {
            "settings": vars(arguments),
            "parameters": num_parameters,
            "medians": medians,
            "ratios": {bar.name: bar.value for bar in bars(medians)},
            "rounds": figures,
        }
        print(report.write("checkpoint", content))


if __name__ == "__main__":
    main()
