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

import hashlib
import io
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from typing import Any

import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import first_content, least_of_ranks
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.host_keeper import Keeper, KeeperError, KeptMemory
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.cpu_offloading.kept_layout import Landed
from megatron.core.options import ConfigError
from megatron.training.checkpoint.kept_ranks import KINDS, SOURCE, EarlierRanks, KeptRank
from megatron.training.checkpoint.load_extras import RunData
from megatron.training.checkpoint.loading import Loaded
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.config import RunConfig
from megatron.training.engines import ModuleEngine
from megatron.training.launch import Launch
from megatron.training.rng import rng_state, set_rng_state
from megatron.training.step import StepResult

logger = logging.getLogger(__name__)


class KeptState:
    """Records the steps of an engine, and restores it. A `StepJournal`."""

    _rank: KeptRank  # this process's records, once it is known which memory it has

    def __init__(
        self, config: RunConfig, launch: Launch, device: Device, keeper: Keeper, identity: str
    ) -> None:
        """Use `open`."""
        self._config = config
        self._launch = launch
        self._device = device
        self._keeper = keeper
        self._identity = identity
        self._earlier: EarlierRanks | None = None  # to restore the state of
        self._engine: ModuleEngine | None = None
        self._has_warned = False

    @classmethod
    def open(cls, config: RunConfig, launch: Launch, device: Device) -> KeptState | None:
        """Connects to the keeper, and finds a state to `restore` that all ranks can continue from,
        in their memory (`memory.is_restored`) or in that of another number of ranks. All ranks call
        it together.

        Returns:
            None, after a warning, if any rank has no keeper.
        """
        first, identity = launch.rank - launch.local_rank, _identity(config)
        local_ranks = range(first, first + launch.local_world_size)
        keeper = Keeper(os.getppid(), launch.rank, launch.world_size, local_ranks)
        own, others = None, None
        try:
            keeper.connect(starts=launch.local_rank == 0)
            own = KeptRank(keeper)
            others = EarlierRanks.find(keeper, identity)
            own.map_files(identity)
        except KeeperError as error:
            logger.warning("%s", error)
        if not least_of_ranks(own is not None) or own is None:
            logger.warning("--keep-host-state has no effect: a rank has no keeper")
            with suppress(KeeperError):
                keeper.forget()
                keeper.forget_earlier()
            keeper.close()
            return None

        kept = cls(config, launch, device, keeper, identity)
        kept._earlier = kept._chosen(own, others)
        del own, others  # or files that are dropped would keep their memory
        kept._drop_the_rest()
        if kept._earlier is None and launch.restart_count and launch.rank == 0:
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
        content = {
            "landed": [tuple(own) for own in self._optimizer.land(self._coming)],
            "rng": rng_state(self._device),
            "buffers": {name: own.cpu() for name, own in _buffers(self._own_engine.model)},
        }
        self._rank.write("landed", self._coming, _packed(content))

    def decided(self, result: StepResult, grad_divisor: float) -> None:
        content = {
            "result": vars(result),
            "grad_divisor": grad_divisor,
            "options": [
                {name: value for name, value in group.items() if _is_plain(value)}
                for group in self._optimizer.param_groups
            ],
        }
        self._rank.write("decided", self._coming, _packed(content))
        with suppress(KeeperError):
            self._keeper.forget_earlier()
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

    def restore(self) -> Loaded | None:
        """Finishes the last step of the earlier processes, and restores the rest of the state. All
        ranks call it together.

        Returns:
            None if there is no such state.

        Raises:
            CheckpointError, ConfigError, ValueError: if a record does not fit this run. The next
                start resumes from a checkpoint.
        """
        earlier, self._earlier = self._earlier, None
        try:
            return None if earlier is None else self._restored(earlier)
        except (CheckpointError, ConfigError, ValueError):
            self.forget()
            raise

    def _restored(self, earlier: EarlierRanks) -> Loaded:
        engine, ranks, number = self._own_engine, earlier.ranks, earlier.number
        state, model = engine.state, engine.model
        decided = _unpacked(_decided(earlier))
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
            partial(earlier.finish, model, self._optimizer, landed),
            StepResult(**decided["result"]),
            decided["grad_divisor"],
            decided["options"],
        )
        if earlier.is_in_place:
            set_rng_state(self._device, steps[0]["rng"])
        else:
            logger.info(
                "the kept host state is from %d ranks: dropout continues with new random states",
                len(ranks),
            )

        has_ended = least_of_ranks(all(number + 1 in rank.read("ended") for rank in ranks))
        died_at = min(rank.keeper.died_at for rank in ranks)
        failed_at = least_of_ranks(int(1000 * died_at)) / 1000
        if has_ended:
            return Loaded(None, _info(ranks[0], number + 1), [], failed_at=failed_at)
        return Loaded(None, before, [], unreported=result, failed_at=failed_at)

    def _chosen(self, own: KeptRank, others: EarlierRanks | None) -> EarlierRanks | None:
        """The state that all ranks continue from: with the last step that any rank has decided, if
        all can finish it, in their memory, or in that of another number of ranks.
        """
        number = -least_of_ranks(-own.last_decided())
        can_finish = own.can_finish(number) and not own.is_damaged(number, self._launch.rank)
        if not least_of_ranks(can_finish):
            number = 0
        # All ranks must have found the same earlier ones.
        found = 0 if others is None else (others.number << 32) + len(others.ranks)
        if least_of_ranks(found) == -least_of_ranks(-found) and found >> 32 > number:
            return others
        return EarlierRanks([own], number, is_in_place=True) if number else None

    def _drop_the_rest(self) -> None:
        """Drops all files that the run does not continue from; also the earlier ranks' if they are
        damaged, or if the machine has no memory for a second state.
        """
        is_in_place = self._earlier is not None and self._earlier.is_in_place
        if not is_in_place:
            self._keeper.forget()
        self._rank = KeptRank(self._keeper)
        self.memory.is_restored = is_in_place
        others = None if is_in_place else self._earlier
        self._keeper.forget_earlier(but=0 if others is None else len(others.ranks))
        least_of_ranks(True)  # wait until that memory is free
        if others is None:
            return
        has_room = least_of_ranks(others.fit())
        if not has_room and self._launch.rank == 0:
            logger.warning(
                "the host has no memory for a second state, which a change from %d ranks to %d "
                "needs meanwhile",
                len(others.ranks),
                self._launch.world_size,
            )
        if not has_room or not least_of_ranks(not others.are_damaged()):
            self._keeper.forget_earlier()
            self._earlier = others = None
            least_of_ranks(True)

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


def _decided(earlier: EarlierRanks) -> bytes:
    """The record of the decision, which some ranks may lack."""
    found = (rank.read("decided").get(earlier.number, b"") for rank in earlier.ranks)
    return first_content(max(found, key=len))[1]


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
