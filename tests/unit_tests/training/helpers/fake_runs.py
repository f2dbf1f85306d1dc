"""The configuration of a small run, and fakes of its engine and saver that record in `calls` how
they are used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

from megatron.training.arguments import parse_config
from megatron.training.config import RunConfig
from megatron.training.step import Batch, StepInfo, StepResult


def config_of(*flags: str) -> RunConfig:
    model = ["--num-layers", "1", "--hidden-size", "8", "--num-attention-heads", "1"]
    data = ["--mock-data", "--seq-length", "8", "--micro-batch-size", "4", "--train-iters", "10"]
    tokenizer = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "16"]
    settings = [*model, *data, *tokenizer, "--lr", "1e-3", "--eval-interval", "4"]
    return parse_config([*settings, *flags], world_size=1)


class FakeEngine:
    """An engine on one rank with given losses, which does not compute.

    Args:
        losses: losses by iteration; 1.0 by default.
    """

    def __init__(self, calls: list[Any], losses: dict[int, float] | None = None) -> None:
        self.calls = calls
        self.losses = losses or {}
        optimizer = SimpleNamespace(
            synchronize=lambda: calls.append("synchronize"), timings=lambda: None
        )
        self.state = SimpleNamespace(
            step_info=StepInfo(), optimizer=optimizer, info=lambda **says: says
        )
        self.mesh = SimpleNamespace(size=lambda: 1, get_local_rank=lambda: 0, get_rank=lambda: 0)
        self.device = SimpleNamespace(pins_batches=False)

    def initialize(self, model: Callable[[], Any]) -> None:
        self.calls.append(("initialize", model()))

    def step_info(self) -> StepInfo:
        return StepInfo(**vars(self.state.step_info))

    def train_batch(
        self,
        microbatches: Iterator[Batch],
        forward_step: object,  # noqa: ARG002
        *,
        num_microbatches: int,
        votes: Callable[[], tuple[float, ...]],
        mark: Callable[[str], None],  # noqa: ARG002
        journal: object,  # noqa: ARG002
    ) -> StepResult:
        num_samples = sum(len(next(microbatches)["tokens"]) for _ in range(num_microbatches))
        info = self.state.step_info
        info.iteration += 1
        info.consumed_samples += num_samples
        self.calls.append(("step", info.iteration))
        return StepResult(
            self.losses.get(info.iteration, 1.0), 1.0, False, (), votes(), num_samples=num_samples
        )

    def eval_batch(
        self,
        microbatches: Iterator[Batch],
        forward_step: object,  # noqa: ARG002
        *,
        num_microbatches: int,
    ) -> float:
        num_samples = sum(len(next(microbatches)["tokens"]) for _ in range(num_microbatches))
        self.calls.append(("evaluate", num_samples))
        return 2.5


class FakeSaver:
    """A saver that does not write files."""

    is_saving = False
    is_late = False
    save_seconds = None

    def __init__(self, calls: list[Any]) -> None:
        self.calls = calls
        self.fails_at: set[int] = set()  # iterations whose saves fail
        self._has_failed = False

    def __enter__(self) -> FakeSaver:
        self.calls.append("enter saver")
        return self

    def __exit__(self, *_error: object) -> None:
        self.calls.append("leave saver")

    def take_failure(self) -> bool:
        has_failed, self._has_failed = self._has_failed, False
        return has_failed

    def prepare(self, engine: FakeEngine) -> None:  # noqa: ARG002
        self.calls.append("check")

    def save(self, engine: FakeEngine, info: dict[str, Any]) -> None:  # noqa: ARG002
        iteration = engine.step_info().iteration
        self._has_failed = iteration in self.fails_at
        self.calls.append(("save", iteration))

    def skip(self, iteration: int) -> None:
        self.calls.append(("skip", iteration))

    def wait(self) -> None:
        self.calls.append("wait")

    def save_last(self, engine: FakeEngine, info: dict[str, Any]) -> None:
        self.calls.append(("save_last", engine.step_info().iteration, info["evaluator"]))
