"""Training with layers that ranks divide computes what training with whole ones does.

Four ranks train the same eight samples in a step. Two or four of them divide the layers, or none.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine
from tests.helpers.engine_contents import contents_of, differing
from tests.helpers.ranks import random_delays, run_ranks
from tests.unit_tests.training.helpers.divided_runs import (
    GLOBAL,
    MIXTURE,
    MOVING,
    OFFLOADED,
    Case,
    engine_for,
    expect_same,
    own_samples,
    train,
)

FOUR_GROUPS: dict[str, Any] = {"num_query_groups": 4}
CASES = {
    "grouped queries, biases and untied embeddings": Case(
        {
            **FOUR_GROUPS,
            "num_attention_heads": 8,
            "swiglu": False,
            "normalization": "LayerNorm",
            "add_bias_linear": True,
            "add_qkv_bias": True,
            "untie_embeddings_and_output_weights": True,
            "z_loss_coeff": 1e-2,
        }
    ),
    "SwiGLU, and fewer key heads than ranks": Case({"qk_layernorm": True}, has_documents=True),
    "latent attention": Case(
        {
            "multi_latent_attention": True,
            "group_query_attention": False,
            "num_query_groups": None,
            "kv_channels": None,
            "q_lora_rank": 12,
            "kv_lora_rank": 8,
            "qk_head_dim": 6,
            "qk_pos_emb_head_dim": 4,
            "v_head_dim": 6,
        },
    ),
    "delta nets": Case(
        {
            **FOUR_GROUPS,
            "linear_attention_freq": "[1,0]",
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "attention_output_gate": True,
            "qk_layernorm": True,
        },
        has_documents=True,
    ),
    "experts": Case({**FOUR_GROUPS, **MIXTURE}),
    "experts on two ranks": Case({**FOUR_GROUPS, **MIXTURE}, has_documents=True, expert_size=2),
    "images": Case(has_images=True),
    "frozen layers and embedding": Case(
        {**FOUR_GROUPS, "add_bias_linear": True},
        frozen=("embedding", "decoder.layers.0.mlp", "decoder.layers.1.self_attention"),
    ),
}
SHARDINGS: dict[str, dict[str, Any]] = {
    "none": {"data_parallel_sharding_strategy": "no_shard"},
    "ZeRO-1": {"data_parallel_sharding_strategy": "optim"},
    "ZeRO-2": {"data_parallel_sharding_strategy": "optim_grads"},
    "HSDP": {"num_distributed_optimizer_instances": 2},
    "HFSDP": {"num_distributed_optimizer_instances": 2, "outer_dp_sharding_strategy": "optim"},
}


def engine_of(case: Case, tensor_size: int, *others: Any, **parallel: Any) -> ModuleEngine:
    return engine_for(case, *others, tensor_model_parallel_size=tensor_size, **parallel)


def _compare(case: Case, sizes: tuple[int, ...], options: list[dict[str, Any]]) -> None:
    whole = engine_of(case, 1)
    expected = train(whole, case)
    evaluation = whole.eval_batch(own_samples(whole, 5, case), case.forward_step())
    for size, parallel in itertools.product(sizes, options):
        engine = engine_of(case, size, **parallel)
        expect_same(train(engine, case), expected)
        found = engine.eval_batch(own_samples(engine, 5, case), case.forward_step())
        assert found == pytest.approx(evaluation, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_loads_match_whole_layers(name: str) -> None:
    run_ranks(4, _compare, CASES[name], (2, 4), [{}])


@pytest.mark.parametrize("sharding", SHARDINGS)
@pytest.mark.parametrize(
    "name",
    [
        name if name == "experts on two ranks" else pytest.param(name, marks=pytest.mark.wide)
        for name in CASES
    ],
)
def test_layers_are_divided_under_every_sharding_of_parameters(name: str, sharding: str) -> None:
    options = SHARDINGS[sharding]
    is_hybrid = "num_distributed_optimizer_instances" in options
    run_ranks(4, _compare, CASES[name], (2,) if is_hybrid else (2, 4), [options])


@pytest.mark.parametrize(
    "name",
    [
        "SwiGLU, and fewer key heads than ranks",
        "delta nets",
        *(
            pytest.param(name, marks=pytest.mark.wide)
            for name in ("latent attention", "experts on two ranks", "images")
        ),
    ],
)
@pytest.mark.parametrize("comm_type", ["a2a", "all_gather"])
def test_ranks_divide_layers_and_sequences(name: str, comm_type: str) -> None:
    options = {"context_parallel_size": 2, "cp_comm_type": comm_type}
    run_ranks(4, _compare, CASES[name], (2,), [options])


def _offloaded(granularity: str | None) -> None:
    case = CASES["experts on two ranks"]
    recomputing = case._replace(model={**case.model, "recompute_granularity": granularity})
    on_device = engine_of(case, 2)
    results = train(on_device, case)
    with random_delays(seed=3):
        offloaded = engine_of(recomputing, 2, OFFLOADED, MOVING)
        assert train(offloaded, case) == results
    assert differing(contents_of(offloaded), contents_of(on_device)) == []


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
def test_neither_offloading_nor_recomputation_changes_a_bit(granularity: str | None) -> None:
    run_ranks(4, _offloaded, granularity)


def _resumed(folder: str, name: str) -> None:
    case = CASES[name]
    engine = engine_of(case, 2)
    train(engine, case, range(1))
    engine.save(SaveLoadMeta(f"{folder}/saved", with_optim=True))
    saved = contents_of(engine)
    expected = train(engine, case, range(1, 3))

    for size in (1, 2, 4):
        other = engine_of(case, size)
        other.load(SaveLoadMeta(f"{folder}/saved", with_optim=True))
        assert other.step_info().consumed_samples == GLOBAL
        assert differing(contents_of(other), saved) == []
        expect_same(train(other, case, range(1, 3)), expected)


@pytest.mark.parametrize("name", ["delta nets", "experts on two ranks"])
def test_a_run_resumes_with_layers_divided_otherwise(tmp_path: Path, name: str) -> None:
    run_ranks(4, _resumed, str(tmp_path), name)


def _initial(name: str) -> None:
    case = CASES[name]
    whole, divided = (contents_of(engine_of(case, size)) for size in (1, 4))
    assert differing(divided, whole) == []


@pytest.mark.parametrize("name", CASES)
def test_initial_weights_do_not_depend_on_how_layers_are_divided(name: str) -> None:
    run_ranks(4, _initial, name)


def _exchanges_once_more() -> str:
    case = CASES["experts"]
    engine = engine_of(case, 2)
    train(engine, case, range(1))
    if dist.get_rank() == 1:
        engine.model.decoder.layers[1].self_attention.tensor._note(is_backward=True)
    with pytest.raises(RuntimeError) as caught:
        train(engine, case, range(1))
    return str(caught.value)


def test_ranks_that_do_not_exchange_alike_are_told_before_the_step() -> None:
    for message in run_ranks(2, _exchanges_once_more):
        assert "rank 1 exchanged gradients of tokens for decoder.layers.1" in message


def _uneven() -> None:
    engine = engine_of(CASES["experts"], 4)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 ranks .* 6 positions"):
        engine.model(tokens, tokens)


def test_sequences_that_ranks_cannot_divide_are_rejected() -> None:
    run_ranks(4, _uneven)


def _indivisible() -> None:
    case = Case({"num_attention_heads": 2})
    with pytest.raises(ValueError, match=r"--context-parallel-size: .* 2 attention heads .* 2"):
        engine_of(case, 2, context_parallel_size=2)
    engine_of(case, 2, context_parallel_size=2, cp_comm_type="all_gather")


def test_heads_that_ranks_of_both_axes_cannot_divide_are_rejected() -> None:
    run_ranks(4, _indivisible)
