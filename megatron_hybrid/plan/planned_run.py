"""`PlannedRun`: the memory of the run that flags describe, at any offload fraction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise

import torch

from megatron.core.layer_execution import use_low_precision
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import AUTO
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.rules import rule_of
from megatron.core.optimizer.torch_optimizer import parameter_groups
from megatron.core.options import ConfigError
from megatron.core.parts import freeze, split_names
from megatron.core.transformer.spec import ModelSpec
from megatron.training.arguments import parse_config
from megatron.training.checkpoint.hf_config import expect_model_folder, has_tokenizer
from megatron.training.config import RunConfig
from megatron.training.step_memory import (
    RunMemory,
    fractions_of,
    memory_of,
    microbatch_of,
    offload_plan,
)
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
    ) -> None:
        """
        Args:
            argv: the flags of the run.
            device_kind: the kind of the planned device.

        Raises:
            ConfigError: as the run.
        """
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

        self.model = _model_on_meta(self.config)
        self._memory: dict[tuple[bool, float], RunMemory] = {}

    @property
    def spec(self) -> ModelSpec:
        return self.model.spec

    @property
    def numel(self) -> int:
        """The number of parameters over all ranks."""
        return sum(parameter.numel() for parameter in self.model.parameters())

    @cached_property
    def trained_numel(self) -> int:
        """The number of trained parameters over all ranks."""
        return sum(p.numel() for p in self.model.parameters() if p.requires_grad)

    @cached_property
    def state_bytes(self) -> float:
        """The bytes of a trained element's optimizer states, on average: they may differ."""
        optimizer, total = self.config.optimizer, 0
        rule = rule_of(optimizer)
        for group in parameter_groups(self.model, optimizer):
            dtypes = rule.part_for({**rule.defaults, **group}).state_dtypes.values()
            numel = sum(parameter.numel() for parameter in group["params"])
            total += numel * sum(dtype.itemsize for dtype in dtypes)
        return total / self.trained_numel

    @cached_property
    def matrix_share(self) -> float:
        """The share of the trained elements that are in matrices of Muon."""
        optimizer = self.config.optimizer
        rule = rule_of(optimizer)
        numel: int = sum(
            parameter.numel()
            for group in parameter_groups(self.model, optimizer)
            if rule.part_for({**rule.defaults, **group}).takes_matrices
            for parameter in group["params"]
        )
        return numel / self.trained_numel

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
        """The offload fraction of the flags; None: the optimizer is not offloaded, or the plan must
        choose.
        """
        optimizer = self.config.optimizer
        if not optimizer.optimizer_cpu_offload or self.must_choose:
            return None
        is_auto = optimizer.optimizer_offload_fraction == AUTO
        return 0.0 if is_auto else optimizer.offload_fraction  # auto on the CPU

    @property
    def must_choose(self) -> bool:
        """Whether a run with these flags chooses its fraction by the device's memory."""
        is_auto = self.config.optimizer.optimizer_offload_fraction == AUTO
        return is_auto and self.device_kind != "cpu"

    @property
    def microbatch(self) -> Microbatch:
        return microbatch_of(self.config.engine(), self.device_kind)

    def at(self, fraction: float | None) -> RunConfig:
        """Returns the config at an offload fraction; None: without offloading."""
        if fraction is None:
            return self.config
        assert self.offloaded is not None, "callers check that the flags allow offloading"
        optimizer = dataclasses.replace(
            self.offloaded.optimizer, optimizer_offload_fraction=fraction
        )
        return dataclasses.replace(self.offloaded, optimizer=optimizer)

    def plan(self, fraction: float | None) -> OffloadPlan | None:
        """Returns the offload plan at a fraction."""
        return offload_plan(self.model, self.at(fraction).engine())

    def memory(self, fraction: float | None) -> RunMemory:
        """Returns the memory of the first rank, which is the largest, at a fraction."""
        key = (fraction is None, fraction or 0.0)
        if key not in self._memory:
            config = self.at(fraction).engine()
            self._memory[key] = memory_of(self.model, config, self.world_size, self.device_kind)
        return self._memory[key]

    @cached_property
    def fractions(self) -> list[float]:
        """See `fractions_of`. Empty if the flags do not allow offloading."""
        return [] if self.offloaded is None else fractions_of(self.model, self.offloaded.engine())


def _model_on_meta(config: RunConfig) -> GPTModel:
    tokenizer = build_tokenizer(config.tokenizer, rows_of=config.checkpoint.hf_model)
    tensor_size = config.parallel.tensor_model_parallel_size
    vocab_size = padded_vocab_size(config.tokenizer, tokenizer, tensor_size)
    with torch.device("meta"):
        model = GPTModel(config.model, vocab_size)
    freeze(model, split_names(config.training.freeze or ()), "--freeze")
    use_low_precision(model, config.low_precision, gathers_codes=config.parallel.gathers_codes)
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
