"""States that tests save and load, and ranks that save together in separate processes. Forks have
imported this module.
"""

from __future__ import annotations

import os
import select
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._dynamo  # what the first optimizer would import
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager, Retention
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import (
    LocalStore,
    Store,
    latest_iteration,
    open_store,
    published_iterations,
)
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport
from megatron.training.tokenizer import ByteTokenizer
from megatron_hybrid.checkpoint.audit import Audit
from tests.helpers.checkpoints import install_param_groups
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    Before,
    Child,
    Operation,
    watched,
)

CPU = Device("cpu")
ABANDONED, OLD, NEW, LATER = 5, 10, 20, 30  # iterations
DRAFT = f"{checkpoint_name(NEW)}.saving"  # as `Operation` shows it
_MOST_RANKS = 4
_UNSAVED = 255


class GatedStore(LocalStore):
    """A store whose disk is blocked until a gate is opened."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.gate = threading.Event()

    def make_folder(self, name: str) -> None:
        assert self.gate.wait(600)
        super().make_folder(name)


class Size(NamedTuple):
    """The size of a model, and the dtype of `hf/` in its checkpoints."""

    dim: int
    num_layers: int
    hf_dtype: torch.dtype | None = None


HF_FILES = ("model.safetensors", "tokenizer.json", "tokenizer_config.json")
WHOLE = Size(256, 3)  # 2.4 MB with its states
SMALL = Size(24, 2)


class Model(nn.Module):
    """Matrices, vectors, and a buffer."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(size.dim, size.dim) for _ in range(size.num_layers))
        self.register_buffer("seen", torch.zeros(size.dim, dtype=torch.int64))


class State:
    """A model and its optimizer with random values, different for every iteration and run."""

    def __init__(self, iteration: int | None, run: int = 0, size: Size = WHOLE) -> None:
        """
        Args:
            iteration: None for a state to load into, with values that no run saves.
        """
        self.iteration = iteration
        self.run = run
        self.size = size
        self.model = Model(size)
        self.optimizer = FusedAdam(
            self.model.parameters(), lr=0.0 if iteration is None else iteration + run / 10
        )
        self.optimizer.init_state()
        self.private = [torch.zeros(3, dtype=torch.uint8) for _ in range(_MOST_RANKS)]
        generator = torch.Generator().manual_seed(1000 * run + (iteration or 0))
        with torch.no_grad():
            for tensor in self.tensors().values():
                values = torch.rand(tensor.shape, generator=generator) * _UNSAVED
                tensor.copy_(torch.full_like(values, _UNSAVED) if iteration is None else values)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All of them, live."""
        found = {
            **self.model.state_dict(),
            **{f"rng {rank}": tensor for rank, tensor in enumerate(self.private)},
        }
        for name, parameter in self.model.named_parameters():
            found |= {
                f"{name} {key}": value for key, value in self.optimizer.state[parameter].items()
            }
        return found

    def contents(self, rank: int = 0, world_size: int = 1) -> Contents:
        """The contents of a rank's save."""
        private = {"rng.torch": self.private[rank]}
        contents = collect(
            self.model, self.optimizer, private=private, rank=rank, world_size=world_size
        )
        if self.size.hf_dtype is None:
            return contents
        extras = FolderExtras(ByteTokenizer())
        return replace(contents, export=HfExport.of(self.model, self.size.hf_dtype, extras))

    @property
    def train_state(self) -> dict[str, Any]:
        """The train state of the same run."""
        return {"iteration": self.iteration, "run": self.run}

    def different(self, other: State) -> list[str]:
        """The names of all values that differ in another state."""
        own, others = self.tensors(), other.tensors()
        assert own.keys() == others.keys()
        found = [name for name, value in others.items() if not torch.equal(own[name], value)]
        return found + ["lr"] * (
            self.optimizer.param_groups[0]["lr"] != other.optimizer.param_groups[0]["lr"]
        )


def save_by_two(root: Path, iteration: int, size: Size = WHOLE) -> None:
    """Publishes the checkpoint of two ranks, which are threads."""
    state = State(iteration, size=size)
    with ExitStack() as stack:
        ranks = [
            stack.enter_context(
                CheckpointManager(open_store(root), CPU, rank, 2, f"token{iteration}")
            )
            for rank in range(2)
        ]
        for rank, manager in enumerate(ranks):
            manager.save(iteration, state.contents(rank, 2), state.train_state)
        for manager in ranks:
            manager.finish()


def load(store: Store, iteration: int, size: Size = WHOLE) -> State:
    """Loads all of a checkpoint."""
    checkpoint = PublishedCheckpoint.open(store, checkpoint_name(iteration))
    state = State(None, size=size)
    for rank in range(checkpoint.marker.world_size):
        contents = state.contents(rank, checkpoint.marker.world_size)
        # A rank other than the first knows nothing of others' private tensors.
        skip = [f"rng.{other}.*" for other in range(checkpoint.marker.world_size) if other != rank]
        load_entries(checkpoint, contents, check_contents(checkpoint, contents, skip))
        groups: Any = checkpoint.read_plain(PARAM_GROUPS)
        install_param_groups(state.optimizer, contents.names, groups)
    for rank in range(checkpoint.marker.world_size, _MOST_RANKS):
        state.private[rank] = State(iteration, checkpoint.train_state["run"], size).private[rank]
    state.iteration, state.run = checkpoint.train_state["iteration"], checkpoint.train_state["run"]
    return state


def check_loads(store: Store, iteration: int, size: Size = WHOLE) -> int:
    """Asserts that a checkpoint, including `hf/`, has the values of one run. Returns the run."""
    state = load(store, iteration, size)
    if size.hf_dtype is not None:
        audit = Audit(store, checkpoint_name(iteration), lambda _: None)
        audit.run()
        assert audit.problems == []
        files = PublishedCheckpoint.open(store, checkpoint_name(iteration)).marker.files
        assert {f"hf/{name}" for name in HF_FILES} <= files.keys()
    assert state.iteration == iteration
    assert state.different(State(iteration, state.run, size)) == []
    return state.run


def check_published(root: Path, size: Size = WHOLE) -> dict[int, int]:
    """The run that saved each published checkpoint, by iteration. Asserts that each is whole."""
    store = open_store(root)
    published = published_iterations(store)
    runs = {iteration: check_loads(store, iteration, size) for iteration in published}
    assert latest_iteration(store) == published[-1], "the newest is found"
    return runs


def go_on(root: Path, size: Size = WHOLE) -> list[str]:
    """Starts a run after another has died, which sweeps and saves. Returns all directories."""
    state = State(LATER, size=size)
    with CheckpointManager.start(str(root), CPU) as manager:
        manager.save(LATER, state.contents(), state.train_state)
        manager.finish()
    check_loads(open_store(root), LATER, size)
    return sorted(path.name for path in root.iterdir() if path.is_dir())


def outcome_of_save(
    root: Path, before: Before | None = None, *, run: int = 0, size: Size = WHOLE
) -> str | None:
    """A single rank saves the new checkpoint, and keeps no other. Returns its error, if any."""
    state = State(NEW, run, size)
    store = open_store(root)
    with (
        nullcontext() if before is None else watched(root, before),
        CheckpointManager(
            store, CPU, 0, 1, f"abc{run}", retention=Retention(keep_last=1)
        ) as manager,
    ):
        manager.save(NEW, state.contents(), state.train_state)
        try:
            manager.finish()
        except CheckpointError as failure:
            return str(failure)
    return None


def make_old(root: Path, size: Size = WHOLE) -> None:
    """Creates a directory with the old checkpoint and the draft of a run that has died."""
    save_by_two(root, OLD, size)
    shutil.copytree(
        root / checkpoint_name(OLD), root / f"{checkpoint_name(ABANDONED)}.dead1.saving"
    )


@contextmanager
def memory_folder() -> Iterator[Path]:
    """A directory in memory where the system has one, so that thousands of fsyncs are fast."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(
        prefix="checkpoints-", dir=memory if memory.is_dir() else None
    ) as folder:
        yield Path(folder)


class Scene(NamedTuple):
    """The results of two ranks that saved together, and of the run after them."""

    endings: list[str | None]  # of each rank: an error; KILLED; GAVE_UP; NOT_BEGUN; None: published
    operations: list[list[str]]  # of each rank, including the one at which it was killed
    published: list[int]  # all published checkpoints, which are whole
    folders: list[str]  # after the next run


GAVE_UP, NOT_BEGUN = "gave up", "not begun"


def run_scene(
    root: Path,
    befores: dict[int, Before],
    struck: int | None = None,
    is_hopeless: bool = False,
    size: Size = WHOLE,
) -> Scene:
    """Two ranks save the new checkpoint in separate processes; then another run continues.

    Args:
        befores: functions called before operations, by rank.
        struck: a rank that is killed, or fails without being able to report it.
        is_hopeless: whether the other rank cannot publish without it, and is stopped.
    """
    stop, tell = os.pipe()
    logs = [os.memfd_create("log") for _ in range(2)]
    ranks: dict[int, Child] = {}
    endings: list[str | None] = [NOT_BEGUN, NOT_BEGUN]
    for rank in range(2):
        ranks[rank] = Child(_save_as_rank, root, rank, befores.get(rank), logs[rank], stop, size)
        # The second starts when the first has made the directory, so that all runs are alike.
        if rank == 0 and not _comes_to(ranks[0], logs[0], f"open {DRAFT}/"):
            break
    if struck is not None:
        endings[struck] = ranks.pop(struck).end()
        if is_hopeless:
            os.write(tell, b".")
    for rank, child in ranks.items():
        endings[rank] = child.end()
    operations = [os.pread(log, 1 << 20, 0).decode().splitlines() for log in logs]
    return Scene(endings, operations, list(check_published(root, size)), go_on(root, size))


def end_by_themselves(root: Path, size: Size = WHOLE) -> list[str | None]:
    """Two ranks save the new checkpoint, and end by themselves. Returns their errors."""
    stop, _ = os.pipe()
    log = os.memfd_create("log")
    first = Child(_save_as_rank, root, 0, None, log, stop, size)
    _comes_to(first, log, f"open {DRAFT}/")  # it sweeps before
    second = Child(_save_as_rank, root, 1, None, log, stop, size)
    return [rank.end() for rank in (first, second)]


def _comes_to(child: Child, log: int, operation: str) -> bool:
    """Waits for an operation of a rank. Returns whether the rank has reached it before its end."""
    while True:
        has_ended = child.has_ended
        if operation.encode() in os.pread(log, 1 << 20, 0):
            return True
        if has_ended:
            return False
        time.sleep(0.001)


def _save_as_rank(
    root: Path, rank: int, before: Before | None, log: int, stop: int, size: Size
) -> str | None:
    def note(operation: Operation) -> None:
        os.write(log, f"{operation}\n".encode())
        if before is not None:
            before(operation)

    state = State(NEW, size=size)
    with watched(root, note):
        store = open_store(root)
        if rank == 0:
            store.sweep()
        with CheckpointManager(
            store, CPU, rank, 2, "abcd", retention=Retention(keep_last=1)
        ) as manager:
            manager.save(NEW, state.contents(rank, 2), state.train_state)
            while manager.is_busy:
                if select.select([stop], [], [], 0.002)[0]:
                    return GAVE_UP
            try:
                manager.finish()
            except CheckpointError as failure:
                return str(failure)
    return None


def ending_of(manager: CheckpointManager) -> str | None:
    """Waits for a save. Returns its error, or None if it is published."""
    try:
        manager.finish()
    except CheckpointError as failure:
        return str(failure)
    return None
