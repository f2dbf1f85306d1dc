"""--fp8-param-gather and --fp4-param-gather: losses, states and checkpoints are bit-equal to runs
that gather bf16 weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.kernels.host_adam import HostAdam, available_bodies
from megatron.core.optimizer.kernels.piece import Piece
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.ranks import random_delays, run_ranks
from tests.unit_tests.training.helpers.code_runs import (
    LARGEST_OF_STEPS,
    ON_DEVICE,
    VOCAB,
    engine_for,
    expect_same,
    on_host,
    train,
)

RECIPES = ["blockwise", "tensorwise", "delayed", "nvfp4"]
TWO_BY_DEFAULT = [
    name if name in ("blockwise", "delayed") else pytest.param(name, marks=pytest.mark.wide)
    for name in RECIPES
]
BLOCKWISE = {"fp8_format": "e4m3", "fp8_recipe": "blockwise"}
SHARDINGS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"data_parallel_sharding_strategy": "optim"},
    "ZeRO-2": {"data_parallel_sharding_strategy": "optim_grads"},
    "ZeRO-3": {},
    "HFSDP": {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
    "no expert parallelism": {"expert_model_parallel_size": 1},
    "expert parallelism": {"expert_model_parallel_size": 2},
    "tensor parallelism": {"tensor_model_parallel_size": 2},
}


def _same(recipe: str, options: dict[str, Any]) -> None:
    plain, gathering = (engine_for(gathers, recipe, **options) for gathers in (False, True))
    tensor_size = options.get("tensor_model_parallel_size", 1)
    expected = train(plain, range(3), tensor_size)
    expect_same(train(gathering, range(3), tensor_size), expected)
    expect_same_contents(gathering, plain)


def expect_same_contents(found: ModuleEngine, expected: ModuleEngine) -> None:
    assert differing(contents_of(found), contents_of(expected)) == []
    pairs = zip(found.model.modules(), expected.model.modules(), strict=True)
    for own, other in pairs:
        if isinstance(own, AmaxHistory):
            for name, maxima in own.named_buffers():
                assert torch.equal(maxima, other.get_buffer(name))


@pytest.mark.parametrize("recipe", RECIPES)
def test_gathering_codes_is_bit_equal_to_gathering_bf16_weights(recipe: str) -> None:
    run_ranks(2, _same, recipe, {})


@pytest.mark.wide
@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize("recipe", RECIPES)
def test_gathering_codes_is_bit_equal_with_every_sharding(recipe: str, sharding: str) -> None:
    options = SHARDINGS[sharding]
    run_ranks(4 if "num_distributed_optimizer_instances" in options else 2, _same, recipe, options)


def _with_pauses(engine: ModuleEngine) -> list[float]:
    """Returns the losses of four steps and two evaluations. One more step is skipped."""
    tokens = torch.randint(VOCAB, (2, 13), generator=torch.Generator().manual_seed(9))
    batch = {"tokens": tokens[:, :-1].contiguous(), "labels": tokens[:, 1:].contiguous()}

    def evaluated() -> float:
        return engine.eval_batch([batch], lambda model, batch: model(**batch).mean())

    losses = [evaluated()]
    for step in range(4):
        losses += [loss for loss, _ in train(engine, range(step, step + 1))]
        if step == 1:
            skipped = engine.train_batch(
                [batch], lambda model, batch: model(**batch).mean() * math.nan
            )
            assert skipped.is_skipped
        if step == 2:
            losses.append(evaluated())
    return losses


def _same_with_pauses(optimizer: OptimizerConfig) -> None:
    plain = engine_for(False, "delayed")
    gathering = engine_for(True, "delayed", optimizer=optimizer)
    assert _with_pauses(gathering) == _with_pauses(plain)
    expect_same_contents(gathering, plain)


@pytest.mark.parametrize(
    "optimizer",
    [pytest.param(ON_DEVICE, id="on the device"), pytest.param(on_host(1.0), id="on the host")],
)
def test_delayed_scales_follow_the_amax_history_through_a_skipped_step(
    optimizer: OptimizerConfig,
) -> None:
    run_ranks(2, _same_with_pauses, optimizer)


OFFLOADED = {
    "none": on_host(0.0),
    "half": on_host(0.5),
    "all": on_host(1.0),
    "all, updated early": on_host(1.0, optimizer_early_update_gib=1.0),
    "all, some updated by the device": on_host(1.0, optimizer_update_on_device=0.5),
    "all, without overlap": OptimizerConfig(
        optimizer_cpu_offload=True, optimizer_offload_fraction=1.0
    ),
}


def _offloaded(name: str, recipe: str) -> None:
    on_device = engine_for(True, recipe)
    expected = train(on_device, range(3))
    with random_delays(seed=3):
        offloaded = engine_for(True, recipe, optimizer=OFFLOADED[name])
        assert train(offloaded, range(3)) == expected
    expect_same_contents(offloaded, on_device)


@pytest.mark.parametrize(
    "name",
    [
        name
        if name.startswith("half") or "by the device" in name
        else pytest.param(name, marks=pytest.mark.wide)
        for name in OFFLOADED
    ],
)
@pytest.mark.parametrize("recipe", TWO_BY_DEFAULT)
def test_offloaded_updates_write_the_same_codes_as_the_device(name: str, recipe: str) -> None:
    run_ranks(2, _offloaded, name, recipe)


def _count_encodings() -> list[int]:
    """Counts the pieces whose codes are made after the pass, in each call from here on."""
    counts, encode = list[int](), HostAdam.encode

    def counted(kernel: HostAdam, pieces: Sequence[Piece]) -> None:
        counts.append(len(pieces))
        encode(kernel, pieces)

    HostAdam.encode = counted  # type: ignore[method-assign]
    return counts


def _early(recipe: str) -> int:
    """How often codes were made again after updates, which are early without clipping."""
    early = on_host(1.0, optimizer_early_update_gib=1.0, clip_grad=0.0)
    again, losses = _count_encodings(), []
    engines = [
        engine_for(True, recipe, optimizer) for optimizer in (OptimizerConfig(clip_grad=0.0), early)
    ]
    for engine in engines:
        losses.append(train(engine, range(2)))
        for history in engine.model.modules():
            if isinstance(history, AmaxHistory):
                history.maxima *= 2
        losses[-1] += train(engine, range(2, 5))
    assert losses[0] == losses[1]
    expect_same_contents(*engines)
    return len(again)


# An early update takes the maxima of the last step, which need not be the largest ones.
@pytest.mark.skipif(available_bodies() == ["torch"], reason="the host kernel was not built")
@pytest.mark.parametrize(
    "recipe", [LARGEST_OF_STEPS, pytest.param("delayed", marks=pytest.mark.wide)]
)
def test_codes_of_early_updates_are_made_again_where_another_maximum_is_chosen(recipe: str) -> None:
    for num_again in run_ranks(2, _early, recipe):
        assert (num_again > 0) == (recipe == LARGEST_OF_STEPS)


def _from_zeros(recipe: str) -> None:
    engines = [engine_for(True, recipe, optimizer) for optimizer in (ON_DEVICE, on_host(1.0))]
    losses = []
    for engine in engines:
        with torch.no_grad():
            for name, parameter in engine.model.named_parameters():
                if name.endswith("linear_fc2.weight"):
                    parameter.zero_()
        losses.append(train(engine, range(3)))
    assert losses[0] == losses[1]
    expect_same_contents(*engines)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise"])
def test_weights_that_were_zero_have_codes_by_their_own_maximum(recipe: str) -> None:
    run_ranks(2, _from_zeros, recipe)


def _num_made_by_torch(recipe: str) -> tuple[int, int, int]:
    """Groups whose codes the update has not made, in two steps; those made by gathers, but for
    each group's first; and calls that made codes again after the update.
    """
    made, original = list[str](), FsdpParameterGroup.quantize_on_host
    again = _count_encodings()
    gathered, copy_updated = list[str](), FsdpParameterGroup.copy_updated

    def counted(group: FsdpParameterGroup, codes: DBuffer) -> torch.Tensor:
        made.append(group.display_name)
        return original(group, codes)

    def gather_counted(group: FsdpParameterGroup) -> None:
        if group.codes is not None:
            gathered.append(group.display_name)
        copy_updated(group)

    # Ranks are processes of their own.
    FsdpParameterGroup.quantize_on_host = counted  # type: ignore[method-assign]
    FsdpParameterGroup.copy_updated = gather_counted  # type: ignore[method-assign]
    train(engine_for(True, recipe, optimizer=on_host(1.0)), range(2))
    return len(made), len(gathered) - len(set(gathered)), len(again)


@pytest.mark.skipif(available_bodies() == ["torch"], reason="the host kernel was not built")
@pytest.mark.parametrize("recipe", RECIPES)
def test_the_update_makes_codes_of_eight_bits(recipe: str) -> None:
    for num_after_update, num_gathered, num_again in run_ranks(2, _num_made_by_torch, recipe):
        assert (num_after_update == 0) == (recipe != "nvfp4")
        assert num_gathered == 0
        # Blocks that ranks share, and weights whose scale follows the update.
        assert (num_again > 0) == (recipe in ("blockwise", "tensorwise"))


def _sent_up(recipe: str) -> tuple[int, int]:
    """Returns the bytes and elements of quantized weights that a step copies to the device."""
    engine = engine_for(True, recipe, optimizer=on_host(1.0))
    buckets = [
        bucket
        for bucket in engine.state.optimizer.optimizer._sides.host_side.buckets
        if bucket.is_quantized
    ]
    return sum(b.weight.nbytes for b in buckets), sum(b.numel for b in buckets)


@pytest.mark.parametrize(("recipe", "per_byte"), [("blockwise", 1), ("nvfp4", 2)])
def test_one_byte_per_fp8_code_or_two_fp4_codes_is_copied_to_the_device(
    recipe: str, per_byte: int
) -> None:
    for nbytes, numel in run_ranks(2, _sent_up, recipe):
        assert per_byte * nbytes == numel > 0


@pytest.mark.parametrize(
    ("flag", "low_precision", "optimizer"),
    [
        pytest.param("fp8", {}, {}, id="no recipe"),
        pytest.param("fp8", {"fp4_format": "e2m1"}, {}, id="fp4 format"),
        pytest.param("fp4", BLOCKWISE, {}, id="fp8 format"),
        pytest.param("fp8", BLOCKWISE, {"main_params_dtype": "bf16"}, id="bf16 main weights"),
    ],
)
def test_options_that_exclude_gathering_codes_are_rejected(
    flag: str, low_precision: dict[str, Any], optimizer: dict[str, Any]
) -> None:
    with pytest.raises(ConfigError, match=f"--{flag}-param-gather"):
        EngineConfig(
            OptimizerConfig(**optimizer),
            LRScheduleConfig(lr=1e-2),
            DataParallelConfig(**{f"{flag}_param_gather": True}),
            train_iters=1,
            compute_dtype="bf16",
            low_precision=LowPrecisionConfig(**low_precision),
        )


def _saved(folder: str, gathers_codes: bool, optimizer: OptimizerConfig) -> Contents:
    engine = engine_for(gathers_codes, optimizer=optimizer)
    train(engine, range(2))
    engine.save(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    return contents_of(engine)


def _loaded(folder: str, gathers_codes: bool, optimizer: OptimizerConfig) -> Contents:
    engine = engine_for(gathers_codes, optimizer=optimizer)
    engine.load(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    found = contents_of(engine)
    # The loaded weights are quantized again.
    plain = engine_for(False)
    plain.load(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    expect_same(train(engine, range(2, 3)), train(plain, range(2, 3)))
    return found


@pytest.mark.parametrize(
    ("saving", "loading"),
    [
        pytest.param(ON_DEVICE, ON_DEVICE, id="on the device"),
        pytest.param(on_host(1.0), on_host(0.5), id="on the host", marks=pytest.mark.wide),
    ],
)
def test_one_rank_loads_a_checkpoint_of_two_ranks(
    saving: OptimizerConfig, loading: OptimizerConfig, tmp_path: Path
) -> None:
    saved = run_ranks(2, _saved, str(tmp_path), True, saving)[0]
    assert differing(run_ranks(1, _loaded, str(tmp_path), True, loading)[0], saved) == []
    # Checkpoints contain main weights only, so the format of compute weights does not matter.
    plain = run_ranks(2, _saved, str(tmp_path / "plain"), False, ON_DEVICE)[0]
    assert differing(plain, saved) == []


def _resumed(folder: str, recipe: str, optimizer: OptimizerConfig) -> None:
    engine = engine_for(True, recipe, optimizer=optimizer)
    train(engine, range(2))
    engine.save(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    expected = train(engine, range(2, 5))
    resumed = engine_for(True, recipe, optimizer=optimizer)
    resumed.load(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    assert train(resumed, range(2, 5)) == expected
    expect_same_contents(resumed, engine)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(ON_DEVICE, id="on the device"),
        pytest.param(on_host(1.0), id="on the host", marks=pytest.mark.wide),
    ],
)
@pytest.mark.parametrize("recipe", TWO_BY_DEFAULT)
def test_a_resumed_run_is_bit_equal(
    recipe: str, optimizer: OptimizerConfig, tmp_path: Path
) -> None:
    run_ranks(2, _resumed, str(tmp_path), recipe, optimizer)
