"""`TrainEngine`: what trains a model, as the training loop and programs of others see it.

    engine = MegatronEngine(config, device, mesh)       # or FSDPEngine
    engine.initialize(model)                            # any nn.Module, on meta or real
    result = engine.train_batch(microbatches, forward_step)
    engine.save(SaveLoadMeta("runs/mine/step_1000", with_optim=True))

The names are those of AReaL's engines; `megatron/training/engines.py` has the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn

from megatron.training.step import Batch, ForwardStep, Mark, StepResult, unmarked

WEIGHT_FORMATS = ("dcp", "hf")


@dataclass
class StepInfo:
    """How far training has come. With the schedule, all that going on needs besides tensors."""

    iteration: int = 0  # steps made, those that stepped nothing included
    consumed_samples: int = 0  # over all ranks
    skipped_iterations: int = 0  # that stepped nothing
    nan_iterations: int = 0  # whose loss was not finite


@dataclass(frozen=True)
class SaveLoadMeta:
    """What to save or load, and where.

    Attributes:
        path: the checkpoint's folder, new where it is saved, of another name than a run's own
            checkpoints have; for `dcp` of `MegatronEngine` also an fsspec URL.
        weight_format: `dcp`: PyTorch DCP, sharded, for going on with on any number of ranks. `hf`:
            safetensors with config.json, as transformers loads it; weights alone.
        with_optim: also the optimizer's states, the schedule, the random states and the counters.
        tokenizer: saved beside weights in `hf`: anything with `save_pretrained(folder)`.

    Raises:
        ValueError: for another format, and for what `hf` does not hold.
    """

    path: str
    weight_format: str = "dcp"
    with_optim: bool = False
    tokenizer: Any = None

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS:
            raise ValueError(
                f"Expected a weight format among {WEIGHT_FORMATS}, got {self.weight_format!r}."
            )
        if self.weight_format == "hf" and self.with_optim:
            raise ValueError(
                "Expected weights alone in the format hf, got with_optim=True; dcp holds states "
                "too."
            )
        if self.weight_format == "dcp" and self.tokenizer is not None:
            raise ValueError("Expected a tokenizer only with the format hf, got one with dcp.")


class TrainEngine(Protocol):
    """A model that is trained on all ranks of the default process group, which call every method
    together.
    """

    def initialize(self, model: nn.Module | Callable[[], nn.Module]) -> None:
        """Takes the model over: shards it, and builds its optimizer and schedule. Once.

        Args:
            model: fp32, with the same weights and buffers on every rank, and buffers that stay
                alike; or what builds one, which is called under the meta device. Parameters on meta
                get their initial weights from the `reset_parameters` of their modules.
        """

    def train_batch(
        self,
        microbatches: Sequence[Batch] | Iterator[Batch],
        forward_step: ForwardStep,
        *,
        num_microbatches: int | None = None,
        votes: Callable[[], tuple[float, ...]] = tuple,
        mark: Mark = unmarked,
    ) -> StepResult:
        """One step over a global batch; see `train_step`. The schedule sets the learning rate, the
        counters move on.

        Args:
            microbatches: this rank's. Of an iterator, `num_microbatches` are taken.
        """

    def eval_batch(
        self,
        microbatches: Sequence[Batch] | Iterator[Batch],
        forward_step: ForwardStep,
        *,
        num_microbatches: int | None = None,
    ) -> float:
        """The mean loss over all ranks' microbatches, without dropout; the same on every rank."""

    def forward(
        self, batch: Batch, forward_fn: Callable[[nn.Module, Batch], Any] | None = None
    ) -> Any:
        """What the model answers to one microbatch of this rank, without gradients or dropout.

        Args:
            forward_fn: calls the model; default: `model(**batch)`.
        """

    def save(self, meta: SaveLoadMeta) -> None:
        """Saves, and waits for it.

        Raises:
            CheckpointError: on all ranks, if it could not be saved, or there is something at the
                path. Nothing is left there then that could be taken for a checkpoint.
        """

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads in place what `save` has saved, on however many ranks. All of it is read and
        checked first.

        Raises:
            CheckpointError: on all ranks, if it cannot be used; the engine is what it was.
            ConfigError: likewise, if its schedule is another than the engine's.
        """

    def step_info(self) -> StepInfo:
        """How far training has come; a copy."""
