"""Checkpoints: saved beside training, compared with a snapshot, loaded, and resharded."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.save.data_sink import DataSink
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import LocalStore, open_store
from megatron.core.optimizer.config import OptimizerConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine
from megatron.training.step import Batch
from tools.gpu_check.accelerator import Accelerator, open_accelerator
from tools.gpu_check.findings import Findings
from tools.gpu_check.ranks import join, run_ranks
from tools.gpu_check.training import (
    CONFIGURATIONS,
    SIMULATED_SIZES,
    Configuration,
    Sizes,
    batches,
    build,
    forward_step,
)
from tools.gpu_check.two_ranks import shared_backend

_NUM_RANKS = 2
# Large enough for a save to last while a few steps are made.
_SIZES = Sizes(num_layers=4, hidden=768, heads=12, sequence=256, num_microbatches=2)
_FP8 = OptimizerConfig(exp_avg_dtype="fp8", exp_avg_sq_dtype="fp16")
CASES: dict[str, Configuration] = {
    **{
        name: CONFIGURATIONS[name]
        for name in ("zero3", "zero1", "offload_half", "offload_forward", "fp16_moments")
    },
    "fp8_moments": Configuration(_FP8),
}
# Values in a format with a scale are rounded anew when they are loaded into shards that have other
# scales.
_SCALED = ("fp16_moments", "fp8_moments")

# One case saves as `--async-save` does by default: its states come down into host memory at once,
# whatever the disk does. The others wait for the disk, buffer by buffer.
_STAGED = "zero3"
_STAGING_SHARE = 0.5
# On the simulated accelerator too, its states must be more than the 24 MiB of buffers that a save
# begins with.
_SIMULATED_STAGED_SIZES = SIMULATED_SIZES._replace(hidden=512, heads=4)
_HELD_SECONDS = 45.0  # at most, by a disk that does nothing


class HeldStore(LocalStore):
    """A disk that does nothing until it is let go.

    Attributes:
        let_go: to be set once the disk is to begin.
        was_let_go: whether that happened before the disk had waited for as long as it ever does;
            None: nothing came.
    """

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.let_go = threading.Event()
        self.was_let_go: bool | None = None

    def open_data(self, path: str) -> DataSink:
        # A save that needs the disk before the steps have ended must come to an end too, for its
        # failure to be told.
        self.was_let_go = self.let_go.wait(_HELD_SECONDS)
        return super().open_data(path)


class Part(NamedTuple):
    """What one rank has of a tensor."""

    key: str
    offsets: tuple[int, ...]
    values: torch.Tensor


def saves(findings: Findings) -> None:
    """Two ranks save and load; one rank then reads what they have saved."""
    backend = shared_backend(findings, open_accelerator(findings))
    root = str(findings.scratch / "checkpoints")
    ranks = run_ranks(findings, f"{__name__}:save_rank", _NUM_RANKS, backend=backend, root=root)
    findings.expect("exit statuses of the ranks that save", ranks.statuses, [0] * _NUM_RANKS)
    one = run_ranks(findings, f"{__name__}:reshard_rank", 1, root=root)
    findings.expect("exit status of the rank that reads what two have saved", one.statuses, [0])


def save_rank(findings: Findings, rank: int, num_ranks: int, backend: str, root: str) -> None:
    """One of two ranks, in each configuration."""
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank, num_ranks, backend)
    for name, configuration in CASES.items():
        sizes = _sizes(findings, name)
        engine = build(accelerator, configuration, sizes, num_ranks)
        source = batches(sizes, rank)
        for _ in range(2):
            engine.train_batch(next(source), forward_step)
        try:
            _save_beside_training(findings, accelerator, engine, source, name, root)
            _save_and_load(findings, accelerator, engine, source, name, root)
        except CheckpointError:
            # All ranks have it, so they can go on together.
            findings.error(f"{name}: {traceback.format_exc()}")
        engine.state.optimizer.synchronize()


def reshard_rank(findings: Findings, rank: int, num_ranks: int, root: str) -> None:
    """One rank that loads the checkpoints of two."""
    accelerator = open_accelerator(findings)
    join(findings, accelerator, rank, num_ranks)
    for name, configuration in CASES.items():
        engine = build(accelerator, configuration, _sizes(findings, name), num_ranks)
        try:
            engine.load(SaveLoadMeta(f"{root}/{name}.full", with_optim=True))
        except CheckpointError:
            findings.error(f"{name}: {traceback.format_exc()}")
            continue
        own = {part.key: part.values for part in _snapshot(accelerator, engine)}
        parts = [
            part
            for saved in range(_NUM_RANKS)
            for part in torch.load(_snapshot_file(root, name, saved))
        ]  # on the CPU
        differ = [
            part[0]
            for part in parts
            if part[0] in own and not _is_part_of(own[part[0]], Part(*part), name)
        ]
        missing = sorted({part[0] for part in parts} - own.keys())
        findings.expect(f"{name}: keys of two ranks that one rank lacks", missing, [])
        findings.expect(
            f"{name}: keys whose values are others on one rank", sorted(set(differ))[:8], []
        )
        findings.expect_at_least(f"{name}: parts compared", len(parts), 10)


def _save_beside_training(
    findings: Findings,
    accelerator: Accelerator,
    engine: ModuleEngine,
    source: Iterator[list[Batch]],
    name: str,
    root: str,
) -> None:
    """A save that goes on while the next steps are made holds the state of before them."""
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    expected = _snapshot(accelerator, engine)
    beside = f"{root}/{name}.beside"
    is_staged = name == _STAGED
    store = HeldStore(Path(beside))
    if not is_staged:
        store.let_go.set()
    manager = CheckpointManager.start(
        store,
        accelerator.device,
        rank,
        num_ranks,
        staging_share=_STAGING_SHARE if is_staged else 0.0,
    )

    start = time.perf_counter()
    manager.save(1, _contents(accelerator, engine), {})
    begun = time.perf_counter() - start
    for _ in range(2):
        engine.train_batch(next(source), forward_step)
    trained = time.perf_counter() - start
    store.let_go.set()
    manager.finish()
    findings.figure(
        f"{name}: save() returned, two steps made, published",
        [begun, trained, time.perf_counter() - start],
    )
    if is_staged:
        findings.expect(
            f"{name}: the steps beside the save were made before the disk began",
            store.was_let_go,
            True,
        )
        findings.expect_at_least(f"{name}: bytes staged in host memory", manager.staged_bytes, 1)
    else:
        findings.expect(f"{name}: bytes staged in host memory", manager.staged_bytes, 0)
    dist.barrier()

    checkpoint = PublishedCheckpoint.open(open_store(beside), "iter_0000001")
    wrong = [part.key for part in expected if not _is_saved(checkpoint, part)]
    findings.expect(f"{name}: tensors that were not saved as they were", wrong[:8], [])
    findings.expect_at_least(f"{name}: tensors compared", len(expected), 10)
    # The steps beside the save must have changed the state, or an aliasing save would look right
    # too.
    changed = sum(
        not torch.equal(now.values, then.values)
        for now, then in zip(_snapshot(accelerator, engine), expected, strict=True)
    )
    findings.expect_at_least(f"{name}: tensors that the steps beside the save changed", changed, 5)
    manager.close()


def _save_and_load(
    findings: Findings,
    accelerator: Accelerator,
    engine: ModuleEngine,
    source: Iterator[list[Batch]],
    name: str,
    root: str,
) -> None:
    """After loading, the next steps are those that were made after saving."""
    meta = SaveLoadMeta(f"{root}/{name}.full", with_optim=True)
    snapshot = _snapshot(accelerator, engine)
    engine.save(meta)
    torch.save([tuple(part) for part in snapshot], _snapshot_file(root, name, dist.get_rank()))
    following = [next(source) for _ in range(2)]
    reference = [engine.train_batch(batch, forward_step).loss.hex() for batch in following]
    engine.load(meta)
    loaded = _snapshot(accelerator, engine)
    wrong = [
        then.key
        for then, now in zip(snapshot, loaded, strict=True)
        if not torch.equal(_bits(then), _bits(now))
    ]
    findings.expect(f"{name}: tensors that did not come back", wrong[:8], [])
    again = [engine.train_batch(batch, forward_step).loss.hex() for batch in following]
    findings.expect(f"{name}: losses after loading", again, reference)


def _contents(accelerator: Accelerator, engine: ModuleEngine) -> Contents:
    return engine.state.contents(accelerator.device, with_optim=True, with_rng=False)


def _snapshot(accelerator: Accelerator, engine: ModuleEngine) -> list[Part]:
    """Copies of all that this rank would save, taken while nothing else goes on."""
    engine.state.optimizer.synchronize()
    accelerator.synchronize()
    parts = []
    for entry in _contents(accelerator, engine).entries:
        values = entry.part_of(entry.values.read()) if entry.is_own else torch.empty(0)
        if values.numel():
            parts.append(Part(entry.key, entry.offsets, values.detach().cpu().clone()))
    accelerator.synchronize()
    return parts


def _is_saved(checkpoint: PublishedCheckpoint, part: Part) -> bool:
    got = torch.empty_like(part.values)
    checkpoint.read(part.key, part.offsets, got)
    return torch.equal(_bits(part), _bits(part._replace(values=got)))


def _is_part_of(whole: torch.Tensor, part: Part, name: str) -> bool:
    for dimension, (offset, size) in enumerate(zip(part.offsets, part.values.shape, strict=True)):
        whole = whole.narrow(dimension, offset, size)
    if name in _SCALED and part.key.startswith("optimizer.state"):
        return torch.allclose(
            whole, part.values, rtol=0.1, atol=float(part.values.abs().max()) * 0.05
        )
    return torch.equal(_bits(part), _bits(part._replace(values=whole)))


def _bits(part: Part) -> torch.Tensor:
    return part.values.contiguous().reshape(-1).view(torch.uint8)


def _snapshot_file(root: str, name: str, rank: int) -> Path:
    return Path(f"{root}/{name}.{rank}.pt")


def _sizes(findings: Findings, name: str) -> Sizes:
    if findings.simulate:
        return _SIMULATED_STAGED_SIZES if name == _STAGED else SIMULATED_SIZES
    return _SIZES
