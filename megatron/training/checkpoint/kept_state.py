"""`KeptState`: with `--keep-host-state`, a restarted rank continues from the last one's memory.

    kept = KeptState.open(config, launch, device)       # all ranks together, before the model
    engine = build_engine(..., kept=kept.memory)
    kept.attach(engine)
    kept.restore() or load a checkpoint

A step is recorded in the keeper's memory (host_keeper.py) as it proceeds:

    record    number   when                                     contents
    built     1        once the model has been built            the settings' digest, and the
                                                                contents of the memory files
    ended     n        before the first step, and after each    the plain data of a checkpoint
    landed    n        all gradients are in host memory         random states, buffers, and which
                                                                parameters have gradients
    decided   n        the ranks have agreed                    the step's result

`n` is one more than the number of iterations before the step; for `ended`, one more than the number
of finished iterations. The ranks' vote comes between `landed` and `decided`. So if any rank has
decided a step, all ranks have its gradients, and finish it; otherwise no rank has changed its
states, and the step is made anew.

After a change of the number of ranks, the new ones have new files. They load the state of the
earlier ranks (kept_ranks.py), whose files are dropped with the first step that the new ranks have
decided: until then, a restart loads from the earlier files again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory
from megatron.core.issued_collectives import issuing
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_updates import Landed
from megatron.core.options import ConfigError
from megatron.training.checkpoint.kept_ranks import KINDS, SOURCE, EarlierRanks, KeptRank
from megatron.training.checkpoint.load_extras import RunData
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.config import RunConfig
from megatron.training.engines import ModuleEngine
from megatron.training.launch import Launch
from megatron.training.rng import rng_state, set_rng_state
from megatron.training.step import StepResult

logger = logging.getLogger(__name__)

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
        is_found: whether there is a state to `restore`.
    """

    def __init__(self, config: RunConfig, device: Device, keeper: Keeper, identity: str) -> None:
        """Use `open`."""
        self.is_found = False
        self._config = config
        self._device = device
        self._keeper = keeper
        self._identity = identity
        self._rank = KeptRank(keeper)
        self._earlier: EarlierRanks | None = None  # to restore the state of
        self._engine: ModuleEngine | None = None
        self._number = 0  # of the step to restore
        self._has_warned = False

    @classmethod
    def open(cls, config: RunConfig, launch: Launch, device: Device) -> KeptState | None:
        """Connects to the keeper, and finds out whether there is a state that all ranks can
        continue from (`is_found`), in their memory (`memory.is_restored`) or in that of another
        number of ranks. All ranks call it together.

        Returns:
            None, after a warning, if any rank has no keeper.
        """
        keeper = Keeper(os.getppid(), launch.rank, launch.world_size)
        kept, earlier = None, None
        try:
            keeper.connect(starts=launch.local_rank == 0)
            kept = cls(config, device, keeper, _identity(config))
            earlier = EarlierRanks.find(keeper, kept._identity)
            kept._rank.map_files(kept._identity)
        except KeeperError as error:
            logger.warning("%s", error)
        if not _least(kept is not None, device) or kept is None:
            logger.warning("--keep-host-state has no effect: a rank has no keeper")
            with suppress(KeeperError):
                keeper.forget()
                keeper.forget_earlier()
            keeper.close()
            return None

        kept._agree(earlier)
        kept._drop_the_rest()
        if not kept.is_found and launch.restart_count and launch.rank == 0:
            logger.warning("there is no kept host state that all ranks can continue from")
        return kept

    @property
    def memory(self) -> KeptMemory:
        """Where the host memory of the engine comes from."""
        return self._rank.memory

    def attach(self, engine: ModuleEngine) -> None:
        """Takes the engine, which has been built with this memory."""
        self._engine = engine
        if not self.memory.is_restored:
            self._rank.write_built(self._identity, engine.model, self._optimizer)

    # Recording

    def landed(self) -> None:
        optimizer = self._optimizer
        content = {
            "landed": [tuple(own) for own in optimizer.land()],
            "rng": rng_state(self._device),
            "buffers": {name: own.cpu() for name, own in _buffers(self._own_engine.model)},
        }
        self._rank.write("landed", self._coming, _packed(content))

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
        self._rank.write("decided", self._coming, _packed(content))
        with suppress(KeeperError):
            self._keeper.forget_earlier()
        optimizer.number_step(self._coming)
        if not self._has_warned and not self._keeper.is_alive:
            self._has_warned = True
            logger.warning(
                "the keeper of the host state has ended: after a failure, this run will resume "
                "from a checkpoint"
            )

    def ended(self, info: RecoverInfo) -> None:
        """Records that an iteration is over, or, before the first, the state at the start."""
        self._rank.write("ended", self._coming, json.dumps(info.to_plain()).encode())

    def forget(self) -> None:
        """Drops all records: a restarted run resumes from a checkpoint."""
        for kind in KINDS:
            self._rank.clear(kind)
        with suppress(KeeperError):
            self._keeper.forget_earlier()

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
        engine, number, earlier = self._own_engine, self._number, self._earlier
        state, model, optimizer = engine.state, engine.model, self._optimizer
        ranks = [self._rank] if earlier is None else earlier.ranks
        decided = _unpacked(self._decided(ranks))
        before = _info(ranks[0], number)
        RunData.of(self._config.checkpoint, self._config.schedule, state, before, SOURCE).install(
            state
        )
        steps = [_unpacked(rank.read("landed")[number]) for rank in ranks]
        for name, buffer in _buffers(model):
            # Equal on all ranks, but for maxima, of which the end of the step takes the largest.
            buffer.copy_(torch.stack([step["buffers"][name] for step in steps]).amax(0))
        landed = [[Landed(*each) for each in step["landed"]] for step in steps]
        result = engine.finish_batch(
            partial(optimizer.finish_step, number, landed[0])
            if earlier is None
            else partial(earlier.finish, model, optimizer, landed),
            StepResult(**decided["result"]),
            decided["grad_divisor"],
            decided["options"],
        )
        if earlier is None:
            set_rng_state(self._device, steps[0]["rng"])
        else:
            logger.info(
                "the kept host state is from %d ranks: dropout continues with new random states",
                len(ranks),
            )

        has_ended = self._least(all(number + 1 in rank.read("ended") for rank in ranks)) == 1
        died_at = min(_milliseconds(rank.keeper.died_at) for rank in ranks)
        failed_at = self._least(died_at) / 1000
        self._earlier = None
        if has_ended:
            return Restored(_info(ranks[0], number + 1), None, failed_at)
        return Restored(before, result, failed_at)

    def _agree(self, earlier: EarlierRanks | None) -> None:
        """Finds the last step that any rank has decided, and whether all can finish it: in their
        memory, or in that of another number of ranks.
        """
        number, rank = -self._least(-self._rank.last_decided()), dist.get_rank()
        can_finish = self._rank.can_finish(number) and not self._rank.is_damaged(number, rank)
        if not self._least(can_finish):
            number = 0
        # All ranks must have found the same earlier ones.
        found = 0 if earlier is None else (earlier.number << 32) + len(earlier.ranks)
        if self._least(found) == -self._least(-found) and found >> 32 > number:
            self._earlier, number = earlier, found >> 32
        self._number, self.is_found = number, number > 0
        self.memory.is_restored = self.is_found and self._earlier is None
        self.memory.files = {}

    def _drop_the_rest(self) -> None:
        """Drops all files that the run does not continue from; also the earlier ranks' if they are
        damaged, or if the machine has no memory for a second state.
        """
        if not self.memory.is_restored:
            self.memory.forget()
            self._rank = KeptRank(self._keeper)
        earlier = self._earlier
        self._keeper.forget_earlier(but=0 if earlier is None else len(earlier.ranks))
        if earlier is None:
            return
        self._least(True)  # wait until that memory is free
        has_room = self._least(earlier.fit())
        if not has_room and dist.get_rank() == 0:
            logger.warning(
                "the host has no memory for a second state, which a change from %d ranks to %d "
                "needs meanwhile",
                len(earlier.ranks),
                dist.get_world_size(),
            )
        if not has_room or not self._least(not earlier.are_damaged()):
            self._keeper.forget_earlier()
            self._earlier, self.is_found = None, False

    def _decided(self, ranks: Sequence[KeptRank]) -> bytes:
        """The record of the decision, which some ranks may lack."""
        found = (rank.read("decided").get(self._number) for rank in ranks)
        own = next((content for content in found if content is not None), None)
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
            ranks[0].write("decided", self._number, content)
        return content

    def _least(self, value: int) -> int:
        return _least(value, self._device)

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


def _info(rank: KeptRank, number: int) -> RecoverInfo:
    return RecoverInfo.from_plain(json.loads(rank.read("ended")[number]), SOURCE)


def _identity(config: RunConfig) -> str:
    """Differs for runs that cannot use each other's memory."""
    plain = json.dumps([config.values(), torch.__version__], sort_keys=True, default=str)
    return hashlib.sha256(plain.encode()).hexdigest()


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
