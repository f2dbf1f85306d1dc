"""`PlannedRun`: the memory of the run that flags describe, at any offload fraction."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from megatron.core.distributed.units import sharding_units, units_of
from megatron.core.models.gpt.activations import ActivationBytes, Microbatch, activation_bytes
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.optimizer.planned_memory import PlannedMemory, StateSettings, plan_memory
from megatron.core.options import ConfigError
from megatron.core.parts import freeze, split_names
from megatron.core.transformer.spec import ModelSpec
from megatron.training.arguments import parse_config
from megatron.training.checkpoint.hf_config import expect_model_folder, has_tokenizer
from megatron.training.config import RunConfig
from megatron.training.engines import state_settings
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size

OFFLOADING = (
    "--optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--overlap-optimizer-with-forward",
)

# Settings that a run requires and a plan does not.
_DEFAULTS = {
    "--train-iters": "1",
    "--micro-batch-size": "1",
    "--seq-length": "4096",
    "--lr": "1e-4",
}


class InUse(NamedTuple):
    """Bytes of whole weights and gradients, in addition to the states at rest.

    Attributes:
        root_weights: weights of the module that contains the layers: embedding and head, which are
            whole during the step.
        in_backward: these, their gradients, and weights and gradients of two layers: one is
            gathered or reduced while the other computes.
    """

    root_weights: int
    in_backward: int


class RunMemory(NamedTuple):
    """The memory of one rank at an offload fraction.

    Attributes:
        states: weights, gradients and the optimizer's states at rest.
        activations: the activations of one microbatch.
        activations_on_host: bytes of activations in host memory (--activation-offload).
        activations_room: bytes of host memory for them.
        in_use: whole weights and gradients of modules.
    """

    states: PlannedMemory
    activations: ActivationBytes
    activations_on_host: int
    activations_room: int
    in_use: InUse

    @property
    def activations_on_device(self) -> int:
        kept = self.activations.kept - self.activations_on_host
        return kept + self.activations.recomputed

    @property
    def device_nbytes(self) -> int:
        """Bytes at the step's peak."""
        on_top = self.whole_layers + self.loss
        return self.states.device_nbytes + self.activations_on_device + on_top

    @property
    def peaks_at_loss(self) -> bool:
        """Whether the peak is in the loss; otherwise it is in the backward of the last layer."""
        return self.in_use.root_weights + self.activations.loss > self.in_use.in_backward

    @property
    def whole_layers(self) -> int:
        """Bytes of whole weights and gradients at the peak."""
        return self.in_use.root_weights if self.peaks_at_loss else self.in_use.in_backward

    @property
    def loss(self) -> int:
        """Bytes of the loss at the peak."""
        return self.activations.loss if self.peaks_at_loss else 0

    @property
    def host_nbytes(self) -> int:
        return self.states.host_nbytes + self.activations_room


class PlannedRun:
    """A run with its model on meta.

    Attributes:
        config: the config of the flags.
        offloaded: the config with an offloaded optimizer; None if the flags do not allow it.
        refusal: the reason why they do not.
        world_size: the number of ranks, all on one machine.
        model: the model on meta, with frozen parameters.
    """

    def __init__(
        self,
        argv: Sequence[str],
        world_size: int,
        device_kind: str,
        model: GPTModel | None = None,
    ) -> None:
        """
        Args:
            argv: the flags of the run.
            device_kind: the kind of the planned device.
            model: the model of a run with the same flags for it; default: a new one.

        Raises:
            ConfigError: as the run.
        """
        self._argv = [*argv]
        self.world_size = world_size
        self.device_kind = device_kind
        self.config = parse_config(argv, world_size, needs_files=False)
        if self.config.vision is not None:
            raise ConfigError(
                "--vision-num-layers: expected a text model, got one with a vision tower, which "
                "cannot be planned."
            )

        self.offloaded: RunConfig | None = self.config
        self.refusal = ""
        if not self.config.optimizer.optimizer_cpu_offload:
            self.offloaded, self.refusal = _offloaded(argv, world_size)

        self.model = _model_on_meta(self.config) if model is None else model
        self._memory: dict[tuple[bool, float], RunMemory] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def numel(self) -> int:
        """The number of parameters over all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_microbatches(self) -> int:
        """The microbatches of a rank in one step."""
        size = self.config.parallel.data_parallel_size(self.world_size)
        return self.config.num_microbatches(size)

    @property
    def tokens_per_step(self) -> int:
        """The tokens of a step over all ranks."""
        return self.config.global_batch_size * self.config.data.seq_length

    @property
    def fraction(self) -> float | None:
        """The offload fraction of the flags; None: the optimizer is not offloaded."""
        optimizer = self.config.optimizer
        return optimizer.optimizer_offload_fraction if optimizer.optimizer_cpu_offload else None

    @property
    def microbatch(self) -> Microbatch:
        config = self.config
        return Microbatch(
            config.training.micro_batch_size,
            config.data.seq_length,
            self.states(config).compute_dtype.itemsize,
            self.device_kind,
            exchanges_tokens=config.parallel.expert_model_parallel_size > 1,
        )

    def states(self, config: RunConfig) -> StateSettings:
        """Returns the settings that determine the memory of weights, gradients and states."""
        is_accelerator = self.device_kind != "cpu"
        return state_settings(config.engine(), self.world_size, is_accelerator=is_accelerator)

    def at(self, fraction: float | None) -> RunConfig:
        """Returns the config at an offload fraction; None: without offloading."""
        if fraction is None:
            return self.config
        assert self.offloaded is not None, "callers check that the flags allow offloading"
        optimizer = dataclasses.replace(
            self.offloaded.optimizer, optimizer_offload_fraction=fraction
        )
        return dataclasses.replace(self.offloaded, optimizer=optimizer)

    def with_other_gradients(self) -> PlannedRun | None:
        """Returns the run with main gradients in 16 bits instead of fp32, or the reverse; None if
        only fp32 is possible.
        """
        precision = self.config.training.compute_dtype
        if precision == "fp32":
            return None
        dtype = "fp32" if self.config.parallel.main_grads_dtype != "fp32" else precision
        argv = [*self._argv, "--main-grads-dtype", dtype]
        try:
            return PlannedRun(argv, self.world_size, self.device_kind, self.model)
        except ConfigError:
            return None

    def plan(self, fraction: float | None) -> OffloadPlan | None:
        """Returns the offload plan at a fraction."""
        config = self.at(fraction)
        by_module = bool(config.parallel.use_megatron_fsdp)
        return plan_offload(self.model, config.optimizer, by_module=by_module)

    def memory(self, fraction: float | None) -> RunMemory:
        """Returns the memory of the first rank, which is the largest, at a fraction."""
        key = (fraction is None, fraction or 0.0)
        if key not in self._memory:
            self._memory[key] = self._counted(fraction)
        return self._memory[key]

    @cached_property
    def fractions(self) -> list[float]:
        """The fractions at which one more group is offloaded, in two digits where possible. The
        last is 1. Empty if no group can be offloaded.
        """
        if self.offloaded is None:
            return []
        everything = self.plan(1.0)
        assert everything is not None, "the optimizer is offloaded"
        order = sorted(
            range(len(everything.groups)),
            key=lambda index: (not everything.groups[index].goes_first, -index),
        )
        held, shares = 0, [0.0]
        for index in order:
            held += everything.groups[index].numel
            shares.append(held / everything.total_numel if everything.total_numel else 1.0)
        shares[-1] = 1.0
        found = [0.0, *(_shortest(low, high) for low, high in pairwise(shares) if high > low)]
        return list(dict.fromkeys(found))

    def _counted(self, fraction: float | None) -> RunMemory:
        config = self.at(fraction)
        states = plan_memory(self.model, self.states(config), self.plan(fraction))
        granularity = config.model.recompute_granularity
        activations = activation_bytes(
            self.spec, self.model.vocab_size, self.microbatch, granularity
        )
        room = config.execution.nbytes_of_host
        on_host = min(room, sum(activations.layers[:-2]))  # the last two stay
        return RunMemory(states, activations, on_host, room, self._in_use(states, config))

    def _in_use(self, states: PlannedMemory, config: RunConfig) -> InUse:
        if not states.shards.units:
            return self._tensors_in_use(config)
        layers = sharding_units(self.model)
        owners = {
            module: number for number, layer in enumerate(layers) for module in layer.modules()
        }

        weights, gradients = [0] * len(layers), [0] * len(layers)
        root_weights = root_gradients = partial = of_one = lane = largest = 0
        for unit, planned in zip(units_of(self.model), states.shards.units, strict=True):
            for group in planned.groups:
                partial += group.partial_grads_nbytes
                lane = max(lane, group.reduction_nbytes)
                if not group.defers_all_axes:
                    of_one = max(of_one, group.partial_grads_nbytes)
                numel = max(math.prod(parameter.shape) for parameter in group.parameters)
                if group.requires_grad:
                    largest = max(largest, numel // group.layout.num_blocks * group.dtype.itemsize)
                if unit.module is self.model:
                    root_weights += group.whole_weights_nbytes
                    root_gradients += group.whole_grads_nbytes
                else:
                    weights[owners[unit.module]] += group.whole_weights_nbytes
                    gradients[owners[unit.module]] += group.whole_grads_nbytes

        of_layers = _largest_two(weights)
        if not config.parallel.megatron_fsdp_reshard_after_forward:
            of_layers = sum(weights)
        # Sums of several microbatches wait for their reduction. Sums of one are reduced over the
        # other axes at once, in the two groups that are in flight.
        deferred = partial if self.num_microbatches > 1 else min(partial, 2 * of_one)
        # A gradient of autograd, before it is copied to its module's buffer.
        of_backward = root_gradients + _largest_two(gradients) + largest + deferred + lane
        return InUse(root_weights, root_weights + of_layers + of_backward)

    def _tensors_in_use(self, config: RunConfig) -> InUse:
        """Returns the bytes for PyTorch FSDP2, which reduces gradients in fp32; 0 otherwise."""
        if not config.parallel.use_torch_fsdp2:
            return InUse(0, 0)
        itemsize = self.states(config).compute_dtype.itemsize
        layers = [sum(p.numel() for p in u.parameters()) for u in sharding_units(self.model)]
        root, two = self.numel - sum(layers), _largest_two(layers)
        return InUse(root * itemsize, (root + two) * (itemsize + torch.float32.itemsize))


def _model_on_meta(config: RunConfig) -> GPTModel:
    tokenizer = build_tokenizer(config.tokenizer, rows_of=config.checkpoint.hf_model)
    with torch.device("meta"):
        model = GPTModel(config.model, padded_vocab_size(config.tokenizer, tokenizer))
    freeze(model, split_names(config.training.freeze or ()), "--freeze")
    return model


def _offloaded(argv: Sequence[str], world_size: int) -> tuple[RunConfig | None, str]:
    """Returns the run's config with an offloaded optimizer and all overlaps of its engine, or None
    and the reason why its flags do not allow that.
    """
    refusal = ""
    for flags in (OFFLOADING, OFFLOADING[:-1]):
        try:
            return parse_config([*argv, *flags], world_size, needs_files=False), ""
        except ConfigError as error:
            refusal = str(error)
    return None, refusal


def with_defaults(argv: Sequence[str]) -> list[str]:
    """Returns the flags of a run of a model directory, with defaults for required settings."""
    given = {word.partition("=")[0] for word in argv if word.startswith("--")}
    filled = [*argv]
    for flag, value in _DEFAULTS.items():
        if flag not in given:
            filled += [flag, value]
    if given.isdisjoint(("--data-path", "--mock-data")):
        filled.append("--mock-data")

    folder = next((value for flag, value in pairwise(argv) if flag == "--hf-model"), "")
    if given.isdisjoint(("--tokenizer-type", "--tokenizer-model")) and folder:
        expect_model_folder(folder)
        if not has_tokenizer(folder):
            # config.json has the rows of the embedding.
            filled += ["--tokenizer-type", "NullTokenizer"]
    return filled


def _largest_two(numbers: Sequence[int]) -> int:
    return sum(sorted(numbers, reverse=True)[:2])


def _shortest(low: float, high: float) -> float:
    """Returns the largest decimal in (low, high] with the fewest digits, at least two."""
    for digits in range(2, 17):
        scale = 10.0**digits
        rounded = int(high * scale) / scale
        if low < rounded <= high:
            return rounded
    return high
