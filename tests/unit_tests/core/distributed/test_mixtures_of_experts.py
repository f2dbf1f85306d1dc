"""Models with experts train on two ranks as on one, under both engines: their layers' outputs are
pairs, which the engines' hooks must look into.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megatron.core.device import Device
from megatron.core.distributed import megatron_fsdp, torch_fsdp2
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp import fully_shard_optimizer
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import run_ranks

SEED, NUM_STEPS, NUM_SEQUENCES = 3, 4, 4


def _model(recompute: str | None) -> GPTModel:
    config = TransformerConfig(
        num_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        swiglu=True,
        num_experts=6,
        moe_ffn_hidden_size=16,
        moe_shared_expert_intermediate_size=16,
        # By sequence, since the loss of all tokens is not the mean of those of two halves.
        moe_router_load_balancing_type="seq_aux_loss",
        moe_aux_loss_coeff=0.5,
        moe_z_loss_coeff=0.01,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        recompute_granularity=recompute,
    )
    with torch.device("meta"):
        return GPTModel(config, 32)


def _train(model: GPTModel, optimizer: torch.optim.Optimizer, rows: slice) -> Tensor:
    """Of each step, the losses and the loads of these sequences: [steps, 2 + layers * experts]."""
    generator = torch.Generator().manual_seed(SEED)
    text = torch.randint(32, (NUM_SEQUENCES, 9), generator=generator)[rows]
    found = []
    for _ in range(NUM_STEPS):
        losses, report = model(text[:, :-1], text[:, 1:], with_routing=True)
        loss, auxiliary = losses.mean(), report.balance_loss + report.z_loss
        (loss + auxiliary).backward()
        optimizer.step()
        optimizer.zero_grad()
        numbers = torch.stack((loss, auxiliary)).detach().double()
        found.append(torch.cat((numbers, report.load.flatten().double())))
    return torch.stack(found)


def _train_on_a_rank(engine: str, recompute: str | None) -> Tensor:
    model = _model(recompute)
    mesh, target = build_mesh("cpu", dist.get_world_size()), torch.device("cpu")
    if engine == "megatron":
        megatron_fsdp.shard_model(
            model,
            mesh,
            Device("cpu"),
            DataParallelConfig(),
            compute_dtype=torch.float32,
            reset_parameters=seeded_reset(model, target, SEED),
        )
    else:
        torch_fsdp2.shard_model(
            model, mesh, compute_dtype=torch.float32, reshard_after_forward=True
        )
        materialize(model, target, SEED)

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if engine == "megatron":
        fully_shard_optimizer(optimizer)
    share = NUM_SEQUENCES // dist.get_world_size()
    return _train(model, optimizer, slice(dist.get_rank() * share, (dist.get_rank() + 1) * share))


@pytest.mark.parametrize("recompute", [None, "full"])
@pytest.mark.parametrize("engine", ["megatron", "FSDP2"])
def test_losses_and_loads_match_one_process(engine: str, recompute: str | None) -> None:
    alone = _model(None)
    materialize(alone, "cpu", SEED)
    expected = _train(alone, torch.optim.AdamW(alone.parameters(), lr=1e-2), slice(NUM_SEQUENCES))
    ranks = run_ranks(2, _train_on_a_rank, engine, recompute)

    losses = torch.stack(ranks).mean(0)[:, :2]
    torch.testing.assert_close(losses, expected[:, :2], rtol=1e-5, atol=1e-6)
    assert torch.equal(sum(ranks)[:, 2:], expected[:, 2:])
    assert losses[-1].sum() < losses[0].sum()
