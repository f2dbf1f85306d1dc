"""`KeptState`: with `--keep-host-state`, a restarted rank continues from the last one's memory.

    kept = KeptState.open(config, launch, device)       # all ranks together, before the model
    engine = build_engine(..., kept=kept.memory)
    kept.attach(engine)
    kept.restore() or load a checkpoint

A step is recorded in the keeper's memory (host_keeper.py) as it proceeds:

    record    number   when                                     contents
    built     1        once the model has been built            the settings' digest, and the sizes
                                                                of all memory files
    ended     n        before the first step, and after each    the plain data of a checkpoint
    landed    n        all gradients are in host memory         random states, buffers, and which
                                                                parameters have gradients
    decided   n        the ranks have agreed                    the step's result

`n` is one more than the number of iterations before the step; for `ended`, one more than the number
of finished iterations. The ranks' vote comes between `landed` and `decided`. So if any rank has
decided a step, all ranks have its gradients, and finish it; otherwise no rank has changed its
states, and the step is made anew.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory, Records
from megatron.core.issued_collectives import issuing
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_updates import Landed, find_damage
from megatron.core.options import ConfigError
from megatron.training.checkpoint.load_extras import RunData
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.config import RunConfig
from megatron.training.engines import ModuleEngine
from megatron.training.launch import Launch
from megatron.training.rng import rng_state, set_rng_state
from megatron.training.step import StepResult

logger = logging.getLogger(__name__)

_KINDS = ("built", "ended", "landed", "decided")
_SOURCE = "the kept host state"
_NEVER = 2**62  # as a time in milliseconds


class Restored(NamedTuple):
    """The state that a run continues from.

    Attributes:
        info: the plain data of its run.
        unreported: the result of the last step, if that was not reported, evaluated and saved yet.
        failed_at: when the first rank had died, in seconds since 1970.
    """

    info: RecoverInfo
    unreported: StepResult | None
    failed_at: float


class KeptState:
    """Records the steps of an engine, and restores it. A `StepJournal`.

    Attributes:
        memory: where the host memory of the engine comes from.
    """

    def __init__(self, config: RunConfig, device: Device, keeper: Keeper, identity: str) -> None:
        """Use `open`."""
        self.memory = KeptMemory(keeper)
        self._config = config
        self._device = device
        self._keeper = keeper
        self._identity = identity
        self._records = Records(self.memory, _KINDS)
        self._engine: ModuleEngine | None = None
        self._number = 0  # of the step to restore
        self._has_warned = False

    @classmethod
    def open(cls, config: RunConfig, launch: Launch, device: Device) -> KeptState | None:
        """Connects to the keeper, and finds out whether there is a state that all ranks can
        continue from (`memory.is_restored`). All ranks call it together.

        Returns:
            None, after a warning, if any rank has no keeper.
        """
        keeper = Keeper(os.getppid(), launch.rank)
        kept, files = None, None
        try:
            keeper.connect(starts=launch.local_rank == 0)
            kept = cls(config, device, keeper, _identity(config, launch))
            files = kept._files()
        except KeeperError as error:
            logger.warning("%s", error)
        if not _least(kept is not None, device) or kept is None:
            logger.warning("--keep-host-state has no effect: a rank has no keeper")
            with suppress(KeeperError):
                keeper.forget()
            keeper.close()
            return None

        kept._agree(files)
        if not kept.memory.is_restored:
            if launch.restart_count and launch.rank == 0:
                logger.warning("there is no kept host state that all ranks can continue from")
            kept.memory.forget()
            kept._records = Records(kept.memory, _KINDS)
        return kept

    def attach(self, engine: ModuleEngine) -> None:
        """Takes the engine, which has been built with this memory."""
        self._engine = engine
        if not self.memory.is_restored:
            built = {"identity": self._identity, "sizes": self.memory.sizes}
            self._records.write("built", 1, json.dumps(built).encode())

    # Recording

    def landed(self) -> None:
        optimizer = self._optimizer
        content = {
            "landed": [tuple(own) for own in optimizer.land()],
            "rng": rng_state(self._device),
            "buffers": {name: own.cpu() for name, own in _buffers(self._own_engine.model)},
        }
        self._records.write("landed", self._coming, _packed(content))

    def decided(self, result: StepResult, grad_divisor: float) -> None:
        optimizer = self._optimizer
        content = {
            "result": {
                field.name: getattr(result, field.name) for field in dataclasses.fields(result)
            },
            "grad_divisor": grad_divisor,
            "options": [
                {name: value for name, value in group.items() if _is_plain(value)}
                for group in optimizer.param_groups
            ],
        }
        self._records.write("decided", self._coming, _packed(content))
        optimizer.number_step(self._coming)
        if not self._has_warned and not self._keeper.is_alive:
            self._has_warned = True
            logger.warning(
                "the keeper of the host state has ended: after a failure, this run will resume "
                "from a checkpoint"
            )

    def ended(self, info: RecoverInfo) -> None:
        """Records that an iteration is over, or, before the first, the state at the start."""
        self._records.write("ended", self._coming, json.dumps(info.to_plain()).encode())

    def forget(self) -> None:
        """Drops all records: a restarted run resumes from a checkpoint."""
        for kind in _KINDS:
            self._records.clear(kind)

    # Restoring

    def restore(self) -> Restored:
        """Finishes the last step of the earlier processes, and restores the rest of the state. All
        ranks call it together.

        Raises:
            CheckpointError, ConfigError, ValueError: if a record does not fit this run. The next
                start resumes from a checkpoint.
        """
        try:
            return self._restored()
        except (CheckpointError, ConfigError, ValueError):
            self.forget()
            raise

    def _restored(self) -> Restored:
        engine, number = self._own_engine, self._number
        state = engine.state
        decided = _unpacked(self._decided())
        before = self._info(number)
        RunData.of(self._config.checkpoint, self._config.schedule, state, before, _SOURCE).install(
            state
        )
        own = _unpacked(self._records.read("landed")[number])
        for name, buffer in _buffers(engine.model):
            buffer.copy_(own["buffers"][name])
        result = engine.finish_batch(
            number,
            [Landed(*each) for each in own["landed"]],
            StepResult(**decided["result"]),
            decided["grad_divisor"],
            decided["options"],
        )
        set_rng_state(self._device, own["rng"])

        has_ended = self._least(number + 1 in self._records.read("ended")) == 1
        failed_at = self._least(_milliseconds(self._keeper.died_at)) / 1000
        if has_ended:
            return Restored(self._info(number + 1), None, failed_at)
        return Restored(before, result, failed_at)

    def _files(self) -> dict[str, mmap.mmap] | None:
        """This rank's memory files; None unless a run with these settings has written them."""
        content = self._records.read("built").get(1)
        built = {} if content is None else json.loads(content)
        if built.get("identity") != self._identity:
            return None
        return self.memory.files(built["sizes"])

    def _agree(self, files: dict[str, mmap.mmap] | None) -> None:
        """Finds the last step that any rank has decided, and whether all can finish it."""
        decided = {} if files is None else self._records.read("decided")
        number = -self._least(-max(decided, default=0))
        can_finish = (
            files is not None
            and number in self._records.read("landed")
            and number in self._records.read("ended")
            and _is_undamaged(files, number)
        )
        self.memory.is_restored = number > 0 and self._least(can_finish) == 1
        self._number = number

    def _decided(self) -> bytes:
        """The record of the decision, which some ranks may lack."""
        own = self._records.read("decided").get(self._number)
        rank = dist.get_rank()
        source = self._least(rank if own is not None else dist.get_world_size())
        content = own or b""
        size = self._least(len(content) if rank == source else _NEVER)
        data = torch.zeros(size, dtype=torch.uint8)
        if rank == source:
            data.copy_(torch.frombuffer(bytearray(content), dtype=torch.uint8))
        data = data.to(self._device.torch_device)
        with issuing("broadcast of the step to finish", data):
            dist.broadcast(data, source)
        content = data.cpu().numpy().tobytes()
        if own is None:
            self._records.write("decided", self._number, content)
        return content

    def _least(self, value: int) -> int:
        return _least(value, self._device)

    def _info(self, number: int) -> RecoverInfo:
        return RecoverInfo.from_plain(json.loads(self._records.read("ended")[number]), _SOURCE)

    @property
    def _own_engine(self) -> ModuleEngine:
        assert self._engine is not None, "attach comes first"
        return self._engine

    @property
    def _optimizer(self) -> HybridDeviceOptimizer:
        optimizer = self._own_engine.state.optimizer.optimizer
        assert isinstance(optimizer, HybridDeviceOptimizer), "the settings have been checked"
        return optimizer

    @property
    def _coming(self) -> int:
        """The number of the coming step."""
        return self._own_engine.state.step_info.iteration + 1


def _identity(config: RunConfig, launch: Launch) -> str:
    """Differs for runs that cannot use each other's memory."""
    place = [launch.rank, launch.world_size, torch.__version__]
    plain = json.dumps([config.values(), place], sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()


def _is_undamaged(files: Mapping[str, mmap.mmap], number: int) -> bool:
    """Whether weights and states are as a step left them; otherwise warns."""
    if damage := find_damage(files, number):
        logger.warning("the kept host state of rank %d is damaged: %s", dist.get_rank(), damage)
    return not damage


def _least(value: int, device: Device) -> int:
    """The least of all ranks' numbers."""
    least = torch.tensor(int(value), device=device.torch_device)
    with issuing("all-reduce of the kept host states", least):
        dist.all_reduce(least, dist.ReduceOp.MIN)
    return int(least)


def _buffers(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """The buffers that checkpoints have, and maxima of the step that its end needs."""
    for prefix, module in model.named_modules():
        skipped = set() if isinstance(module, AmaxHistory) else module._non_persistent_buffers_set
        for name, buffer in module.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in skipped:
                yield name, buffer


def _is_plain(value: object) -> bool:
    return isinstance(value, (bool, int, float, str)) or (
        isinstance(value, tuple) and all(map(_is_plain, value))
    )


def _packed(content: Mapping[str, Any]) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


def _unpacked(content: bytes) -> dict[str, Any]:
    found: dict[str, Any] = torch.load(io.BytesIO(content), weights_only=True)
    return found


def _milliseconds(seconds: float | None) -> int:
    return _NEVER if seconds is None else int(1000 * seconds)
