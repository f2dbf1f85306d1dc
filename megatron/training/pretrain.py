"""`pretrain`: from a configuration and three functions to a trained model.

The caller says what the model is, what the data is, and how a microbatch becomes a loss; everything else (ranks,
sharding, precision, optimizer, checkpoints, reports) is here and does not know what a GPT is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core import log
from megatron.core.datasets.builder import GPTDatasets
from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.core.device import Device
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.dtypes import DTYPES
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.distrib_optimizer import build_optimizer, check_host_memory_for, offloaded_units
from megatron.core.optimizer.lr_schedule import LRSchedule
from megatron.core.optimizer.state_memory import format_state_memory
from megatron.core.transformer.init import materialize, seeded_reset
from megatron.training.arguments import describe
from megatron.training.checkpointing import Checkpointer, Progress, RunState, check_save_folder
from megatron.training.config import RunConfig
from megatron.training.launch import Launch, process_group
from megatron.training.loading import load_run
from megatron.training.loop import Surroundings, num_train_samples, report_evaluation, train
from megatron.training.metrics import Metrics, Rates, build_sinks
from megatron.training.rng import seed_all
from megatron.training.step import ForwardStep
from megatron.training.stop import StopConditions

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Outcome:
    """What a run came to; the same on every rank."""

    iteration: int
    validation_loss: float | None
    test_loss: float | None


def pretrain(
    config: RunConfig,
    *,
    model_provider: Callable[[RunConfig], nn.Module],
    datasets_provider: Callable[[RunConfig, tuple[int, int, int]], GPTDatasets],
    forward_step: ForwardStep,
    flops_per_sequence: float,
) -> Outcome:
    """Trains, evaluates and checkpoints as `config` says. All ranks call it together.

    Args:
        config: resolved for the number of ranks.
        model_provider: builds the model; called under the meta device. Its modules initialise their own parameters in
            `reset_parameters`.
        datasets_provider: builds the (train, validation, test) datasets with at least these numbers of samples.
        forward_step: (model, microbatch) -> the microbatch's mean loss.
        flops_per_sequence: forward and backward, for the throughput that is logged.
    """
    launch = Launch.from_environment()
    device = Device.for_rank(config.device.kind, launch.local_rank, launch.local_world_size)
    log.configure(launch.rank)
    with (
        process_group(launch, device, config.parallel.distributed_timeout_minutes),
        StopConditions(config.stop) as stop,
    ):
        logger.info("%s", describe(config))
        mesh = build_mesh(device.kind, launch.world_size)
        state = build_run_state(config, model_provider, device, mesh, launch.local_world_size)
        seed_all(config.training.seed, launch.rank)
        damaged = load_run(config, state, device)
        if not config.training.skip_train:
            check_save_folder(config.checkpoint, state.progress.iteration, damaged or [])
        datasets = datasets_provider(config, _num_samples(config, state.progress))
        with (
            _metrics(config, launch, state.progress, flops_per_sequence) as metrics,
            Checkpointer(config, device) as checkpoints,
        ):
            surroundings = Surroundings(config, device, mesh, forward_step, metrics, stop, checkpoints)
            return _run(state, surroundings, datasets)


def build_run_state(
    config: RunConfig,
    model_provider: Callable[[RunConfig], nn.Module],
    device: Device,
    mesh: DeviceMesh,
    num_local_ranks: int = 1,
) -> RunState:
    """Model, optimizer and schedule, sharded, with the initial weights of `--seed`."""
    with torch.device("meta"):
        model = model_provider(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    _shard(model, config, device, mesh, num_local_ranks)
    dtype = config.training.compute_dtype
    optimizer = build_optimizer(
        model,
        config.optimizer,
        config.schedule.lr,
        num_local_ranks,
        scales_loss=dtype == "fp16",
        records_timings=config.logging.timing_log_level > 0,
    )
    schedule = LRSchedule.build(config.schedule, config.training.train_iters)
    logger.info(
        "%d parameters, %s on %d rank(s), %s, %s",
        num_parameters,
        config.parallel.engine,
        mesh.size(),
        "fp32" if dtype == "fp32" else f"{dtype} compute over {config.optimizer.main_params_dtype} main weights",
        device.description,
    )
    if optimizer.plan is not None:
        logger.info(
            "optimizer states of %.0f%% in host memory:\n%s", 100 * optimizer.plan.host_fraction, optimizer.plan
        )
    logger.info("memory of rank 0, at rest:\n%s", format_state_memory(optimizer.state_memory(model)))
    return RunState(model, optimizer, schedule, Progress())


def _shard(model: nn.Module, config: RunConfig, device: Device, mesh: DeviceMesh, num_local_ranks: int) -> None:
    """Hands the model, on meta, to its engine and gives it its initial weights."""
    parallel, seed = config.parallel, config.training.seed
    compute_dtype = DTYPES[config.training.compute_dtype]
    offloaded = offloaded_units(model, config.optimizer)
    if offloaded:
        numel = sum(offloaded.values()) // parallel.num_optimizer_shards(mesh.size())
        # Other engines' parameters are fp32, and so are their gradients.
        dtypes = (torch.float32, torch.float32)
        if parallel.use_megatron_fsdp:
            dtypes = (megatron_fsdp.main_grads_dtype(parallel, compute_dtype), compute_dtype)
        check_host_memory_for(numel, config.optimizer, *dtypes, num_local_ranks, mesh)
    if parallel.use_megatron_fsdp:
        megatron_fsdp.shard_model(
            model,
            mesh,
            device,
            parallel,
            compute_dtype=compute_dtype,
            reset_parameters=seeded_reset(model, device.torch_device, seed),
            main_params_dtype=DTYPES[config.optimizer.main_params_dtype],
            offloaded=offloaded,
        )
        return
    if parallel.use_torch_fsdp2:
        torch_fsdp2.shard_model(
            model,
            mesh,
            compute_dtype=compute_dtype,
            reshard_after_forward=parallel.torch_fsdp2_reshard_after_forward,
        )
    materialize(model, device.torch_device, seed)


def _run(state: RunState, surroundings: Surroundings, datasets: GPTDatasets) -> Outcome:
    """Training, unless it is to be skipped, and the evaluations at the end, unless that was no end but a stop."""
    config = surroundings.config
    stopped = False
    if not config.training.skip_train and datasets.train is not None:
        stopped = train(state, surroundings, datasets.train, datasets.valid) is not None
        peak = surroundings.device.peak_memory_bytes()
        logger.info("peak memory of rank 0: %.1f MiB", peak / 2**20)

    def final_loss(dataset: SampleDataset | None, split: str) -> float | None:
        return None if dataset is None or stopped else report_evaluation(state, surroundings, dataset, split)

    return Outcome(
        iteration=state.progress.iteration,
        validation_loss=final_loss(datasets.valid, "validation"),
        test_loss=final_loss(datasets.test, "test"),
    )


def _num_samples(config: RunConfig, progress: Progress) -> tuple[int, int, int]:
    """Samples that the run will ask of each split."""
    num_train = 0 if config.training.skip_train else num_train_samples(config, progress)
    num_eval = config.training.eval_iters * config.global_batch_size
    return num_train, num_eval, num_eval


@contextmanager
def _metrics(config: RunConfig, launch: Launch, progress: Progress, flops_per_sequence: float) -> Iterator[Metrics]:
    rates = Rates(
        train_iters=config.training.train_iters,
        global_batch_size=config.global_batch_size,
        seq_length=config.data.seq_length,
        flops_per_sequence=flops_per_sequence,
        num_devices=launch.world_size,
    )
    is_first = launch.rank == 0
    metrics = Metrics(
        rates,
        config.logging,
        build_sinks(config.logging, config.values(), progress.iteration) if is_first else [],
        start_iteration=progress.iteration,
        shows_progress=is_first,
    )
    try:
        yield metrics
    finally:
        metrics.close()
