"""Ranks that divide experts and do not run the same mixtures: an error on all."""

from __future__ import annotations

from functools import partial

import pytest
import torch.distributed as dist
from torch import Tensor

from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.router import RouterReport
from megatron.training.engines import ModuleEngine
from tests.helpers.mixtures import mixture_engine, train
from tests.helpers.ranks import run_ranks


def _pass_by(layer: MoELayer, hidden: Tensor, _: object) -> tuple[Tensor, RouterReport]:
    return hidden * 1.0, layer.router(hidden).report


def _mixtures(engine: ModuleEngine) -> list[MoELayer]:
    return [module for module in engine.model.modules() if isinstance(module, MoELayer)]


def _error_of_step(engine: ModuleEngine, step: int) -> str:
    with pytest.raises(RuntimeError) as caught:
        train(engine, [step])
    return str(caught.value)


def _skip_another() -> str:
    """Without gathers, in which they would wait, ranks meet in the exchanges of two mixtures."""
    engine = mixture_engine(2, "no_shard")
    skipped = _mixtures(engine)[dist.get_rank()]
    skipped.forward = partial(_pass_by, skipped)
    return _error_of_step(engine, 0)


def test_ranks_that_meet_in_the_exchanges_of_different_mixtures_are_all_told():
    for message in run_ranks(2, _skip_another):
        assert "decoder.layers.1.mlp" in message
        assert "decoder.layers.2.mlp" in message


def _exchange_once_more() -> str:
    engine = mixture_engine(2)
    train(engine, [0])
    if dist.get_rank() == 1:
        _mixtures(engine)[0].experts.parameter_groups[0].record_exchange(is_backward=True)
    return _error_of_step(engine, 1)


def test_exchanges_of_tokens_are_compared_before_the_step():
    for message in run_ranks(2, _exchange_once_more):
        assert "rank 1 exchanged gradients of tokens for decoder.layers.1.mlp.experts" in message
