"""Reports of a run: log lines, a progress bar, a JSONL file, TensorBoard, Weights & Biases.

`Metrics` is told of each step and evaluation and passes it to the sinks that were asked for. Only
rank 0 has any.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from megatron.core.files import reason_of
from megatron.core.lane_timings import LaneTimings
from megatron.core.options import ConfigError
from megatron.training.config import NO_FILE, LoggingConfig
from megatron.training.expert_load import CV_BY_LAYER, LOAD, load_record
from megatron.training.health.jsonl import JsonLines
from megatron.training.log_lines import (
    LoggedSteps,
    PeakMemory,
    long_evaluation,
    long_line,
    short_evaluation,
    short_line,
)
from megatron.training.progress_bar import Pace, ProgressBar
from megatron.training.step import StepResult

logger = logging.getLogger(__name__)

_MILLISECONDS = 1000.0
_GIGA = 1e9
_TERA = 1e12
_TIMES = ("d2h", "host", "h2d", "waited_d2h", "waited_host", "waited_h2d")
_LOSSES, _WANDB_RUN = "interval_losses", "wandb_run_id"  # keys of `Metrics.state`


class Sink(Protocol):
    """Writes records: a `kind` ("train", "eval" or "timing") and plain data by name with an
    `iteration`.
    """

    def write(self, kind: str, record: dict[str, Any]) -> None:
        """Writes a record."""

    def state(self) -> dict[str, Any]:
        """Plain data that the sink of a resumed run needs, under keys that no other sink uses."""

    def close(self) -> None:
        """Flushes and closes the sink."""


class JsonlSink:
    """One JSON object a line, appended. Numbers that are not finite become null.

    A resumed run appends to the same file, so it may hold an iteration twice: the later line
    counts. A line that cannot be written, for instance on a full disk, is dropped after one
    warning: a lost line must not end the training.
    """

    def __init__(self, path: str, *, must_work: bool = True) -> None:
        """
        Args:
            must_work: raise ConfigError if the file cannot be written. Otherwise that is a warning.
        """
        self._lines = JsonLines(path)
        self._has_warned = False
        try:
            self._lines.touch()
        except OSError as error:
            if must_work:
                raise ConfigError(
                    f"--metrics-jsonl: expected a file that can be written, got {path} "
                    f"({reason_of(error)})."
                ) from None
            self._warn(error)

    def write(self, kind: str, record: dict[str, Any]) -> None:
        try:
            self._lines.append({"kind": kind, **record})
        except OSError as error:
            self._warn(error)

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        """No effect: the file is not kept open between lines."""

    def _warn(self, error: OSError) -> None:
        if not self._has_warned:
            self._has_warned = True
            text = "Could not write %s: %s. It may lack lines from here on."
            logger.warning(text, self._lines.path, error)


class TensorBoardSink:
    """Scalars by iteration: `train/loss`, `validation/loss`, ...

    Drops the scalars of an earlier run in the same directory beyond `start_iteration`; curves would
    otherwise go back in time.
    """

    def __init__(self, folder: str, start_iteration: int) -> None:
        """Raises ConfigError for an unwritable directory."""
        # Not at the top: the import takes about a second, which runs without TensorBoard save.
        from torch.utils.tensorboard import SummaryWriter

        try:
            self._writer = SummaryWriter(folder, purge_step=start_iteration + 1)
        except OSError as error:
            raise ConfigError(
                f"--tensorboard-dir: expected a writable directory, got {folder} "
                f"({reason_of(error)})."
            ) from None

    def write(self, kind: str, record: dict[str, Any]) -> None:
        for name, value in _scalars(kind, record).items():
            self._writer.add_scalar(name, value, record["iteration"])

    def state(self) -> dict[str, Any]:
        return {}

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Weights & Biases, with the scalars' names of `TensorBoardSink`.

    A resumed run continues the run of its first start. The service drops iterations that are made
    again, since it takes steps in ascending order only.
    """

    def __init__(
        self, config: LoggingConfig, run_config: dict[str, Any], run_id: str | None = None
    ) -> None:
        import wandb

        self._run = wandb.init(
            project=config.wandb_project,
            name=config.wandb_exp_name,
            dir=config.wandb_save_dir,
            config=run_config,
            id=run_id,
            resume="allow",  # starts a new run if it was deleted
        )

    def write(self, kind: str, record: dict[str, Any]) -> None:
        self._run.log(_scalars(kind, record), step=record["iteration"])

    def state(self) -> dict[str, Any]:
        return {_WANDB_RUN: self._run.id}

    def close(self) -> None:
        self._run.finish()


def build_sinks(
    config: LoggingConfig,
    run_config: dict[str, Any],
    start_iteration: int,
    state: Mapping[str, Any] | None = None,
    default_jsonl: str | None = None,
) -> list[Sink]:
    """The sinks that were asked for, and the JSONL file. For rank 0 only.

    Args:
        run_config: the run's settings, for Weights & Biases.
        start_iteration: iterations made before this start.
        state: the result of the resumed run's `Metrics.state` on rank 0.
        default_jsonl: the JSONL file where none was named; a warning if it cannot be written.
    """
    sinks: list[Sink] = []
    jsonl = config.metrics_jsonl
    if jsonl is None and default_jsonl is not None:
        sinks.append(JsonlSink(default_jsonl, must_work=False))
    elif jsonl not in (None, NO_FILE):
        sinks.append(JsonlSink(jsonl))
    if config.tensorboard_dir is not None:
        sinks.append(TensorBoardSink(config.tensorboard_dir, start_iteration))
    if config.wandb_project is not None:
        run_id = (state or {}).get(_WANDB_RUN)
        sinks.append(WandbSink(config, run_config, run_id if isinstance(run_id, str) else None))
    return sinks


@dataclass(frozen=True)
class Rates:
    """The constants that turn a step's duration into throughput."""

    train_iters: int
    global_batch_size: int  # sequences
    seq_length: int  # tokens
    flops_per_sequence: float  # forward and backward
    num_devices: int


class Metrics:
    """A run's reports. Every rank has one, but only rank 0 has sinks and a logger that shows."""

    def __init__(
        self,
        rates: Rates,
        config: LoggingConfig,
        sinks: list[Sink],
        *,
        start_iteration: int,
        shows_progress: bool,
        state: Mapping[str, Any] | None = None,
        memory: Callable[[], PeakMemory] = lambda: PeakMemory(None, 0),
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """
        Args:
            sinks: empty on all ranks but 0.
            start_iteration: iterations made before this start.
            state: what `state` returned in the run that is resumed. Anything it lacks, or that
                cannot be used, starts afresh.
            memory: how much this process has held at most.
            clock: seconds.
        """
        self._rates = rates
        self._config = config
        self._sinks = sinks
        self._memory = memory
        self._is_short = config.is_short
        self._clock = clock
        self._losses = _saved_losses(state)  # the finite ones of the current interval
        self._pace = Pace()
        self._num_steps = 0  # of the interval, made by this process, which has their times
        # The mean of the interval so far, or of the one before.
        self.ms_per_iteration: float | None = None

        self._step_start = self._interval_start = clock()
        self._bar = ProgressBar(
            rates.train_iters, start_iteration, is_wanted=config.progress_bar and shows_progress
        )

    def step(
        self,
        result: StepResult,
        *,
        iteration: int,
        consumed_samples: int,
        learning_rate: float,
        skipped: int,
        nan: int,
    ) -> None:
        """Reports a training step; `iteration` counts from 1, `skipped` and `nan` since the start
        of the run.
        """
        now = self._clock()
        seconds, self._step_start = now - self._step_start, now
        self._num_steps += 1
        # The loss of a masked step is 0, and would lower the mean.
        loss = math.nan if result.is_masked else result.loss
        if math.isfinite(loss):
            self._losses.append(loss)
        self.ms_per_iteration = (now - self._interval_start) / self._num_steps * _MILLISECONDS
        is_first = self._pace.seconds is None
        self._pace.add(seconds)
        tokens_per_second, tflops = self._throughput(seconds)

        record = {
            "iteration": iteration,
            "consumed_samples": consumed_samples,
            "loss": loss,
            **{f"{name}_loss": value for name, value in result.auxiliary.items()},
            "grad_norm": result.grad_norm,
            **_optional_values(result),
            **load_record(result.expert_load, with_experts=self._config.moe_per_layer_logging),
            "learning_rate": learning_rate,
            "elapsed_ms": seconds * _MILLISECONDS,
            "tokens_per_second": tokens_per_second,
            "tflops_per_device": tflops,
            "skipped_iterations": skipped,
            "nan_iterations": nan,
        }
        # The first line includes memory too: most of it is allocated after one step.
        is_logged = iteration % self._config.log_interval == 0
        if self._sinks and (is_logged or is_first):
            record |= _memory_values(self._memory())
        for sink in self._sinks:
            sink.write("train", record)

        pace = self._pace.seconds or seconds
        self._bar.step(loss, self._throughput(pace)[0], pace)
        if is_logged:
            logger.info("%s", self._interval_line(record, result.auxiliary))
            self._restart_interval()

    def timings(self, timings: LaneTimings, iteration: int) -> None:
        """Reports how long the offloaded optimizer's lanes took since the last report, on this
        rank.
        """
        ms = {name: getattr(timings, name) * _MILLISECONDS for name in _TIMES}
        rate = timings.host_bytes_per_second
        details = [] if rate is None else [f"{rate / _GIGA:.1f} GB/s"]
        if timings.early_bytes:
            details.append(f"{100 * timings.early_share:.0f} % early")
        logger.info(
            "offload (ms a step): d2h %.1f, host %.1f%s, h2d %.1f; waited for d2h %.1f, host %.1f, "
            "h2d %.1f",
            ms["d2h"],
            ms["host"],
            f" ({', '.join(details)})" if details else "",
            *(ms[name] for name in ("h2d", "waited_d2h", "waited_host", "waited_h2d")),
        )

        values = {f"{name}_ms": value for name, value in ms.items()}
        if rate is not None:
            values["host_gb_per_second"] = rate / _GIGA
        if timings.early_bytes:
            values["early_share"] = timings.early_share
        self._write("timing", iteration, num_steps=timings.num_steps, **values)

    def activation_timings(self, timings: LaneTimings, iteration: int) -> None:
        """Reports how long the lanes of offloaded activations took since the last report, on this
        rank.
        """
        names = ("d2h", "h2d", "waited_d2h", "waited_h2d")
        ms = {name: getattr(timings, name) * _MILLISECONDS for name in names}
        logger.info(
            "activations (ms a step): d2h %.1f, h2d %.1f; waited for d2h %.1f, h2d %.1f",
            *ms.values(),
        )
        values = {f"{name}_ms": value for name, value in ms.items()}
        self._write("activation_timing", iteration, num_steps=timings.num_steps, **values)

    def evaluation(self, split: str, loss: float, iteration: int) -> None:
        """Reports an evaluation and leaves the time it took out of the next step's."""
        # exp overflows from 710 on; a loss above 20 has no perplexity worth reading anyway.
        perplexity = math.exp(min(loss, 20.0)) if math.isfinite(loss) else loss
        line = short_evaluation if self._is_short else long_evaluation
        logger.info("%s", line(split, iteration, loss, perplexity))
        self._write("eval", iteration, split=split, loss=loss, perplexity=perplexity)

    def shows(self, activity: str) -> None:
        """Shows an activity other than stepping on a terminal, until the clock resumes."""
        self._bar.shows(activity)

    def resume_clock(self) -> None:
        """Leaves the time since the last step (evaluating, saving) out of the next step's."""
        self._bar.resumes()
        pause = self._clock() - self._step_start
        self._step_start += pause
        self._interval_start += pause

    def state(self) -> dict[str, Any]:
        """Plain data with which a resumed run reports the same losses, to the bit, as this one
        would have. Times are not included.

        Rank 0's is the one to save: only there are sinks.
        """
        state: dict[str, Any] = {_LOSSES: list(self._losses)}
        for sink in self._sinks:
            state |= sink.state()
        return state

    def close(self) -> None:
        """Closes the bar and the sinks."""
        self._bar.close()
        for sink in self._sinks:
            sink.close()

    def _write(self, kind: str, iteration: int, **values: Any) -> None:
        """Writes a record to all sinks."""
        for sink in self._sinks:
            sink.write(kind, {"iteration": iteration, **values})

    def _throughput(self, seconds_per_step: float) -> tuple[float, float]:
        """(tokens a second over all devices, TFLOP/s of one device)."""
        sequences = self._rates.global_batch_size / max(seconds_per_step, 1e-9)
        return (
            sequences * self._rates.seq_length,
            sequences * self._rates.flops_per_sequence / self._rates.num_devices / _TERA,
        )

    def _restart_interval(self) -> None:
        self._losses.clear()
        self._num_steps = 0
        self._interval_start = self._clock()

    def _interval_line(self, record: dict[str, Any], auxiliary: Mapping[str, float]) -> str:
        """The line for the steps since the last one: means of the loss and the time, the rest as
        of now.
        """
        seconds = (self._step_start - self._interval_start) / self._num_steps
        tokens_per_second, tflops = self._throughput(seconds)
        interval = LoggedSteps(
            record=record,
            train_iters=self._rates.train_iters,
            global_batch_size=self._rates.global_batch_size,
            loss=sum(self._losses) / len(self._losses) if self._losses else math.nan,
            auxiliary=auxiliary,
            seconds=seconds,
            tokens_per_second=tokens_per_second,
            tflops=tflops,
            memory=self._memory(),
            pace=self._pace.seconds,
        )
        return short_line(interval) if self._is_short else long_line(interval)


def _saved_losses(state: Mapping[str, Any] | None) -> list[float]:
    """The interval's losses in a saved `Metrics.state`; none if they are not usable."""
    losses = (state or {}).get(_LOSSES)
    if not isinstance(losses, list):
        return []
    is_usable = all(isinstance(loss, float) and math.isfinite(loss) for loss in losses)
    return list(losses) if is_usable else []


def _optional_values(result: StepResult) -> dict[str, float]:
    """The values of a step that only some runs have."""
    values = {"loss_scale": result.loss_scale, "num_zeros": result.num_zeros}
    return {name: value for name, value in values.items() if value is not None}


def _memory_values(memory: PeakMemory) -> dict[str, int]:
    """The most bytes that rank 0 has held so far, where they are known."""
    values = {
        "peak_device_memory_bytes": memory.device,
        "peak_host_memory_bytes": memory.host or None,
    }
    return {name: value for name, value in values.items() if value is not None}


def _scalars(kind: str, record: dict[str, Any]) -> dict[str, float]:
    """A record's numbers under the names that TensorBoard and Weights & Biases show."""
    group = record.get("split", kind)
    scalars = {
        f"{group}/{key}": value
        for key, value in record.items()
        if key != "iteration" and isinstance(value, (int, float)) and not isinstance(value, bool)
    }
    # A curve for each layer is many: only where each expert's load is asked for, too.
    if LOAD in record:
        by_layer = enumerate(record[CV_BY_LAYER])
        scalars |= {f"{group}/expert_load_cv_of_layer_{n}": value for n, value in by_layer}
    return scalars
