"""`TrainEngine`: a model that is trained, as the training loop and other programs see it.

    engine = MegatronEngine(config, device, mesh)       # or FSDPEngine
    engine.initialize(model)                            # any nn.Module, on meta or real
    result = engine.train_batch(microbatches, forward_step)
    engine.save(SaveLoadMeta("runs/mine/step_1000", with_optim=True))

The names follow the engines of AReaL; `megatron/training/engines.py` has the implementations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.activation_offload import ActivationOffload
from megatron.core.device import Device
from megatron.core.timeline import AnyTimeline
from megatron.training.checkpoint.hf_layout import check_dtype
from megatron.training.checkpoint.run_state import RunState
from megatron.training.step import Batch, ForwardStep, MarkPhase, StepInfo, StepResult, unmarked

WEIGHT_FORMATS = ("dcp", "hf")


@dataclass(frozen=True)
class SaveLoadMeta:
    """What to save or load, and where.

    Attributes:
        path: the checkpoint's directory. `save` creates it unless it exists and is empty; its name
            must not be one that a run's own checkpoints have. `dcp` of `MegatronEngine` takes an
            fsspec URL, too.
        weight_format: `dcp`: PyTorch DCP, sharded, to resume from on any number of ranks. `hf`:
            safetensors with config.json, as transformers loads it; weights alone.
        with_optim: also the optimizer's states, the schedule, the random states and the counters.
        tokenizer, processor: saved with `hf` weights; any object with `save_pretrained(directory)`.
        base_model_path: with `hf`, the directory of the model that training started from. Files
            that the save does not write itself are copied from there, weights excepted.
        hf_dtype: with `hf`, of all weights in the files but for fp32 parameters of an `Fp32Module`,
            which stay fp32; None: bf16 for those whose main weights are fp32. `torch.float32` keeps
            these to the bit, for `load` to bring back.
        adds_rows: with `hf`, whether the model may have more vocabulary rows
            than the folder's; `load_hf` says what they are.

    Raises:
        ValueError: for another format, what `hf` does not hold, and other dtypes.
    """

    path: str
    weight_format: str = "dcp"
    with_optim: bool = False
    tokenizer: Any = None
    processor: Any = None
    base_model_path: str | None = None
    hf_dtype: torch.dtype | None = None
    adds_rows: bool = False

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
        check_dtype(self.hf_dtype)
        for name in ("tokenizer", "processor", "base_model_path", "hf_dtype"):
            if self.weight_format == "dcp" and getattr(self, name) is not None:
                raise ValueError(
                    f"Expected a {name} only with the format hf, got one with dcp, which has no "
                    "use for it."
                )


class TrainEngine(Protocol):
    """A model that is trained on all ranks, which call every method together."""

    @property
    def device(self) -> Device:
        """The device that this rank computes on."""

    @property
    def mesh(self) -> DeviceMesh:
        """One axis, over all ranks of the default process group."""

    @property
    def state(self) -> RunState:
        """Model, optimizer, schedule and counters, as they are at the moment.

        Raises:
            RuntimeError: before `initialize`.
        """

    @property
    def activations(self) -> ActivationOffload | None:
        """What moves the activations of the layers to host memory and back; None: they stay."""

    def initialize(self, model: nn.Module | Callable[[], nn.Module]) -> None:
        """Shards the model, and builds its optimizer and schedule. Called once.

        Args:
            model: in fp32, with the same weights and buffers on every rank, and buffers that stay
                equal; or a function that builds one, which is called under the meta device.
                Parameters on meta get their initial weights from the `reset_parameters` of their
                modules.
        """

    def record_to(self, timeline: AnyTimeline) -> None:
        """From now on, shows a timeline what the lanes of engine and optimizer do, and what the
        computation waits for. Its phases are told to `mark` of `train_batch`.

        RuntimeError if the optimizer or the activations are offloaded and record nothing
        (`EngineConfig.records_timings`).
        """

    def train_batch(
        self,
        microbatches: Sequence[Batch] | Iterator[Batch],
        forward_step: ForwardStep,
        *,
        num_microbatches: int | None = None,
        votes: Callable[[], tuple[float, ...]] = tuple,
        mark: MarkPhase = unmarked,
    ) -> StepResult:
        """Forward, backward and the optimizer's step over a global batch, at the schedule's rate;
        the counters advance. A loss or gradient norm that is not finite steps nothing.

        Args:
            microbatches: this rank's. Of an iterator, `num_microbatches` are taken.
            forward_step: gives the loss of a microbatch, as a tensor or as a `ModelLoss`, whose
                auxiliary losses are trained with and whose expert loads move expert biases.
            votes: called after the backward; the result holds the sums of its numbers over ranks.
            mark: called with each phase of the step as it begins.

        Raises:
            RuntimeError: on all ranks, and before anything is done, for a step beyond the end of
                the run and of a schedule whose last rate is 0: it would train nothing. Where that
                rate is more, it is used, with a warning once.
        """

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

    def forward(
        self, batch: Batch, forward_fn: Callable[[nn.Module, Batch], Any] | None = None
    ) -> Any:
        """The model's output for one microbatch of this rank, without gradients or dropout.

        Args:
            forward_fn: calls the model; default: `model(**batch)`.
        """

    def save(self, meta: SaveLoadMeta) -> None:
        """Saves, and waits for it.

        Raises:
            CheckpointError: on all ranks, if it could not be saved, or something is at the path.
                Nothing that looks like a checkpoint is left there.
        """

    def load(self, meta: SaveLoadMeta) -> None:
        """Loads in place what `save` saved, on any number of ranks. All of it is read and checked
        first.

        Raises:
            CheckpointError: on all ranks, if it cannot be used; the engine is unchanged.
            ConfigError: likewise, if its schedule differs from the engine's.
        """

    def step_info(self) -> StepInfo:
        """How far training has come; a copy."""
