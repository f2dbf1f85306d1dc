"""`pretrain`: from a configuration and three functions to a trained model.

The caller provides the model, the data, and the forward step from a microbatch to a loss.
Everything else (ranks, sharding, precision, optimizer, checkpoints, recovery, reports) is here and
independent of the model.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store

from megatron.core import log, numa
from megatron.core.datasets.sample_dataset import SampleDataset, SplitDatasets
from megatron.core.device import Device, kind_of, peak_host_memory_bytes
from megatron.core.files import Sync, published
from megatron.core.issued_collectives import issuing
from megatron.core.mesh import build_mesh, failed_collective
from megatron.core.options import ConfigError
from megatron.core.parts import freeze, split_names
from megatron.training.arguments import as_yaml
from megatron.training.checkpoint.kept_state import KeptState
from megatron.training.checkpoint.loading import Loaded
from megatron.training.checkpoint.resume import Resumer
from megatron.training.checkpoint.run_info import RecoverInfo
from megatron.training.checkpoint.run_state import place_of, split_path
from megatron.training.checkpoint.saver import Frequency, Saver
from megatron.training.config import RunConfig, iterations_of
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.health.events import CONFIG_FILE, STOPPED, EventKind, EventLog
from megatron.training.health.exits import ExitCode, ExitError, code_of, is_foreseen
from megatron.training.health.inject import Injections
from megatron.training.health.progress import Phase
from megatron.training.health.signals import OnInterrupt
from megatron.training.health.watchdog import Watchdog
from megatron.training.lane_profile import NO_LANE_PROFILE, AnyLaneProfile, LaneProfile
from megatron.training.launch import Launch, process_group
from megatron.training.log_lines import PeakMemory
from megatron.training.loop import Loop, NoWatch, Watch, num_train_samples
from megatron.training.metrics import Metrics, Rates, build_sinks
from megatron.training.rng import seed_all
from megatron.training.step import ForwardStep, StepInfo
from megatron.training.stop import Stop, StopConditions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """How a run ended; the same on every rank."""

    iteration: int
    validation_loss: float | None
    test_loss: float | None
    code: ExitCode = ExitCode.FINISHED
    reason: str = "trained to the end"


@dataclass(frozen=True)
class Providers:
    """Factories that the caller of `pretrain` provides."""

    model: Callable[[RunConfig], nn.Module]
    datasets: Callable[[RunConfig, tuple[int, int, int]], SplitDatasets]
    forward_step: ForwardStep
    flops_per_sequence: float


def pretrain(
    config: RunConfig,
    *,
    model_provider: Callable[[RunConfig], nn.Module],
    datasets_provider: Callable[[RunConfig, tuple[int, int, int]], SplitDatasets],
    forward_step: ForwardStep,
    flops_per_sequence: float,
) -> Outcome:
    """Trains, evaluates, saves and recovers as configured. All ranks call it together.

    Args:
        config: resolved for the number of ranks.
        model_provider: builds the model; called under the meta device. Its modules initialise their
            own parameters in `reset_parameters`.
        datasets_provider: builds the training, validation and test datasets with at least the given
            numbers of samples.
        forward_step: (model, microbatch) -> the microbatch's mean loss, or a `ModelLoss`.
        flops_per_sequence: forward and backward, for the throughput that is logged.

    Raises:
        ExitError: for an end with a dedicated exit code; LOST_RANK if another rank is the cause.
    """
    launch = Launch.from_environment()
    if config.recover.keep_host_state and not launch.is_elastic:
        raise ConfigError(
            "--keep-host-state: expected torchrun or `python -m megatron_hybrid launch`, which "
            "restart the ranks, got neither."
        )
    log.configure(launch.rank, short_time=config.logging.is_short)

    numa.set_binding(is_on=config.device.numa_binding)
    kind = kind_of(config.device.device)
    device = Device.for_rank(kind, launch.local_rank, launch.local_world_size)
    has_machines = launch.world_size > launch.local_world_size
    if has_machines or config.parallel.has_exchanges:
        device.order_collectives()
    providers = Providers(model_provider, datasets_provider, forward_step, flops_per_sequence)
    is_embedded = dist.is_initialized()
    # The stop conditions outlive the watchdog, which may look late at a signal and must then still
    # find it handled.
    with (
        device.deterministic() if config.training.deterministic_mode else nullcontext(),
        process_group(
            launch,
            device,
            config.parallel.distributed_timeout_minutes,
            watched_seconds=max(_hang_limits(config)),
        ),
        StopConditions(config.stop, rank=launch.rank, is_watched=not is_embedded) as stop,
    ):
        launch = replace(launch, restart_count=_agreed_restart_count(launch, device))
        events = EventLog(config.events_dir, rank=launch.rank, restart=launch.restart_count)
        if launch.rank == 0:
            _tell_start(events, launch, config)
            _write_config(config)

        with _watch(config, launch, events, is_embedded) as watch:
            run = _Run(config, providers, launch, device, events, stop, watch)
            with run.told_how_it_ends():
                outcome = run.run()
            run.write_exit(outcome.code, outcome.reason, outcome.iteration)
            return outcome


def _tell_start(events: EventLog, launch: Launch, config: RunConfig) -> None:
    """Starts the event log. Raises ConfigError if the directory was named by the user and is not
    writable.
    """
    if config.logging.events_dir is not None:
        events.require_folder()
    metrics = config.metrics_jsonl
    events.write(
        EventKind.START,
        iteration=None,
        world_size=launch.world_size,
        pid=os.getpid(),
        host=socket.gethostname(),
        command=sys.argv,
        max_restarts=_max_restarts(),
        metrics=None if metrics is None else str(Path(metrics).absolute()),
        settings=config.given(),
    )


def _write_config(config: RunConfig) -> None:
    """Writes the effective configuration next to the events, and logs its path. A failing disk is
    a warning.
    """
    if config.events_dir is None:
        logger.info("configuration: not written, since neither --save nor --events-dir is given")
        return
    path = Path(config.events_dir) / CONFIG_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with published(path, Sync.NOTHING) as stream:
            stream.write(as_yaml(config).encode())
    except OSError as error:
        logger.warning("configuration: %s could not be written: %s", path, error)
        return
    logger.info("configuration: %s", path)


class _Run:
    """One start of a run, from its model to its end."""

    def __init__(
        self,
        config: RunConfig,
        providers: Providers,
        launch: Launch,
        device: Device,
        events: EventLog,
        stop: StopConditions,
        watch: Watch,
    ) -> None:
        self._config = config
        self._providers = providers
        self._launch = launch
        self._device = device
        self._events = events
        self._stop = stop
        self._watch = watch
        self._step_info = StepInfo()  # the engine's own, once there is one
        self._kept: KeptState | None = None
        self._told: Exception | None = None  # the error that the event log has already
        self._injections = Injections(
            config.inject, rank=launch.rank, restart=launch.restart_count, events=events
        )
        self._profile = self._lane_profile()

    def run(self) -> Outcome:
        """Builds the engine, resumes, and trains."""
        config = self._config
        if config.recover.keep_host_state:
            self._kept = KeptState.open(config, self._launch, self._device)
        engine = self._built_engine()
        loaded = self._resume(engine)
        if isinstance(self._profile, LaneProfile):
            engine.record_to(self._profile.timeline)
        step_info = engine.state.step_info
        self._watch.status(iteration=step_info.iteration, train_iters=config.training.train_iters)

        self._mark(Phase.DATA, step_info.iteration)
        datasets = self._providers.datasets(config, _num_samples(config, step_info))
        with self._metrics(step_info, loaded) as metrics, self._saver() as saver:
            loop = self._loop(engine, metrics, saver, datasets.train, loaded)
            # Reported here, while a pending save may still be published: leaving the context
            # gives it up.
            with self.told_how_it_ends():
                return self._train(loop, datasets)

    def _built_engine(self) -> ModuleEngine:
        self._mark(Phase.BUILD, 0)
        engine = build_engine(
            self._config.engine(),
            self._device,
            build_mesh(self._device.kind, self._launch.world_size),
            num_local_ranks=self._launch.local_world_size,
            kept=None if self._kept is None else self._kept.memory,
        )

        engine.initialize(self._built_model)
        if self._kept is not None:
            self._kept.attach(engine)
        self._step_info = engine.state.step_info
        # After the weights, which have separate seeds: only dropout draws from here on.
        seed_all(self._config.training.seed, self._launch.rank)
        return engine

    def _built_model(self) -> nn.Module:
        """The model, on meta, without gradients of frozen parameters."""
        model = self._providers.model(self._config)
        freeze(model, split_names(self._config.training.freeze or ()), "--freeze")
        return model

    def _resume(self, engine: ModuleEngine) -> Loaded | None:
        self._mark(Phase.LOAD, 0)
        resumer = Resumer(
            self._config,
            self._device,
            events=self._events,
            restart_count=self._launch.restart_count,
        )
        loaded = resumer.load(engine, self._kept)
        if not self._config.training.skip_train:
            resumer.prepare_folder(engine, loaded)
        return loaded

    def _lane_profile(self) -> AnyLaneProfile:
        iterations, folder = self._config.logging.profile_lanes, self._config.timelines_dir
        if iterations is None or folder is None:
            return NO_LANE_PROFILE
        return LaneProfile(
            iterations_of(iterations),
            Path(folder),
            self._device,
            rank=self._launch.rank,
            world_size=self._launch.world_size,
        )

    def _saver(self) -> Saver:
        return Saver(
            self._config,
            self._device,
            num_local_ranks=self._launch.local_world_size,
            events=self._events,
            wrap_store=self._injections.store,
            timeline=self._profile.timeline,
        )

    def _loop(
        self,
        engine: ModuleEngine,
        metrics: Metrics,
        saver: Saver,
        train_data: SampleDataset | None,
        loaded: Loaded | None,
    ) -> Loop:
        # None without a loaded checkpoint, or with weights only, which contain no run state.
        info = None if loaded is None else loaded.info
        return Loop(
            engine,
            self._config,
            self._providers.forward_step,
            metrics,
            self._stop,
            saver,
            _frequency(self._config, train_data),
            self._events,
            self._watch,
            self._injections,
            self._mark,
            data=_described(self._config, train_data, info),
            evaluated=_evaluated(engine.state.step_info, info),
            profile=self._profile,
            kept=self._kept,
            unreported=None if loaded is None else loaded.unreported,
        )

    @contextmanager
    def told_how_it_ends(self) -> Iterator[None]:
        """Writes an error that leaves the context to the event log, once. It becomes an ExitError
        if another rank is its cause.
        """
        try:
            yield
        except Exception as error:
            if error is self._told:
                raise
            self._told = error
            if is_foreseen(error) or not isinstance(self._watch, Watchdog):
                self.write_exit(code_of(error), str(error), self._step_info.iteration)
                raise
            cause = self._watch.explain(error)  # which writes it to the log
            if cause.is_own:
                raise
            self._told = ExitError(cause.code, cause.text, is_reported=True)
            raise self._told from error

    def write_exit(self, code: ExitCode, reason: str, iteration: int) -> None:
        """The event of the run's end, from rank 0."""
        if self._launch.rank == 0:
            is_early = iteration < self._config.training.train_iters
            name = STOPPED if code is ExitCode.FINISHED and is_early else code.name
            self._events.write(
                EventKind.EXIT, code=int(code), name=name, reason=reason, iteration=iteration
            )

    def _train(self, loop: Loop, datasets: SplitDatasets) -> Outcome:
        """Trains, unless that is to be skipped, and evaluates at the end, unless the run stopped
        before it.
        """
        stop: Stop | None = None
        if not self._config.training.skip_train and datasets.train is not None:
            stop = loop.train(datasets.train, datasets.valid)
            logger.info("peak memory of rank 0: %.1f MiB", self._device.peak_memory_bytes() / 2**20)

        def final_loss(dataset: SampleDataset | None, split: str) -> float | None:
            if dataset is None or stop is not None:
                return None
            return loop.evaluate(dataset, split)

        outcome = Outcome(
            iteration=self._step_info.iteration,
            validation_loss=final_loss(datasets.valid, "validation"),
            test_loss=final_loss(datasets.test, "test"),
        )
        return outcome if stop is None else replace(outcome, code=stop.code, reason=stop.reason)

    def _mark(self, phase: Phase, iteration: int) -> None:
        """Marks the start of a phase for timeline and watchdog, and injects faults that are due."""
        self._profile.phase(phase)
        self._watch.mark(phase, iteration)
        self._injections.at(phase, iteration)

    @contextmanager
    def _metrics(self, step_info: StepInfo, loaded: Loaded | None) -> Iterator[Metrics]:
        config, is_first = self._config, self._launch.rank == 0
        rates = Rates(
            train_iters=config.training.train_iters,
            global_batch_size=config.global_batch_size,
            seq_length=config.data.seq_length,
            flops_per_sequence=self._providers.flops_per_sequence,
            num_devices=self._launch.world_size,
        )
        state, continues, save = None, False, config.checkpoint.save
        reported = step_info.iteration
        if loaded is not None and loaded.unreported is not None:
            reported -= 1
        if loaded is not None and loaded.info is not None:
            state = loaded.info.logger
            # A run that branches off another one has separate reports.
            path = loaded.path
            continues = path is None or (save is not None and split_path(path)[0] == place_of(save))

        metrics = Metrics(
            rates,
            config.logging,
            build_sinks(
                config.logging,
                config.values(),
                reported,
                state if continues else None,
                config.metrics_jsonl,
            )
            if is_first
            else [],
            start_iteration=reported,
            shows_progress=is_first,
            state=state,
            memory=lambda: PeakMemory(
                self._device.peak_memory_bytes() if self._device.is_accelerator else None,
                peak_host_memory_bytes(),
            ),
        )
        try:
            yield metrics
        finally:
            metrics.close()


def _max_restarts() -> int | None:
    """How often torchrun's agent restarts its ranks; None without one."""
    text = os.environ.get("TORCHELASTIC_MAX_RESTARTS", "")
    return int(text) if text.isdigit() else None


def _agreed_restart_count(launch: Launch, device: Device) -> int:
    """The largest count of any rank: torchrun's agents count only their own ranks' failures."""
    count = torch.tensor(launch.restart_count, device=device.torch_device)
    with issuing("all-reduce of the number of restarts", count):
        dist.all_reduce(count, dist.ReduceOp.MAX)
    return int(count)


def _num_samples(config: RunConfig, step_info: StepInfo) -> tuple[int, int, int]:
    """Samples that the run needs of each split."""
    num_train = 0 if config.training.skip_train else num_train_samples(config, step_info)
    num_eval = config.training.eval_iters * config.global_batch_size
    return num_train, num_eval, num_eval


def _frequency(config: RunConfig, train_data: SampleDataset | None) -> Frequency:
    """The intervals between saves in steps and samples. ConfigError for epochs of endless data."""
    checkpoint, samples = config.checkpoint, None
    if checkpoint.save_interval_epochs is not None and train_data is not None:
        epoch = _samples_per_epoch(train_data)
        if epoch is None:
            raise ConfigError(
                "--save-interval-epochs: expected training data from one source, whose end can be "
                f"known, got {type(train_data).__name__}."
            )
        samples = max(1, round(checkpoint.save_interval_epochs * epoch))
    return Frequency(checkpoint.save_interval, samples)


def _samples_per_epoch(train_data: SampleDataset | None) -> int | None:
    """None for blends and made-up data, which have no end."""
    return getattr(train_data, "samples_per_epoch", None)


def _described(
    config: RunConfig,
    train_data: SampleDataset | None,
    info: RecoverInfo | None,
) -> dict[str, Any]:
    """Identifies the training data. If it has changed since the checkpoint, that is a warning."""
    data = {
        "kind": type(train_data).__name__,
        "path": None if config.data.data_path is None else list(config.data.data_path),
        "split": config.data.split,
        "seq_length": config.data.seq_length,
        "seed": config.training.seed,
        "samples_per_epoch": _samples_per_epoch(train_data),
    }
    saved = {} if info is None else info.data
    if train_data is not None and any(
        data[name] != saved[name] for name in data.keys() & saved.keys()
    ):
        logger.warning("the training data has changed: %s in the checkpoint, %s now", saved, data)

    return data


def _evaluated(step_info: StepInfo, info: RecoverInfo | None) -> dict[str, Any]:
    """The last evaluation. A checkpoint that names none counts as evaluated."""
    evaluated = {} if info is None else dict(info.evaluator)
    return (
        evaluated if type(evaluated.get("iteration")) is int else {"iteration": step_info.iteration}
    )


@contextmanager
def _watch(
    config: RunConfig, launch: Launch, events: EventLog, is_embedded: bool
) -> Iterator[Watchdog | NoWatch]:
    """The watchdog; none if this is part of a program that minds its own processes."""
    if is_embedded:
        yield NoWatch()
        return

    limit, long_limit = _hang_limits(config)
    handles_signals = config.stop.exit_signal_handler
    with Watchdog(
        launch=launch,
        store=_get_default_store() if launch.world_size > 1 else None,
        events=events,
        hang_timeout_seconds=limit,
        long_timeout_seconds=long_limit,
        grace_seconds=config.stop.exit_signal_grace_seconds if handles_signals else None,
        on_interrupt=OnInterrupt(
            handles_signals, config.checkpoint.save is not None, launch.is_elastic
        ),
        failed_collective=failed_collective,
    ) as watchdog:
        yield watchdog


def _hang_limits(config: RunConfig) -> tuple[float, float]:
    """The seconds that a rank may make no progress: in a step, and in phases that take longer."""
    minutes = config.parallel.distributed_timeout_minutes
    limit = config.recover.hang_timeout_seconds or 60.0 * minutes
    # A save may take twice its timeout: ranks wait for the save before, and for each other.
    return limit, 60.0 * max(minutes, 2 * config.checkpoint.save_timeout_minutes)
