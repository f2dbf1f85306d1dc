"""Ranks that divide experts and do not run the same mixtures: an error on all, no rank waits."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.router import RouterReport
from tests.helpers.mixtures import mixture_engine, train
from tests.helpers.ranks import run_ranks

TELLS = (
    r"Expected every rank to do the same, got: this rank is about to .*; rank \d of its group is "
    r"about to .*\."
)
FIRST = "decoder.layers.1.mlp.experts"


def _pass_by(layer: MoELayer, hidden: Tensor) -> tuple[Tensor, RouterReport]:
    return hidden * 1.0, layer.router(hidden).report


def _back_past(layer: MoELayer, hidden: Tensor) -> tuple[Tensor, RouterReport]:
    output, report = MoELayer.forward(layer, hidden)
    return hidden + output.detach(), report


def _disagree(case: str, expert_size: int, strategy: str) -> str:
    rank = dist.get_rank()
    engine = mixture_engine(expert_size, strategy)
    mixtures = [module for module in engine.model.modules() if isinstance(module, MoELayer)]
    if case == "each skips another":
        skipped = mixtures[min(rank, 1)]
        skipped.forward = partial(_pass_by, skipped)
    elif rank == 0:
        way = _back_past if case == "one goes back past it" else _pass_by
        mixtures[0].forward = partial(way, mixtures[0])
    with pytest.raises(RuntimeError, match=TELLS) as caught:
        train(engine, [0])
    return str(caught.value)


CASES = ["one skips the first", "each skips another", "one goes back past it"]


@pytest.mark.parametrize("strategy", ["optim_grads_params", "no_shard"])
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_do_not_run_the_same_mixtures_are_all_told(case, strategy):
    told = run_ranks(2, _disagree, case, 2, strategy, timeout=60)
    exchange = "exchange gradients of tokens" if case == CASES[2] else "exchange tokens"
    assert all(f"about to {exchange} for {FIRST}" in message for message in told), told


@pytest.mark.wide
@pytest.mark.parametrize("expert_size", [2, 4])
@pytest.mark.parametrize("case", CASES)
def test_four_ranks_that_do_not_run_the_same_mixtures_are_all_told(case, expert_size):
    run_ranks(4, _disagree, case, expert_size, "optim_grads_params", timeout=60)
