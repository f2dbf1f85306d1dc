"""The engines: `MegatronEngine` over our FSDP, `FSDPEngine` over PyTorch FSDP2, and `ModuleEngine`,
an unsharded module in one process.

They share the optimizer (offloaded or not), the schedule, the counters, steps and evaluations,
saving and loading. They differ in how they shard a model and in the format of their checkpoints,
which load in either.

    engine = MegatronEngine(config, device, mesh)       # or FSDPEngine
    engine.initialize(model)                            # any nn.Module, on meta or real
    result = engine.train_batch(microbatches, forward_step)
    engine.save(SaveLoadMeta("runs/mine/step_1000", with_optim=True))

The names follow the engines of AReaL.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.activation_offload import ActivationOffload
from megatron.core.device import Device
from megatron.core.dist_checkpointing.agreement import on_first_rank
from megatron.core.dist_checkpointing.config import FSDP_DTENSOR, TORCH_DCP, CheckpointConfig
from megatron.core.dist_checkpointing.errors import few
from megatron.core.dist_checkpointing.store import expect_folder, open_store
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtypes import DTYPES
from megatron.core.host_keeper import KeptMemory
from megatron.core.host_memory import check_memory_on_all_ranks, format_bytes
from megatron.core.layer_execution import (
    check_execution,
    host_needs,
    prepare_layers,
    use_low_precision,
)
from megatron.core.log import counted
from megatron.core.low_precision.amax_history import AmaxHistory, update_histories
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.distrib_optimizer import (
    build_optimizer,
    plan_offload,
)
from megatron.core.optimizer.lr_schedule import LRSchedule
from megatron.core.optimizer.planned_memory import plan_memory
from megatron.core.optimizer.state_memory import format_state_memory
from megatron.core.optimizer.torch_optimizer import format_muon_groups
from megatron.core.timeline import AnyTimeline
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from megatron.training.checkpoint.loading import load_checkpoint
from megatron.training.checkpoint.run_state import RunState, save_once, split_path
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.step import (
    Batch,
    ForwardStep,
    MarkPhase,
    StepInfo,
    StepJournal,
    StepResult,
    end_step,
    evaluate,
    train_step,
    unmarked,
)
from megatron.training.step_memory import state_settings, with_known_fraction

logger = logging.getLogger(__name__)


class ModuleEngine:
    """An unsharded module in one process, for debugging, and the base of the other engines. All
    ranks call every method together.

    Attributes:
        activations: moves the activations of layers to host memory and back; None: they stay.
        device: the device that this rank computes on.
        mesh: one axis, over all ranks of the default process group.
    """

    own_format = FSDP_DTENSOR  # default format of its checkpoints
    _shards_modules = False  # whether states are offloaded module by module

    def __init__(
        self,
        config: EngineConfig,
        device: Device,
        mesh: DeviceMesh,
        *,
        num_local_ranks: int = 1,
        kept: KeptMemory | None = None,
    ) -> None:
        """
        Args:
            mesh: one axis, over all ranks of the default process group.
            num_local_ranks: ranks on this machine, which share its memory.
            kept: where the memory of an offloaded optimizer comes from, if it is to survive the
                process. Main weights that it has already are not initialized.
        """
        self.config = config
        self.device = device
        self.mesh = mesh
        self._num_local_ranks = num_local_ranks
        self._kept = kept
        self.activations: ActivationOffload | None = None
        self._state: RunState | None = None
        self._histories: list[AmaxHistory] = []
        self._has_warned_of_schedule = False
        self._num_masked_steps = 0

    @property
    def state(self) -> RunState:
        """Model, optimizer, schedule and counters, as they are at the moment.

        Raises:
            RuntimeError: before `initialize`, and after a load that broke off while it was read
                into place, until another one succeeds.
        """
        state = self._state
        if state is None:
            raise RuntimeError(
                "Expected initialize to have been called, got an engine without a model."
            )
        if state.torn:
            raise RuntimeError(
                "Expected another load, got an engine after one that broke off: its "
                f"{' and '.join(sorted(state.torn))} are partly the checkpoint's."
            )
        return state

    @property
    def model(self) -> nn.Module:
        """The model, sharded."""
        return self.state.model

    def initialize(self, model: nn.Module | Callable[[], nn.Module]) -> None:
        """Shards the model, and builds its optimizer and schedule. Called once.

        Args:
            model: in fp32, with the same weights and buffers on every rank, and buffers that stay
                equal; or a function that builds one, which is called under the meta device.
                Parameters on meta get their initial weights from the `reset_parameters` of their
                modules.
        """
        if self._state is not None:
            raise RuntimeError("Expected initialize to be called once, got a second model.")
        check_execution(self.config.execution, self.device)
        if not isinstance(model, nn.Module):
            with torch.device("meta"):
                model = model()

        use_low_precision(
            model, self.config.low_precision, gathers_codes=self.config.parallel.gathers_codes
        )
        self._histories = [own for own in model.modules() if isinstance(own, AmaxHistory)]
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        config = with_known_fraction(self.config, model, self.device, self.mesh)
        self.config = config
        plan = plan_offload(model, config.optimizer, by_module=self._shards_modules)
        self._shard(model, plan)
        optimizer = build_optimizer(
            model,
            config.optimizer,
            config.schedule.lr,
            self._num_local_ranks,
            scales_loss=config.compute_dtype == "fp16",
            records_timings=config.records_timings,
            kept=self._kept,
        )
        self._prepare_layers(model)
        schedule = LRSchedule.build(config.schedule, config.train_iters)
        self._state = RunState(model, optimizer, schedule, StepInfo())
        self._log_what_was_built(num_parameters)

    def _prepare_layers(self, model: nn.Module) -> None:
        execution = self.config.execution
        needs = host_needs(execution, self.device)
        if needs:
            # Counted at the start, too; now the optimizer has its part.
            check_memory_on_all_ranks(needs, self._num_local_ranks, self.mesh)
        self.activations = prepare_layers(
            model, execution, self.device, records_timings=self.config.records_timings
        )
        if self.activations is not None:
            room = format_bytes(self.activations.nbytes)
            logger.info("activations of layers in up to %s of host memory a rank", room)
        if execution.compile_layers:
            logger.info("layers are compiled in the first step, which takes a while")

    def _log_what_was_built(self, num_parameters: int) -> None:
        config, optimizer, dtype = self.config, self.state.optimizer, self.config.compute_dtype
        logger.info(
            "%d parameters, %s on %s, %s%s, %s",
            num_parameters,
            config.parallel.engine,
            counted(self.mesh.size(), "rank"),
            "fp32"
            if dtype == "fp32"
            else f"{dtype} compute over {config.optimizer.main_params_dtype} main weights",
            "".join(f", gradients sent in {name}" for name in self._sent_dtypes()),
            self.device.description,
        )

        if config.optimizer.optimizer == "muon":
            table = format_muon_groups(self.model, optimizer.param_groups)
            logger.info("matrices of muon, by their rows, and weights of adam:\n%s", table)

        if optimizer.plan is not None:
            percent = 100 * optimizer.plan.host_fraction
            logger.info("optimizer states of %.0f%% in host memory:\n%s", percent, optimizer.plan)

        logger.info(
            "memory of rank 0, at rest:\n%s",
            format_state_memory(optimizer.state_memory(self.model)),
        )

    def _sent_dtypes(self) -> list[str]:
        """The names of the dtypes in which ranks send each other gradients."""
        groups = [group_of(own) for own in self.model.parameters() if own.requires_grad]
        dtypes = {group.plan.sent_dtype for group in groups if group is not None}
        return [name for name, dtype in DTYPES.items() if dtype in dtypes and self.mesh.size() > 1]

    def record_to(self, timeline: AnyTimeline) -> None:
        """Records the work of the lanes of engine and optimizer, and the waits of the computation,
        in a timeline from now on. The argument `mark` of `train_batch` records its phases.

        RuntimeError if the optimizer or the activations are offloaded without recording
        (`EngineConfig.records_timings`).
        """
        self.state.optimizer.record_to(timeline)
        if self.activations is not None:
            self.activations.record_to(timeline)
        context = megatron_fsdp.context_of(self.model)
        if context is not None:
            context.record_to(timeline)

    def train_batch(
        self,
        microbatches: Sequence[Batch] | Iterator[Batch],
        forward_step: ForwardStep,
        *,
        num_microbatches: int | None = None,
        votes: Callable[[], tuple[float, ...]] = tuple,
        mark: MarkPhase = unmarked,
        journal: StepJournal | None = None,
    ) -> StepResult:
        """Forward, backward and the optimizer's step over a global batch, at the schedule's rate;
        the counters advance. The step is skipped if the loss or the gradient norm is not finite.

        Args:
            microbatches: this rank's. Of an iterator, `num_microbatches` are taken.
            forward_step: gives the loss of a microbatch, as a tensor or as a `ModelLoss`, whose
                auxiliary losses are trained with and whose expert loads move expert biases.
            votes: called after the backward; the result holds the sums of its numbers over ranks.
            mark: called with each phase of the step when it starts.
            journal: records the step; of an engine with kept memory.

        Raises:
            RuntimeError: on all ranks, and before anything is done, for a step beyond the end of
                the run and of a schedule whose last rate is 0: it would have no effect. Where that
                rate is more, it is used, with a warning once.
        """
        state, (batches, count) = self.state, _counted(microbatches, num_microbatches)
        self._check_schedule()
        # The schedule counts from 0, the iterations that are logged and saved from 1.
        learning_rate = state.schedule.apply(
            state.optimizer.param_groups, state.step_info.iteration
        )
        result = train_step(
            state.model,
            state.optimizer,
            batches,
            forward_step=forward_step,
            num_microbatches=count,
            device=self.device.torch_device,
            mesh=self.mesh,
            ranks_per_sample=self.config.parallel.ranks_per_sample,
            votes=votes,
            mark=mark,
            journal=journal,
            histories=self._histories,
        )
        return self._counted_step(result, learning_rate)

    def finish_batch(
        self,
        finish: Callable[..., None],
        result: StepResult,
        grad_divisor: float,
        options: Sequence[Mapping[str, Any]],
    ) -> StepResult:
        """Finishes a step of earlier processes in kept memory, from what a `StepJournal` has
        recorded of it.

        Args:
            finish: finishes the updates, given `grad_scale`, the factor of the gradients; None: the
                step was skipped.
            options: of the optimizer's groups.
        """
        state = self.state
        groups = state.optimizer.param_groups
        learning_rate = state.schedule.apply(groups, state.step_info.iteration)
        for group, own in zip(groups, options, strict=True):
            group.update(own)
        update_histories(self._histories, self.mesh.get_group())
        norm = math.nan if result.is_skipped else result.grad_norm
        if not state.optimizer.step(norm, finish, grad_divisor=grad_divisor):
            finish(grad_scale=None)
        result = end_step(state.model, state.optimizer, result)
        return self._counted_step(result, learning_rate)

    def _counted_step(self, result: StepResult, learning_rate: float) -> StepResult:
        """Counts a step, and adds its rate to the result."""
        state = self.state
        if self.activations is not None:
            self.activations.end_step()
        # A skipped step counts: the schedule and the data advance.
        state.step_info.iteration += 1
        state.step_info.consumed_samples += result.num_samples
        state.step_info.skipped_iterations += result.is_skipped
        state.step_info.nan_iterations += not result.is_finite
        if result.is_masked:
            self._warn_of_masked_step()
        return replace(result, learning_rate=learning_rate)

    def _check_schedule(self) -> None:
        """Warns of steps beyond `train_iters`, which a user's training loop may make at `min_lr`.

        Raises:
            RuntimeError: `min_lr` is 0, so that the step would not change the weights.
        """
        iteration, schedule = self.state.step_info.iteration, self.state.schedule
        end = schedule.last_change
        if end is None or iteration < max(end, self.config.train_iters):
            return

        if schedule.least == 0 < schedule.peak:
            raise RuntimeError(
                f"Expected at most {iteration} steps, after which the learning rate stays at 0, "
                f"got step {iteration + 1}, which would change no weight. Raise train_iters "
                f"({self.config.train_iters}) or lr_decay_iters, or set min_lr, or "
                "lr_decay_style='constant'."
            )
        if not self._has_warned_of_schedule:
            self._has_warned_of_schedule = True
            logger.warning(
                "step %d is beyond train_iters (%d): the learning rate stays at min_lr, %g",
                iteration + 1,
                self.config.train_iters,
                schedule.least,
            )

    def _warn_of_masked_step(self) -> None:
        """Warns of the first, second, fourth, eighth, ... step whose tokens are all masked. As in
        Megatron-LM it is a step all the same.
        """
        self._num_masked_steps += 1
        is_power_of_two = self._num_masked_steps & (self._num_masked_steps - 1) == 0
        if is_power_of_two and self.mesh.get_rank() == 0:
            logger.warning(
                "all tokens of the global batch of iteration %d are masked (%s since the start). "
                "Its loss is meaningless, and only weight decay and momentum change the weights. "
                "Remove samples whose tokens are all masked, or raise --global-batch-size",
                self.state.step_info.iteration,
                counted(self._num_masked_steps, "such iteration"),
            )

    def eval_batch(
        self,
        microbatches: Sequence[Batch] | Iterator[Batch],
        forward_step: ForwardStep,
        *,
        num_microbatches: int | None = None,
    ) -> float:
        """The mean loss over all ranks' microbatches, without dropout; the same on every rank.
        AllMaskedError, a ValueError, if the weights of all of them are 0.
        """
        batches, count = _counted(microbatches, num_microbatches)
        try:
            return evaluate(
                self.model,
                batches,
                forward_step=forward_step,
                num_microbatches=count,
                device=self.device.torch_device,
                mesh=self.mesh,
            )
        finally:
            # Parameters of a gathered model are not the ones that the optimizer holds.
            torch_fsdp2.reshard(self.model)

    @torch.no_grad()
    def forward(
        self, batch: Batch, forward_fn: Callable[[nn.Module, Batch], Any] | None = None
    ) -> Any:
        """The model's output for one microbatch of this rank, without gradients or dropout.

        Args:
            forward_fn: calls the model; default: `model(**batch)`.
        """
        own = {name: tensor.to(self.device.torch_device) for name, tensor in batch.items()}
        was_training = self.model.training
        self.model.eval()
        try:
            return self.model(**own) if forward_fn is None else forward_fn(self.model, own)
        finally:
            self.model.train(was_training)
            torch_fsdp2.reshard(self.model)

    def save(self, meta: SaveLoadMeta) -> None:
        """Saves, and waits for it.

        Raises:
            CheckpointError: on all ranks, if it could not be saved, or something is at the path.
                No checkpoint is left there.
        """
        if meta.weight_format == "hf":
            self.state.optimizer.synchronize()
            save_hf(
                self.model,
                meta.path,
                self.device,
                tokenizer=meta.tokenizer,
                processor=meta.processor,
                base_model_path=meta.base_model_path,
                dtype=meta.hf_dtype,
            )
            return
        save_once(
            meta.path,
            self.state,
            self.device,
            with_optim=meta.with_optim,
            ckpt_format=self.config.ckpt_format or self.own_format,
        )

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads in place what `save` saved, on any number of ranks. After a step, all of it is read
        and checked first. An engine without a step reads once: it has no training to lose.

        Raises:
            CheckpointError: on all ranks, if it cannot be used; the engine is unchanged. A
                CheckpointDamagedError if it is damaged, a CheckpointNotFoundError without one. If
                the engine has made no step, it may then need another load before it is used.
            ConfigError: likewise, if its schedule differs from the engine's.
        """
        state = self._state or self.state  # of an engine after a load that broke off, too
        state.optimizer.synchronize()
        if meta.weight_format == "hf":
            load_hf(self.model, meta.path, adds_rows=meta.adds_rows)
            return

        root, name = split_path(meta.path)
        store = open_store(root)
        on_first_rank(lambda: expect_folder(store, name), f"looking for {meta.path}")
        flags = CheckpointConfig(load=root, finetune=not meta.with_optim)
        load_checkpoint(
            flags,
            self.config.schedule,
            state,
            self.device,
            store,
            name,
            checks_first=state.step_info != StepInfo(),
        )

    def step_info(self) -> StepInfo:
        """How far training has come; a copy."""
        return replace(self.state.step_info)

    def _shard(self, model: nn.Module, plan: OffloadPlan | None) -> None:
        """Hands the model to FSDP, if it is on meta with its initial weights."""
        if self.mesh.size() > 1:
            raise RuntimeError(
                f"Expected one process for a module that is not sharded, got {self.mesh.size()} "
                "ranks."
            )
        self._check_host_memory(model, plan)
        self._materialize(model)

    def _materialize(self, model: nn.Module) -> None:
        on_meta = [name for name, parameter in model.named_parameters() if parameter.is_meta]
        real = [name for name, parameter in model.named_parameters() if not parameter.is_meta]
        if on_meta and real:
            raise ValueError(
                f"Expected parameters that are all real or all on meta, got {few(on_meta)} on meta "
                "and others real."
            )
        if on_meta:
            materialize(model, self.device.torch_device, self.config.seed)
        else:
            model.to(self.device.torch_device)

    def _check_host_memory(self, model: nn.Module, plan: OffloadPlan | None) -> None:
        """Raises HostMemoryError before weights are allocated, if host memory is too small."""
        if self._kept is not None and self._kept.is_restored:
            return  # it is there already
        needs = host_needs(self.config.execution, self.device)
        if plan is not None and plan.host_numel:
            is_accelerator = self.device.is_accelerator
            settings = state_settings(self.config, self.mesh.size(), is_accelerator=is_accelerator)
            planned = plan_memory(model, settings, plan, self.mesh.get_local_rank())
            needs = planned.host_needs + needs
        elif not needs:
            return

        # All ranks or none: one whose part of the rows is empty takes part too.
        check_memory_on_all_ranks(needs, self._num_local_ranks, self.mesh)


class MegatronEngine(ModuleEngine):
    """`fully_shard` on flat buffers, with checkpoints that are written without communication."""

    _shards_modules = True

    def _shard(self, model: nn.Module, plan: OffloadPlan | None) -> None:
        config, compute_dtype = self.config, DTYPES[self.config.compute_dtype]
        self._check_host_memory(model, plan)
        megatron_fsdp.shard_model(
            model,
            self.mesh,
            self.device,
            config.parallel,
            compute_dtype=compute_dtype,
            reset_parameters=seeded_reset(model, self.device.torch_device, config.seed),
            main_params_dtype=DTYPES[config.optimizer.main_params_dtype],
            offloaded=plan.names_on_host if plan else (),
            pins_main_weights=config.optimizer.pins_states,
            kept=self._kept,
        )


class FSDPEngine(ModuleEngine):
    """PyTorch FSDP2. PyTorch DCP writes its checkpoints unless `ckpt_format` is `fsdp_dtensor`."""

    own_format = TORCH_DCP

    def _shard(self, model: nn.Module, plan: OffloadPlan | None) -> None:
        self._check_host_memory(model, plan)

        torch_fsdp2.shard_model(
            model,
            self.mesh,
            compute_dtype=DTYPES[self.config.compute_dtype],
            reshard_after_forward=self.config.parallel.torch_fsdp2_reshard_after_forward,
        )
        self._materialize(model)


def build_engine(
    config: EngineConfig,
    device: Device,
    mesh: DeviceMesh,
    *,
    num_local_ranks: int = 1,
    kept: KeptMemory | None = None,
) -> ModuleEngine:
    """The engine that `config.parallel` names, without a model yet."""
    kind = ModuleEngine
    if config.parallel.use_megatron_fsdp:
        kind = MegatronEngine
    elif config.parallel.use_torch_fsdp2:
        kind = FSDPEngine
    return kind(config, device, mesh, num_local_ranks=num_local_ranks, kept=kept)


def _counted(
    microbatches: Sequence[Batch] | Iterator[Batch], number: int | None
) -> tuple[Iterator[Batch], int]:
    """(an iterator, how many to take from it). ValueError if that is unknown or too few are
    there.
    """
    if isinstance(microbatches, Sequence):
        count = len(microbatches) if number is None else number
        if not 0 < count <= len(microbatches):
            raise ValueError(
                f"Expected at least {max(1, count)} microbatches, got {len(microbatches)}."
            )
        return iter(microbatches), count
    if number is None:
        raise ValueError("Expected num_microbatches with an iterator of microbatches, got none.")
    return microbatches, number
