"""Training with each sequence divided over ranks computes what training with whole ones does.

Four ranks train the same eight samples in a step, whose rows two or four of them divide, or none.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.config import ExecutionConfig
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.optimizer.config import OptimizerConfig
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

CASES = {
    "windows, sinks and softcaps": Case(
        {
            "window_size": (6, 0),
            "window_attn_skip_freq": "[1,0]",
            "softmax_type": "learnable",
            "attn_logit_softcapping": 5.0,
        }
    ),
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
        has_documents=True,
    ),
    "delta nets and documents": Case(
        {
            "linear_attention_freq": "[1,0]",
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 12,
            "attention_output_gate": True,
            "qk_layernorm": True,
        },
        has_documents=True,
    ),
    "experts on two ranks": Case({**MIXTURE, "z_loss_coeff": 1e-2}, expert_size=2),
    "documents and experts": Case(
        {**MIXTURE, "moe_router_load_balancing_type": "seq_aux_loss"},
        has_documents=True,
        expert_size=2,
    ),
    "images": Case(has_images=True),
}


def engine_of(
    case: Case,
    context_size: int,
    optimizer: OptimizerConfig | None = None,
    execution: ExecutionConfig | None = None,
    **parallel: Any,
) -> ModuleEngine:
    return engine_for(case, optimizer, execution, context_parallel_size=context_size, **parallel)


def _compare(case: Case) -> None:
    whole = engine_of(case, 1)
    expected = train(whole, case)
    evaluation = whole.eval_batch(own_samples(whole, 5, case), case.forward_step())
    for size, kind in itertools.product((2, 4), ("a2a", "all_gather")):
        engine = engine_of(case, size, cp_comm_type=kind)
        expect_same(train(engine, case), expected)
        found = engine.eval_batch(own_samples(engine, 5, case), case.forward_step())
        assert found == pytest.approx(evaluation, rel=1e-6)


@pytest.mark.parametrize("name", CASES)
def test_losses_norms_and_loads_match_whole_sequences(name: str) -> None:
    run_ranks(4, _compare, CASES[name])


def _patches_in_the_tower() -> set[int]:
    case, seen = CASES["images"], set[int]()
    engine = engine_of(case, 4)
    engine.model.vision_model.register_forward_pre_hook(lambda _, inputs: seen.add(len(inputs[0])))
    train(engine, case, range(1))
    return seen


def test_ranks_that_divide_a_sequence_divide_its_images() -> None:
    # Images of 24, 4, 16, 8 and 4 patches.
    assert run_ranks(4, _patches_in_the_tower) == [{24}, {4}, {16}, {8 + 4}]


def _with_other_sharding() -> None:
    case = CASES["experts on two ranks"]
    expected = train(engine_of(case, 1), case)
    for strategy in ("no_shard", "optim", "optim_grads"):
        engine = engine_of(case, 2, data_parallel_sharding_strategy=strategy)
        expect_same(train(engine, case), expected)
    for outer in ("no_shard", "optim"):
        engine = engine_of(
            case, 4, num_distributed_optimizer_instances=2, outer_dp_sharding_strategy=outer
        )
        expect_same(train(engine, case), expected)


def test_sequences_are_divided_under_every_sharding_of_parameters() -> None:
    run_ranks(4, _with_other_sharding)


def _offloaded(name: str, kind: str, granularity: str | None) -> None:
    case = CASES[name]
    recomputing = case._replace(model={**case.model, "recompute_granularity": granularity})
    on_device = engine_of(case, 2, cp_comm_type=kind)
    results = train(on_device, case)
    with random_delays(seed=3):
        offloaded = engine_of(recomputing, 2, OFFLOADED, MOVING, cp_comm_type=kind)
        assert train(offloaded, case) == results
    assert differing(contents_of(offloaded), contents_of(on_device)) == []


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
@pytest.mark.parametrize(
    ("name", "kind"),
    [("documents and experts", "a2a"), ("delta nets and documents", "all_gather")],
)
def test_neither_offloading_nor_recomputation_changes_a_bit(
    name: str, kind: str, granularity: str | None
) -> None:
    run_ranks(4, _offloaded, name, kind, granularity)


def _compiled() -> None:
    case = CASES["documents and experts"]
    expected = [result.loss for result in train(engine_of(case, 1), case)]
    engine = engine_of(case, 2, execution=ExecutionConfig(compile_layers=True))
    found = [result.loss for result in train(engine, case)]
    assert found == pytest.approx(expected, rel=1e-5)


@pytest.mark.wide
def test_layers_are_compiled_around_the_exchanges_of_ranks() -> None:
    run_ranks(2, _compiled)


def _saved(folder: str) -> None:
    """Saves the first state from whole sequences and from divided ones, and a later one."""
    case = CASES["experts on two ranks"]
    for size in (1, 4):
        engine = engine_of(case, size)
        engine.save(SaveLoadMeta(f"{folder}/first_{size}", with_optim=True))
    train(engine, case, range(1))
    engine.save(SaveLoadMeta(f"{folder}/later", with_optim=True))
    expected = train(engine, case, range(1, 3))

    for size in (1, 2):
        other = engine_of(case, size)
        other.load(SaveLoadMeta(f"{folder}/later", with_optim=True))
        assert other.step_info().consumed_samples == GLOBAL
        expect_same(train(other, case, range(1, 3)), expected)


def test_a_checkpoint_is_that_of_whole_sequences_and_resumes_with_others(tmp_path: Path) -> None:
    run_ranks(4, _saved, str(tmp_path))
    whole, divided = (
        open_checkpoint(open_store(str(tmp_path)), f"first_{size}") for size in (1, 4)
    )
    assert whole.tensors.keys() == divided.tensors.keys()
    files = sorted(path.name for path in (tmp_path / "first_1").glob("*.distcp"))
    assert len(files) == 4
    for name in files:
        one, other = ((tmp_path / f"first_{size}" / name).read_bytes() for size in (1, 4))
        assert one == other


def _exchanges_once_more() -> str:
    engine = engine_of(Case(), 2)
    train(engine, Case(), range(1))
    if dist.get_rank() == 1:
        engine.model.decoder.layers[1].self_attention.exchange._note(is_backward=True)
    with pytest.raises(RuntimeError) as caught:
        train(engine, Case(), range(1))
    return str(caught.value)


def test_ranks_that_do_not_exchange_alike_are_told_before_the_step() -> None:
    for message in run_ranks(2, _exchanges_once_more):
        assert "rank 1 exchanged gradients of tokens for decoder.layers.1" in message


def _uneven() -> None:
    engine = engine_of(Case(), 4)
    tokens = torch.zeros(1, 6, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"4 ranks .* 6 positions"):
        engine.model(tokens, tokens)


def test_sequences_that_ranks_cannot_divide_are_rejected() -> None:
    run_ranks(4, _uneven)
