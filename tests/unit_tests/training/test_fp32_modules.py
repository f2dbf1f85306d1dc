"""Engines train models with some fp32 parameters, with states on the device or in host memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.fp32_module import Fp32Module
from megatron.core.host_memory import HostNeed
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.optimizer.state_memory import COMPUTE, GRADIENTS, MAIN, state_memory
from megatron.training import engines
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.fp32_models import (
    LR,
    NUM_IN_FP32,
    NUM_OTHERS,
    SEED,
    Layer,
    Model,
    batches,
    forward_step,
    seen_dtypes,
    train_unsharded,
)
from tests.helpers.ranks import on_ranks, random_delays, run_ranks

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
STEPS = 3
ON_DEVICE = OptimizerConfig(clip_grad=0.05)  # which every step's norm exceeds
ZERO3 = DataParallelConfig()
FSDP2 = DataParallelConfig(use_torch_fsdp2=True)
STRATEGIES = {
    "no_shard": DataParallelConfig(data_parallel_sharding_strategy="no_shard"),
    "optim": DataParallelConfig(data_parallel_sharding_strategy="optim"),
    "optim_grads": DataParallelConfig(data_parallel_sharding_strategy="optim_grads"),
    "optim_grads_params": ZERO3,
    "hsdp": DataParallelConfig(num_distributed_optimizer_instances=2),
    "hfsdp": DataParallelConfig(
        num_distributed_optimizer_instances=2, outer_dp_sharding_strategy="optim"
    ),
}


def offloaded(fraction: float = 1.0, **options: Any) -> OptimizerConfig:
    """With all overlaps."""
    return OptimizerConfig(
        clip_grad=0.05,
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        overlap_optimizer_with_forward=True,
        optimizer_offload_fraction=fraction,
        **options,
    )


def make(
    parallel: DataParallelConfig = ZERO3,
    optimizer: OptimizerConfig = ON_DEVICE,
    dtype: str = "bf16",
    model: type[nn.Module] = Model,
) -> ModuleEngine:
    """An engine with a model that is initialized on meta."""
    schedule = LRScheduleConfig(lr=LR, lr_decay_style="constant")
    config = EngineConfig(optimizer, schedule, parallel, 99, dtype, SEED)
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(model)
    return engine


class Run(NamedTuple):
    """The results of a training run."""

    losses: list[float]
    norms: list[float]
    contents: Contents


def train(engine: ModuleEngine, steps: range = range(STEPS)) -> Run:
    losses, norms = [], []
    for step in steps:
        result = engine.train_batch(batches(step, dist.get_rank()), forward_step)
        losses.append(result.loss)
        norms.append(result.grad_norm)
    return Run(losses, norms, contents_of(engine))


def assert_same(run: Run, other: Run) -> None:
    """To the bit, but for the order in which a norm's squares are added."""
    assert run.losses == other.losses
    assert run.norms == pytest.approx(other.norms, rel=1e-6)
    assert differing(run.contents, other.contents) == []


def _near(run: Run, weights: dict[str, torch.Tensor], losses: list[float]) -> None:
    assert run.losses == pytest.approx(losses, rel=1e-4)
    for name, weight in weights.items():
        # Adam moves a weight by LR at most: gradients near zero may be rounded to another sign.
        torch.testing.assert_close(run.contents.weights[name], weight, rtol=0, atol=0.2 * LR)


# What forward and backward see.


def _seen(parallel: DataParallelConfig, dtype: str) -> tuple[Any, ...]:
    engine = make(parallel, dtype=dtype)
    engine.train_batch(batches(0, dist.get_rank()), forward_step)
    engine.eval_batch(batches(1, dist.get_rank()), forward_step)
    return seen_dtypes(engine.model)


@pytest.mark.parametrize("parallel", [ZERO3, FSDP2], ids=["megatron", "fsdp2"])
def test_the_parameters_of_an_fp32_module_are_fp32_where_those_beside_it_have_16_bits(parallel):
    for world_size, name, dtype in ((1, "bf16", BF16), (2, "bf16", BF16), (2, "fp16", FP16)):
        assert run_ranks(world_size, _seen, parallel, name) == [({FP32}, {dtype})] * world_size


def _groups(optimizer: OptimizerConfig, dtype: str, grads: str) -> list[list[Any]]:
    engine = make(DataParallelConfig(main_grads_dtype=grads), optimizer, dtype=dtype)
    engine.train_batch(batches(0, dist.get_rank()), forward_step)
    found = []
    for module in engine.model.modules():
        if isinstance(module, FsdpModule):
            groups = module.parameter_groups
            found.append([(g.dtype, g.main_weight.dtype, g.main_grad.dtype) for g in groups])
    return found


@pytest.mark.parametrize("optimizer", [ON_DEVICE, offloaded()], ids=["device", "offloaded"])
@pytest.mark.parametrize("grads", ["bf16", "fp32"])
def test_only_units_with_an_fp32_module_have_a_second_group_whose_gradients_are_fp32(
    optimizer, grads
):
    other = (BF16, FP32, FP32 if grads == "fp32" else BF16)
    both, in_fp32 = {other, (FP32, FP32, FP32)}, (FP32, FP32, FP32)
    (root, *layers), _ = run_ranks(2, _groups, optimizer, "bf16", grads)
    assert layers == [[other], [other, in_fp32], [other]]
    assert set(root) == both
    assert len(root) == 2


def test_where_everything_is_fp32_there_is_no_second_group():
    for groups in run_ranks(1, _groups, ON_DEVICE, "fp32", "fp32"):
        assert groups == [[(FP32, FP32, FP32)]] * 4


# Training.


@on_ranks(1)
def test_one_rank_gives_the_bits_of_training_unsharded() -> None:
    run, expected = train(make()), train_unsharded(STEPS, 1, ON_DEVICE, BF16)
    assert run.losses == expected.losses
    assert run.norms == pytest.approx(expected.norms, rel=1e-6)
    assert min(run.norms) > ON_DEVICE.clip_grad
    for name, weight in expected.weights.items():
        assert torch.equal(run.contents.weights[name], weight), name

    # A gate in bf16 gives other numbers, so these results depend on its dtype.
    in_bf16 = train_unsharded(STEPS, 1, ON_DEVICE, BF16, fp32_types=())
    assert abs(in_bf16.losses[0] - run.losses[0]) > 1e-2


def _strategies(names: list[str]) -> None:
    world_size = dist.get_world_size()
    expected = train_unsharded(STEPS, world_size, ON_DEVICE, BF16)
    for name in names:
        on_device = train(make(STRATEGIES[name]))
        _near(on_device, expected.weights, expected.losses)
        assert_same(train(make(STRATEGIES[name], offloaded(0.5))), on_device)


@pytest.mark.parametrize(
    ("world_size", "names"), [(1, ["optim_grads_params"]), (2, list(STRATEGIES)[:4])]
)
def test_every_strategy_trains_as_without_sharding_and_alike_wherever_states_lie(world_size, names):
    run_ranks(world_size, _strategies, names)


@pytest.mark.wide
def test_two_mesh_axes_train_as_without_sharding_and_alike_wherever_states_lie():
    run_ranks(4, _strategies, ["hsdp", "hfsdp"])


def _delayed(grads: str) -> None:
    parallel = DataParallelConfig(main_grads_dtype=grads)
    expected = train(make(parallel))
    with random_delays(seed=1):
        assert_same(train(make(parallel, offloaded())), expected)


def test_random_delays_on_every_lane_change_no_bit_of_two_dtypes_in_one_unit():
    run_ranks(2, _delayed, "bf16")


class RecomputedLayer(Layer):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        forward = super().forward
        is_trained = self.training and torch.is_grad_enabled()
        return checkpoint(forward, x, use_reentrant=False) if is_trained else forward(x)


class Recomputed(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(RecomputedLayer(number == 1) for number in range(3))


def _recomputed() -> None:
    steps = range(2)
    for parallel in (ZERO3, FSDP2):
        assert_same(train(make(parallel, model=Recomputed), steps), train(make(parallel), steps))


def test_activations_may_be_recomputed_with_either_engine():
    """FSDP2's groups of fp32 modules are inside the recomputed modules."""
    run_ranks(2, _recomputed)


class Scale(Fp32Module):
    """A parameter with no rows on most ranks, and one that no optimizer steps."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(1))
        self.frozen = nn.Parameter(torch.empty(2), requires_grad=False)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)
        nn.init.ones_(self.frozen)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.scale.dtype == self.frozen.dtype == FP32
        return (x.float() * self.scale * self.frozen.sum()).to(x.dtype)


class Scaled(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers[2].gate = Scale()


def _small(folder: str) -> set[torch.dtype]:
    """The dtypes of the main weights with bf16 ones, of which the fp32 modules have none."""
    expected = train(make(model=Scaled))
    one = make(optimizer=offloaded(), model=Scaled)
    assert_same(train(one), expected)
    meta = SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True)
    one.save(meta)
    other = make(STRATEGIES["optim"], model=Scaled)
    other.load(meta)
    assert differing(contents_of(other), expected.contents) == []

    options = {"main_params_dtype": "bf16"}
    parallel = DataParallelConfig(main_grads_dtype="bf16")
    on_device = OptimizerConfig(clip_grad=0.05, **options)
    in_bf16 = train(make(parallel, on_device, model=Scaled))
    assert_same(train(make(parallel, offloaded(**options), model=Scaled)), in_bf16)
    return {weight.dtype for name, weight in in_bf16.contents.weights.items() if "gate" in name}


@pytest.mark.wide
def test_fewer_elements_than_ranks_frozen_ones_and_bf16_main_weights_train_alike(tmp_path):
    assert run_ranks(3, _small, str(tmp_path)) == [{FP32}] * 3


def _loss_scales() -> list[float]:
    """The loss scales of an fp16 run, the first of which overflow."""
    options = {"initial_loss_scale": 2.0**24, "hysteresis": 1}
    on_device = OptimizerConfig(clip_grad=0.05, **options)
    both = [
        make(optimizer=optimizer, dtype="fp16") for optimizer in (on_device, offloaded(**options))
    ]
    scales = []
    for step in range(6):
        results = [
            engine.train_batch(batches(step, dist.get_rank()), forward_step) for engine in both
        ]
        assert results[0].loss == results[1].loss
        assert results[0].is_skipped == results[1].is_skipped
        scales.append(results[0].loss_scale)
    assert differing(*map(contents_of, both)) == []
    return scales


def test_fp16_scales_and_skips_alike_on_both_sides():
    for scales in run_ranks(2, _loss_scales):
        assert scales[0] > scales[-1] == scales[-2]


def _fsdp2() -> None:
    run = train(make(FSDP2))
    expected = train_unsharded(STEPS, dist.get_world_size(), ON_DEVICE, BF16)
    _near(run, expected.weights, expected.losses)
    on_host = OptimizerConfig(clip_grad=0.05, optimizer_cpu_offload=True)
    assert differing(run.contents, train(make(FSDP2, on_host)).contents) == []


def test_fsdp2_trains_as_without_sharding():
    run_ranks(2, _fsdp2)


# Memory.


def _bytes(fraction: float) -> tuple[dict[str, Any], list[int], int]:
    """Returns the bytes of each state, the preflight's count, and the bytes on the host."""
    counted: list[int] = []

    def note(needs: Sequence[HostNeed], *_: Any) -> None:
        counted.extend(need.nbytes for need in needs)

    parallel = DataParallelConfig(main_grads_dtype="bf16")
    check, engines.check_memory_on_all_ranks = engines.check_memory_on_all_ranks, note
    try:
        engine = make(parallel, offloaded(fraction))
    finally:
        engines.check_memory_on_all_ranks = check

    optimizer = engine.state.optimizer.optimizer
    assert isinstance(optimizer, HybridDeviceOptimizer)
    return state_memory(engine.model, optimizer), counted, optimizer.host_bytes


@pytest.mark.parametrize("fraction", [0.5, 1.0])
def test_bytes_are_counted_by_the_dtype_that_they_have(fraction):
    ((table, needs, host_bytes),) = run_ranks(1, _bytes, fraction)
    assert sum(needs) == host_bytes, "the preflight counts the allocated bytes"
    travelling = 2 * NUM_OTHERS + 4 * NUM_IN_FP32
    assert table[GRADIENTS].device == travelling
    if fraction == 1:
        assert table[COMPUTE].device == travelling
        assert table[MAIN] == (0, 4 * (NUM_OTHERS + NUM_IN_FP32))
        assert host_bytes == 14 * NUM_OTHERS + 16 * NUM_IN_FP32


# Checkpoints.


def _save(folder: str) -> Contents:
    engine = make(optimizer=offloaded())
    train(engine, range(2))
    engine.save(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return contents_of(engine)


def _load(folder: str, parallel: DataParallelConfig, optimizer: OptimizerConfig) -> Run:
    engine = make(parallel, optimizer)
    engine.load(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    loaded = contents_of(engine)
    return train(engine, range(2, 3))._replace(contents=loaded)


def test_a_checkpoint_of_two_ranks_loads_on_others_with_other_fractions(tmp_path):
    saved = run_ranks(2, _save, str(tmp_path))[0]
    (again, _) = run_ranks(2, _load, str(tmp_path), ZERO3, offloaded())
    assert {name for name in again.contents.weights if "gate" in name} == {
        "layers.1.gate.rate",
        "layers.1.gate.shift",
        "gate.rate",
        "gate.shift",
    }
    for world_size, parallel, optimizer in (
        (1, ZERO3, ON_DEVICE),
        (3, ZERO3, offloaded(0.5)),
        (2, STRATEGIES["optim"], ON_DEVICE),
        (2, FSDP2, ON_DEVICE),
    ):
        for run in run_ranks(world_size, _load, str(tmp_path), parallel, optimizer):
            assert differing(run.contents, saved) == []
            if world_size == 2:
                assert run.losses == pytest.approx(again.losses, rel=1e-4)


def _weights_alone(
    folder: str, weight_format: str, hf_dtype: torch.dtype | None = None
) -> list[str]:
    one, other = make(optimizer=offloaded()), make()
    train(one, range(1))
    meta = SaveLoadMeta(f"{folder}/{hf_dtype}", weight_format, hf_dtype=hf_dtype)
    one.save(meta)
    other.load(meta)
    own, theirs = contents_of(one).weights, contents_of(other).weights
    return [name for name in own if not torch.equal(own[name], theirs[name])]


@pytest.mark.parametrize(("weight_format", "dtype"), [("dcp", None), ("hf", torch.float32)])
def test_weights_alone_are_saved_and_loaded_in_fp32(tmp_path, weight_format, dtype):
    assert run_ranks(2, _weights_alone, str(tmp_path), weight_format, dtype) == [[], []]


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_among_weights_in_bf16_those_of_an_fp32_module_keep_their_bits(tmp_path, dtype):
    for rounded in run_ranks(2, _weights_alone, str(tmp_path), "hf", dtype):
        assert "layers.0.linear.weight" in rounded
        assert not [name for name in rounded if "gate" in name]
