"""`--optimizer-offload-fraction auto`: the smallest fraction that fits the device of every rank."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.device import Device, reserve_of
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.shard_plan import ShardPlan
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.activations import ActivationBytes
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.optimizer.planned_memory import MatrixBytes, PlannedMemory
from megatron.core.optimizer.state_memory import COMPUTE, GRADIENTS, StateBytes
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training import step_memory
from megatron.training.arguments import parse_config
from megatron.training.config import BatchSizes, EngineConfig
from megatron.training.engines import build_engine
from megatron.training.step_memory import (
    InUse,
    Moment,
    RunMemory,
    at_fraction,
    fit,
    fractions_of,
    memory_of,
    with_known_fraction,
)
from tests.helpers.ranks import on_ranks, run_ranks

TOTAL = 80 * 10**9
AUTO = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": "auto"}
ENGINES = {
    "fully_shard": DataParallelConfig(),
    "FSDP2": DataParallelConfig(use_torch_fsdp2=True),
    "bf16 gradients": DataParallelConfig(main_grads_dtype="bf16"),
}


class FakeDevice(Device):
    """An accelerator with this much free memory, whose tensors are on the CPU."""

    def __init__(self, free: int) -> None:
        super().__init__("cuda")
        object.__setattr__(self, "free", free)

    @property
    def torch_device(self) -> torch.device:
        return torch.device("cpu")

    def memory_info(self) -> tuple[int, int]:
        return self.free, TOTAL  # type: ignore[attr-defined,no-any-return]


def model_of(num_layers: int = 3, hidden_size: int = 32, **options: Any) -> GPTModel:
    with torch.device("meta"):
        return GPTModel(TransformerConfig(num_layers, hidden_size, 2, **options), 64)


def config_of(engine: str = "fully_shard", **changes: Any) -> EngineConfig:
    settings = {"compute_dtype": "bf16", "batch": BatchSizes(2, 16), **changes}
    return EngineConfig(
        OptimizerConfig(**AUTO),
        LRScheduleConfig(lr=0.1),
        ENGINES[engine],
        train_iters=1,
        **settings,
    )


MODELS = {
    "dense": {},
    "recomputed": {"recompute_granularity": "full"},
    "experts": {"num_experts": 4, "moe_router_topk": 2},
}


@pytest.mark.parametrize(
    ("kept", "loss", "gradients", "in_step", "rounded", "peak"),
    [
        ((3, 4), 900, 70, 30, 10, Moment(0, 6 + 2, 7, 900, 11, 0)),
        ((300, 400), 9, 70, 30, 10, Moment(35, 50, 700 + 5, 0, 0, 0)),
        ((3, 4), 90, 700, 30, 10, Moment(700, 50, 4 + 5, 0, 0, 0)),
        ((3, 4), 90, 700, 60, 0, Moment(700, 0, 0, 0, 60, 0)),
        ((3, 4), 90, 700, 0, 60, Moment(700, 0, 0, 0, 0, 60)),
    ],
    ids=["loss", "last layer", "first layer", "matrices", "weights that are not codes yet"],
)
def test_gradients_come_as_activations_go_and_matrices_come_last(
    kept: tuple[int, ...], loss: int, gradients: int, in_step: int, rounded: int, peak: Moment
) -> None:
    at_rest = {COMPUTE: StateBytes(1000, 0), GRADIENTS: StateBytes(gradients, 0)}
    memory = RunMemory(
        PlannedMemory(at_rest, [], ShardPlan(()), MatrixBytes(in_step, in_forward=11), rounded),
        ActivationBytes(kept, recomputed=5, exchanged=0, rest=0, loss=loss),
        activations_on_host=0,
        activations_room=0,
        in_use=InUse(6, 50, sums=2, earlier_gradients=0, layer_gradients=35),
    )
    assert memory.peak == peak
    assert memory.device_nbytes == 1000 + sum(peak)


@given(
    num_layers=st.integers(1, 6),
    width=st.integers(1, 8),
    model=st.sampled_from(sorted(MODELS)),
    engine=st.sampled_from(sorted(ENGINES)),
    world_size=st.sampled_from([1, 2, 8]),
    sequences=st.integers(1, 8),
    share=st.integers(0, 120),
)
@settings(max_examples=40, deadline=None)
def test_the_fraction_that_is_chosen_is_the_smallest_that_fits(
    num_layers: int,
    width: int,
    model: str,
    engine: str,
    world_size: int,
    sequences: int,
    share: int,
) -> None:
    batch = BatchSizes(sequences, 16, 3 * sequences * world_size)
    built = model_of(num_layers, 16 * width, **MODELS[model])
    config = config_of(engine, batch=batch)

    def needs(fraction: float) -> int:
        return memory_of(built, at_fraction(config, fraction), world_size, "cuda").device_nbytes

    fractions = fractions_of(built, config)
    by_fraction = [needs(fraction) for fraction in fractions]
    assert by_fraction == sorted(by_fraction, reverse=True), "more on the host is less here"
    least, most = by_fraction[-1], by_fraction[0]
    limit = least + share * (most - least) // 100

    fraction, memory = fit(built, config, world_size, "cuda", limit)
    fitting = [f for f, nbytes in zip(fractions, by_fraction, strict=True) if nbytes <= limit]
    assert fraction == min(fitting)
    assert memory.device_nbytes == needs(fraction) <= limit
    # With more memory, never more on the host; without enough, the last one.
    assert fit(built, config, world_size, "cuda", limit + limit // 9)[0] <= fraction
    short, memory = fit(built, config, world_size, "cuda", least - 1)
    assert (short, memory.device_nbytes) == (1.0, least)


@pytest.mark.parametrize(("num_layers", "vocab_size"), [(1, 4096), (2, 8192), (4, 64), (4, 2048)])
def test_slots_of_streamed_states_may_take_more_than_a_group_gives_back(
    num_layers: int, vocab_size: int
) -> None:
    config = config_of()
    streams = replace(
        config.optimizer, overlap_cpu_optimizer_d2h_h2d=True, optimizer_update_on_device="auto"
    )
    config = replace(config, optimizer=streams)
    with torch.device("meta"):
        built = GPTModel(TransformerConfig(num_layers, 64, 2, swiglu=True), vocab_size)
    fractions = fractions_of(built, config)
    needs = [memory_of(built, at_fraction(config, f), 2, "cuda").device_nbytes for f in fractions]
    assert needs[1] > needs[0]
    for limit in needs:
        fitting = [f for f, nbytes in zip(fractions, needs, strict=True) if nbytes <= limit]
        assert fit(built, config, 2, "cuda", limit)[0] == min(fitting)
    assert fit(built, config, 2, "cuda", min(needs) - 1)[0] == 1.0


def _chosen(frees: list[int]) -> tuple[float, list[str]]:
    """The fraction on this rank, of those with this much free memory, and the log."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = step_memory.logger
    logger.addHandler(handler)
    before, logger.level = logger.level, logging.INFO
    try:
        mesh = build_mesh("cpu", dist.get_world_size())
        device = FakeDevice(frees[dist.get_rank()])
        config = with_known_fraction(config_of(), model_of(), device, mesh)
    finally:
        logger.removeHandler(handler)
        logger.level = before
    return config.optimizer.offload_fraction, messages


def test_all_ranks_take_the_fraction_that_fits_the_fullest_device() -> None:
    model, config, reserve = model_of(), config_of(), reserve_of(TOTAL)
    fractions = fractions_of(model, config)
    wanted = [fractions[1], fractions[-1]]
    # A byte less would not be enough.
    frees = [
        memory_of(model, at_fraction(config, each), 2, "cuda").device_nbytes + reserve // 2
        for each in wanted
    ]
    for order in (frees, frees[::-1]):
        found = run_ranks(2, _chosen, order)
        assert [fraction for fraction, _ in found] == [wanted[1]] * 2

    ((fraction, messages), _) = run_ranks(2, _chosen, [frees[0], frees[0] + 1])
    assert fraction == wanted[0]
    text = " ".join(messages)
    for part in ("compute weights", "gradients", "optimizer states", "activations", "reserve"):
        assert part in text
    assert f"{wanted[0]:g}" in text


def test_an_empty_device_has_the_memory_that_a_plan_gives_it(monkeypatch) -> None:
    # Half of the reserve is for what will come; the context of CUDA, in use already, is in it, too.
    reserve, device = reserve_of(TOTAL), Device("cuda")
    found = []
    for free in (TOTAL, TOTAL - reserve // 2, TOTAL - reserve):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _, free=free: (free, TOTAL))
        found.append(device.spare_memory_bytes())
    assert found == [TOTAL - reserve, TOTAL - reserve, TOTAL - reserve - reserve // 2]


@on_ranks(2)
def test_a_model_that_fits_nowhere_is_one_error_on_all_ranks() -> None:
    missing = 3 << 20
    reserve = reserve_of(TOTAL)
    model, config = model_of(), config_of()
    least = memory_of(model, at_fraction(config, 1.0), 2, "cuda").device_nbytes
    free = least + reserve // 2 - missing * (1 - dist.get_rank())
    device = FakeDevice(free)
    with pytest.raises(ConfigError, match=r"3\.00 MiB too little") as error:
        with_known_fraction(config, model, device, build_mesh("cpu", 2))
    assert "--recompute-granularity full" in str(error.value)
    assert "activations" in str(error.value)


@on_ranks(1)
def test_a_model_or_run_without_a_memory_plan_is_rejected() -> None:
    device = FakeDevice(TOTAL)
    mesh = build_mesh("cpu", 1)
    with pytest.raises(ConfigError, match="Linear"):
        with_known_fraction(config_of(), nn.Linear(2, 2), device, mesh)
    with pytest.raises(ConfigError, match=r"EngineConfig\.batch"):
        with_known_fraction(config_of(batch=None), model_of(), device, mesh)


FLAGS = """--num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --tokenizer-type NullTokenizer
    --attention-dropout 0 --hidden-dropout 0 --vocab-size 63 --make-vocab-size-divisible-by 1
    --optimizer-cpu-offload --optimizer-offload-fraction""".split()


@on_ranks(1)
def test_the_same_command_trains_on_the_cpu_with_nothing_offloaded() -> None:
    losses = []
    for fraction in ("auto", "0"):
        config = parse_config([*FLAGS, fraction], 1)
        engine = build_engine(config.engine(), Device("cpu"), build_mesh("cpu", 1))
        engine.initialize(lambda config=config: GPTModel(config.model, 64))  # type: ignore[misc]
        assert engine.config.optimizer.optimizer_offload_fraction == 0.0
        tokens = torch.arange(16)[None]
        result = engine.train_batch(
            [{"tokens": tokens}],
            lambda model, batch: model(batch["tokens"], batch["tokens"]).mean(),
        )
        losses.append((result.loss, result.grad_norm))
    assert losses[0] == losses[1]


@pytest.mark.parametrize("other", ["automatic", "Auto", "1.5", "-0.1", "nan"])
def test_other_values_of_the_fraction_are_rejected(other: str) -> None:
    with pytest.raises(ConfigError, match="--optimizer-offload-fraction: expected a number"):
        parse_config([*FLAGS, other], 1)


def test_an_optimizer_alone_needs_a_number() -> None:
    with pytest.raises(ValueError, match="0 to 1"):
        _ = OptimizerConfig(**AUTO).offload_fraction
