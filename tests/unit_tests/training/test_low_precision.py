"""Training in fp8 and fp4: numbers of ranks, offloading, recomputation, and checkpoints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.description import ModelDescription
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_export import export_hf
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.ranks import run_ranks
from tests.unit_tests.training.helpers.code_runs import gathering

VOCAB, SEQ = 64, 20
DENSE = TransformerConfig(
    num_layers=3,
    hidden_size=32,
    num_attention_heads=2,
    ffn_hidden_size=48,
    normalization="RMSNorm",
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
    init_method_std=0.1,
)
HYBRID = replace(
    DENSE,
    num_layers=2,
    add_bias_linear=True,
    linear_attention_freq="[1,0]",
    linear_num_key_heads=2,
    linear_num_value_heads=2,
    linear_key_head_dim=16,
    linear_value_head_dim=16,
)
MIXTURE = replace(
    DENSE,
    num_layers=2,
    num_experts=4,
    moe_ffn_hidden_size=24,
    moe_router_topk=2,
    moe_aux_loss_coeff=0.01,
    moe_shared_expert_intermediate_size=16,
)
MODELS = {"dense": DENSE, "hybrid": HYBRID, "mixture": MIXTURE}
RECIPES = {
    **{
        name: LowPrecisionConfig(fp8_format="hybrid", fp8_recipe=name)
        for name in ("tensorwise", "rowwise", "blockwise", "mxfp8")
    },
    "delayed": LowPrecisionConfig(
        fp8_format="hybrid", fp8_amax_history_len=3, fp8_amax_compute_algo="max", fp8_margin=1
    ),
    "nvfp4": LowPrecisionConfig(fp4_format="e2m1"),
}
BF16 = LowPrecisionConfig()


def wide(names: set[str]) -> list[Any]:
    """Returns recipes with the marker `wide`."""
    return [pytest.param(name, marks=pytest.mark.wide) for name in sorted(names)]


class Run(NamedTuple):
    """A training run.

    Attributes:
        fraction: fraction of the optimizer states in host memory; None: no offloading.
    """

    recipe: LowPrecisionConfig
    model: TransformerConfig = DENSE
    strategy: str = "optim_grads_params"
    fraction: float | None = None
    execution: ExecutionConfig = ExecutionConfig()
    parallel: dict[str, Any] = {}  # noqa: RUF012  only read

    def engine(self) -> ModuleEngine:
        optimizer = OptimizerConfig()
        if self.fraction is not None:
            optimizer = OptimizerConfig(
                optimizer_cpu_offload=True,
                optimizer_offload_fraction=self.fraction,
                overlap_cpu_optimizer_d2h_h2d=True,
                overlap_optimizer_with_forward=True,
            )
        config = EngineConfig(
            optimizer,
            LRScheduleConfig(lr=1e-3, lr_decay_style="constant"),
            DataParallelConfig(data_parallel_sharding_strategy=self.strategy, **self.parallel),
            99,
            "bf16",
            7,
            execution=self.execution,
            low_precision=self.recipe,
        )
        engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
        engine.initialize(lambda: GPTModel(self.model, VOCAB))
        return engine


class Trained(NamedTuple):
    losses: list[float]
    contents: Contents
    histories: list[torch.Tensor]


def train(engine: ModuleEngine, steps: range, *, share: bool = True) -> list[float]:
    """Trains on two microbatches per step. Ranks divide them if `share`, else each has both."""

    def forward_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        tokens = batch["tokens"]
        losses: torch.Tensor = model(tokens[:, :-1], tokens[:, 1:].contiguous())
        return losses.mean()

    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        tokens = torch.randint(VOCAB, (2, 2, SEQ + 1), generator=generator)
        own = tokens[dist.get_rank() :: dist.get_world_size()] if share else tokens
        found.append(engine.train_batch([{"tokens": one} for one in own], forward_step).loss)
    return found


def trained(engine: ModuleEngine, steps: range = range(4)) -> Trained:
    losses = train(engine, steps)
    histories = [
        buffer.clone()
        for module in engine.model.modules()
        if isinstance(module, AmaxHistory)
        for buffer in module.buffers()
    ]
    return Trained(losses, contents_of(engine), histories)


def results(world_size: int, *runs: Run) -> list[Trained]:
    """Trains each run and returns rank 0's results."""

    def train_all(runs: tuple[Run, ...]) -> list[Trained]:
        return [trained(run.engine()) for run in runs]

    return run_ranks(world_size, train_all, runs)[0]


def expect_equal(one: Trained, other: Trained) -> None:
    assert one.losses == other.losses
    assert differing(one.contents, other.contents) == []
    assert len(one.histories) == len(other.histories)
    for own, theirs in zip(one.histories, other.histories, strict=True):
        assert torch.equal(own, theirs)


@pytest.mark.parametrize("name", RECIPES)
def test_each_recipe_gives_the_same_losses_on_one_and_two_ranks(name: str) -> None:
    recipe = RECIPES[name]
    (alone, in_bf16) = results(1, Run(recipe), Run(BF16))
    sharded, replicated = results(2, Run(recipe), Run(recipe, strategy="optim"))

    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
    assert replicated.losses == pytest.approx(alone.losses, rel=1e-5)
    assert alone.losses != in_bf16.losses
    # The losses follow bf16's, up to the rounding of three layers.
    assert alone.losses == pytest.approx(in_bf16.losses, rel=0.05)
    assert alone.losses[-1] < alone.losses[0] or in_bf16.losses[-1] > in_bf16.losses[0]


MOVING = ExecutionConfig(
    activation_offload=True, activation_offload_gib=1e-3, activation_offload_min_kib=0.1
)


@pytest.mark.parametrize("name", ["delayed", "nvfp4", *wide(set(RECIPES) - {"delayed", "nvfp4"})])
def test_offloading_and_recomputation_are_bit_equal(name: str) -> None:
    recipe = RECIPES[name]
    plain, *others = results(
        2,
        Run(recipe, HYBRID),
        *(Run(recipe, HYBRID, fraction=fraction) for fraction in (0.0, 0.5, 1.0)),
        Run(recipe, replace(HYBRID, recompute_granularity="full")),
        Run(recipe, HYBRID, execution=MOVING),
        *(
            Run(recipe, replace(HYBRID, recompute_granularity="full"), parallel=gathering(name))
            for _ in range(name in ("delayed", "nvfp4"))
        ),
    )
    for other in others:
        expect_equal(other, plain)


@pytest.mark.parametrize("model", ["mixture", "hybrid"])
@pytest.mark.parametrize("name", ["delayed", *wide(set(RECIPES) - {"delayed"})])
def test_moe_and_hybrid_models_give_the_same_losses_on_one_and_two_ranks(
    name: str, model: str
) -> None:
    recipe = RECIPES[name]
    (alone, in_bf16) = results(1, Run(recipe, MODELS[model]), Run(BF16, MODELS[model]))
    (sharded,) = results(2, Run(recipe, MODELS[model], strategy="optim_grads"))
    assert sharded.losses == pytest.approx(alone.losses, rel=1e-5)
    assert alone.losses != in_bf16.losses
    assert alone.losses == pytest.approx(in_bf16.losses, rel=0.05)


def test_tensor_parallel_ranks_agree_on_losses_and_amax_histories() -> None:
    recipe = RECIPES["delayed"]
    (alone,) = results(1, Run(recipe))
    parallel = {"tensor_model_parallel_size": 2}

    def train_divided() -> tuple[list[float], list[torch.Tensor]]:
        # Both ranks read all samples.
        run = Run(recipe, parallel=parallel)
        engine = run.engine()
        found = train(engine, range(3), share=False)
        return found, trained(engine, range(0)).histories

    (losses, histories), (others, same) = run_ranks(2, train_divided)
    assert losses == others
    assert losses == pytest.approx(alone.losses[:3], rel=1e-2)
    assert all(torch.equal(*pair) for pair in zip(histories, same, strict=True))


def _after_a_failure(run: Run) -> tuple[Trained, Trained]:
    """A run whose first step fails on its second microbatch, and one without it."""

    def forward_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        if not batch["tokens"].any():
            raise ValueError("of a bad batch")
        return 100 * model(batch["tokens"], batch["tokens"]).mean()

    failing = run.engine()
    tokens = torch.ones(1, SEQ, dtype=torch.int64)
    batches = [{"tokens": tokens}, {"tokens": 0 * tokens}]
    with pytest.raises(ValueError, match="of a bad batch"):
        failing.train_batch(batches, forward_step)
    return trained(failing, range(2)), trained(run.engine(), range(2))


def test_a_step_that_failed_leaves_no_maxima_for_the_next_one() -> None:
    found, expected = run_ranks(1, _after_a_failure, Run(RECIPES["delayed"]))[0]
    expect_equal(found, expected)


def save(run: Run, folder: str) -> Trained:
    """Trains four steps and saves a checkpoint after the second."""
    engine = run.engine()
    train(engine, range(2))
    engine.save(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return trained(engine, range(2, 4))


def resume(run: Run, folder: str) -> Trained:
    engine = run.engine()
    engine.load(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return trained(engine, range(2, 4))


def read(run: Run, folder: str) -> Trained:
    engine = run.engine()
    engine.load(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return trained(engine, range(0))


@pytest.mark.parametrize("name", ["delayed", *wide(set(RECIPES) - {"delayed"})])
def test_a_resumed_run_is_bit_equal_and_one_rank_loads_its_states(
    name: str, tmp_path: Path
) -> None:
    run, folder = Run(RECIPES[name], MIXTURE), str(tmp_path)
    undisturbed = run_ranks(2, save, run, folder)[0]
    resumed = run_ranks(2, resume, run, folder)[0]
    expect_equal(resumed, undisturbed)

    on_two, on_one = (run_ranks(size, read, run, folder)[0] for size in (2, 1))
    expect_equal(on_one, on_two)
    assert on_two.contents.states
    assert bool(on_two.histories) == (name == "delayed")
    assert all(history.any() for history in on_two.histories[::2])


def save_now(run: Run, folder: str) -> Trained:
    engine = run.engine()
    train(engine, range(2), share=False)
    engine.save(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return trained(engine, range(0))


@pytest.mark.parametrize(
    "gathers_codes", [False, pytest.param(True, marks=pytest.mark.wide)], ids=["bf16", "codes"]
)
@pytest.mark.parametrize("name", ["blockwise", *wide(set(RECIPES) - {"blockwise"})])
def test_two_ranks_load_a_checkpoint_of_four_ranks(
    name: str, gathers_codes: bool, tmp_path: Path
) -> None:
    parallel = gathering(name) if gathers_codes else {}
    run, folder = Run(RECIPES[name], MIXTURE, parallel=parallel), str(tmp_path)
    saved = run_ranks(4, save_now, run, folder)[0]
    expect_equal(run_ranks(2, read, run, folder)[0], saved)
    assert saved.contents.states
    assert bool(saved.histories) == (name == "delayed")


def _loaded_into_each_other(folder: str) -> None:
    model = replace(DENSE, position_embedding_type="rope")
    recipes = {"delayed": RECIPES["delayed"], "blockwise": RECIPES["blockwise"], "bf16": BF16}
    engines = {name: Run(recipe, model).engine() for name, recipe in recipes.items()}
    for name in ("delayed", "bf16"):
        engine = engines[name]
        train(engine, range(1))
        engine.save(SaveLoadMeta(f"{folder}/{name}", "dcp", with_optim=True))
        engine.save(SaveLoadMeta(f"{folder}/{name}-saved", "hf", hf_dtype=torch.float32))
        stored, described = (
            open_checkpoint(open_store(folder), name),
            ModelDescription(model, VOCAB),
        )
        export_hf(stored, f"{folder}/{name}-exported", described, dtype=torch.float32)
        expected = dict(engine.model.named_parameters())
        for loading in (other for other in engines.values() if other is not engine):
            for path in (name, f"{name}-saved", f"{name}-exported"):
                is_dcp = path == name
                weight_format = "dcp" if is_dcp else "hf"
                loading.load(SaveLoadMeta(f"{folder}/{path}", weight_format, with_optim=is_dcp))
                for own, weight in loading.model.named_parameters():
                    assert torch.equal(local_tensor(weight), local_tensor(expected[own])), path
            train(loading, range(1))  # changes the weights before the next load


def test_checkpoints_and_exports_load_with_any_other_recipe(tmp_path: Path) -> None:
    run_ranks(1, _loaded_into_each_other, str(tmp_path))


def test_first_and_last_layers_and_modules_outside_of_layers_stay_in_bf16() -> None:
    recipe = replace(RECIPES["blockwise"], first_last_layers_bf16=True, num_layers_at_end_in_bf16=0)

    def names(model: TransformerConfig) -> set[str]:
        engine = Run(recipe, model).engine()
        return {
            name
            for name, module in engine.model.named_modules()
            if getattr(module, "recipe", None) is not None
        }

    attention = {"linear_qkv", "linear_proj"}
    found = [run_ranks(1, names, model)[0] for model in (DENSE, MIXTURE)]
    assert found[0] == {
        *(f"decoder.layers.{n}.self_attention.{name}" for n in (1, 2) for name in attention),
        *(f"decoder.layers.{n}.mlp.linear_fc{k}" for n in (1, 2) for k in (1, 2)),
    }
    assert found[1] == {
        *(f"decoder.layers.1.self_attention.{name}" for name in attention),
        *(
            f"decoder.layers.1.mlp.{part}.linear_fc{k}"
            for part in ("experts", "shared_experts")
            for k in (1, 2)
        ),
    }


def test_hugging_face_exports_have_no_amax_histories(tmp_path: Path) -> None:
    def export(folder: str) -> list[str]:
        engine = Run(RECIPES["delayed"]).engine()
        train(engine, range(1))
        engine.save(SaveLoadMeta(folder, "hf", with_optim=False))
        before = contents_of(engine)
        again = Run(RECIPES["delayed"]).engine()
        again.load(SaveLoadMeta(folder, "hf", with_optim=False))
        after = contents_of(again)
        assert before.weights.keys() == after.weights.keys()
        # Exported weights are bf16.
        assert all(
            torch.allclose(after.weights[name], weight, rtol=2**-8, atol=0)
            for name, weight in before.weights.items()
        )
        return [*load_file(f"{folder}/model.safetensors")]

    (names,) = run_ranks(1, export, str(tmp_path / "hf"))
    assert names
    assert not [name for name in names if "amax" in name]
