"""`PlannedRun`: the run that flags describe, with its model on meta, at any offload fraction."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch

from megatron.core.distributed.units import sharding_units
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
from megatron.training.tokenizer import build_tokenizer, padded_vocab_size

OFFLOADING = (
    "--optimizer-cpu-offload",
    "--overlap-cpu-optimizer-d2h-h2d",
    "--overlap-optimizer-with-forward",
)

# What a run must be told and a plan need not: a folder of weights says nothing of a run.
_DEFAULTS = {
    "--train-iters": "1",
    "--micro-batch-size": "1",
    "--seq-length": "4096",
    "--lr": "1e-4",
}


class InUse(NamedTuple):
    """Bytes of whole weights and gradients on top of what is at rest.

    Attributes:
        root_weights: of the module that contains the layers: embedding and head, which are whole
            throughout a step.
        in_backward: these, their gradients, and weights and gradients of two layers: one is
            gathered, or reduced, while the other computes.
    """

    root_weights: int
    in_backward: int


class RunMemory(NamedTuple):
    """What one rank takes at a fraction.

    Attributes:
        states: of weights, gradients and the optimizer's states, at rest.
        activations: of one microbatch.
        activations_on_host: of these, what --activation-offload keeps in host memory, and what it
            takes there.
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
        """At the step's peak."""
        on_top = self.whole_layers + self.loss
        return self.states.device_nbytes + self.activations_on_device + on_top

    @property
    def peaks_at_loss(self) -> bool:
        """Whether the peak is while losses are computed; else it is in the backward of layers,
        which begins with the last one.
        """
        return self.in_use.root_weights + self.activations.loss > self.in_use.in_backward

    @property
    def whole_layers(self) -> int:
        """Whole weights and gradients at the peak."""
        return self.in_use.root_weights if self.peaks_at_loss else self.in_use.in_backward

    @property
    def loss(self) -> int:
        """What the loss takes at the peak."""
        return self.activations.loss if self.peaks_at_loss else 0

    @property
    def host_nbytes(self) -> int:
        return self.states.host_nbytes + self.activations_room


class PlannedRun:
    """See the module's docstring.

    Attributes:
        config: of the run as its flags have it.
        offloaded: the same with the optimizer in host memory; None if these flags do not allow it.
        refusal: why they do not.
        world_size: its ranks, all of them on one machine.
        model: on meta, with frozen what will be.
    """

    def __init__(self, argv: Sequence[str], world_size: int, device_kind: str) -> None:
        """
        Args:
            argv: flags of the run.
            device_kind: of the device that the plan is for.

        Raises:
            ConfigError: as the run would.
        """
        self._argv = [*argv]
        self.world_size = world_size
        self.device_kind = device_kind
        self.config = parse_config(argv, world_size, needs_files=False)
        if self.config.vision is not None:
            raise ConfigError(
                "--vision-num-layers: expected a model of text alone, got one with a vision tower, "
                "which the plan does not know."
            )

        self.offloaded: RunConfig | None = self.config
        self.refusal = ""
        if not self.config.optimizer.optimizer_cpu_offload:
            self.offloaded, self.refusal = _offloaded(argv, world_size)

        settings = self.config.tokenizer
        tokenizer = build_tokenizer(settings, rows_of=self.config.checkpoint.hf_model)
        with torch.device("meta"):
            self.model = GPTModel(self.config.model, padded_vocab_size(settings, tokenizer))
        freeze(self.model, split_names(self.config.training.freeze or ()), "--freeze")
        self._memory: dict[tuple[bool, float], RunMemory] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def numel(self) -> int:
        """Parameters, over all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @property
    def num_microbatches(self) -> int:
        """Of one step of a rank."""
        return self.config.num_microbatches(self.world_size)

    @property
    def tokens_per_step(self) -> int:
        """Over all ranks."""
        return self.config.global_batch_size * self.config.data.seq_length

    @property
    def fraction(self) -> float | None:
        """In host memory, as the flags have it; None: the optimizer is not offloaded."""
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
        """What decides about the memory of weights, gradients and states."""
        is_pinned = self.device_kind != "cpu"
        return config.engine().states(self.world_size, pins_memory=is_pinned)

    def at(self, fraction: float | None) -> RunConfig:
        """The run with this fraction in host memory. None: without offloading."""
        if fraction is None:
            return self.config
        assert self.offloaded is not None, "asked for only where flags allow offloading"
        optimizer = dataclasses.replace(
            self.offloaded.optimizer, optimizer_offload_fraction=fraction
        )
        return dataclasses.replace(self.offloaded, optimizer=optimizer)

    def with_other_gradients(self) -> PlannedRun | None:
        """The same with main gradients in fp32 instead of 16 bits, or the other way round; None
        where only fp32 is possible.
        """
        precision, parallel = self.config.training.compute_dtype, self.config.parallel
        if precision == "fp32":
            return None
        dtype = "fp32" if parallel.main_grads_dtype != "fp32" else precision
        argv = [*self._argv, "--main-grads-dtype", dtype]
        other = copy.copy(self)
        try:
            other.config = parse_config(argv, self.world_size, needs_files=False)
        except ConfigError:
            return None
        other._argv, other._memory, other.offloaded = argv, {}, other.config
        if not self.config.optimizer.optimizer_cpu_offload:
            other.offloaded, other.refusal = _offloaded(argv, self.world_size)
        return other

    def plan(self, fraction: float | None) -> OffloadPlan | None:
        """Which groups are in host memory then."""
        config = self.at(fraction)
        by_module = bool(config.parallel.use_megatron_fsdp)
        return plan_offload(self.model, config.optimizer, by_module=by_module)

    def memory(self, fraction: float | None) -> RunMemory:
        """What the first rank, which has as much as any other, takes at a fraction."""
        key = (fraction is None, fraction or 0.0)
        if key not in self._memory:
            self._memory[key] = self._counted(fraction)
        return self._memory[key]

    @cached_property
    def fractions(self) -> list[float]:
        """The fractions at which one more group goes to the host, in two digits where these tell
        groups apart, and the last is 1; empty where nothing can be offloaded.
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
        if not states.groups:
            return self._tensors_in_use(config)
        owners = {id(self.model): -1}
        layers = sharding_units(self.model)
        for number, layer in enumerate(layers):
            owners |= {id(module): number for module in layer.modules()}

        weights, gradients = [0] * len(layers), [0] * len(layers)
        root_weights = root_gradients = partial = largest = 0
        for unit, parameters, memory in states.groups:
            owner = owners[id(unit)]
            partial += memory.partial_grads_nbytes
            numel = max(parameter.numel() for parameter in parameters)
            if memory.requires_grad:
                largest = max(largest, numel // memory.layout.num_blocks * memory.dtype.itemsize)
            if owner < 0:
                root_weights += memory.whole_weights_nbytes
                root_gradients += memory.whole_grads_nbytes
            else:
                weights[owner] += memory.whole_weights_nbytes
                gradients[owner] += memory.whole_grads_nbytes

        of_layers = _largest_two(weights)
        if not config.parallel.megatron_fsdp_reshard_after_forward:
            of_layers = sum(weights)
        # Sums of several microbatches wait for their reduction; those of one do not.
        deferred = partial if self.num_microbatches > 1 else 0
        # A gradient as autograd makes it, before it is copied to where those of its module lie.
        of_backward = root_gradients + _largest_two(gradients) + largest + deferred
        return InUse(root_weights, root_weights + of_layers + of_backward)

    def _tensors_in_use(self, config: RunConfig) -> InUse:
        """The same of PyTorch FSDP2, whose gradients are reduced in fp32; nothing without
        sharding.
        """
        if not config.parallel.use_torch_fsdp2:
            return InUse(0, 0)
        itemsize = self.states(config).compute_dtype.itemsize
        layers = [sum(p.numel() for p in u.parameters()) for u in sharding_units(self.model)]
        root, two = self.numel - sum(layers), _largest_two(layers)
        return InUse(root * itemsize, (root + two) * (itemsize + torch.float32.itemsize))


def _offloaded(argv: Sequence[str], world_size: int) -> tuple[RunConfig | None, str]:
    """The run with its optimizer in host memory, with every overlap that its engine has; or None,
    and why these flags do not allow it.
    """
    refusal = ""
    for flags in (OFFLOADING, OFFLOADING[:-1]):
        try:
            return parse_config([*argv, *flags], world_size, needs_files=False), ""
        except ConfigError as error:
            refusal = str(error)
    return None, refusal


def with_defaults(argv: Sequence[str]) -> list[str]:
    """The flags of a run of a folder's model, with what a plan need not be told filled in."""
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
            # The rows of the embedding are in config.json, and a plan tokenizes nothing.
            filled += ["--tokenizer-type", "NullTokenizer"]
    return filled


def _largest_two(numbers: Sequence[int]) -> int:
    return sum(sorted(numbers, reverse=True)[:2])


def _shortest(low: float, high: float) -> float:
    """The decimal above `low` and at most `high` with the fewest digits, two or more; the largest
    of these.
    """
    for digits in range(2, 17):
        scale = 10.0**digits
        rounded = int(high * scale) / scale
        if low < rounded <= high:
            return rounded
    return high
