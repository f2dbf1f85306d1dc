"""Experts divided over ranks, on the simulated accelerator: tokens travel on the
compute stream, concurrently with the collectives of FSDP's lanes.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core.distributed.experts import ExpertExchange
from tests.helpers.mixtures import OFFLOADED, Trained, mixture_engine, train
from tests.helpers.ranks import on_ranks, rank_device, run_ranks
from tests.simulated_accelerator.helpers.behaviours import (
    LANES_LAST,
    ONE_QUEUE,
    Behaviour,
    all_behaviours,
)

pytestmark = pytest.mark.sim

STEPS = range(2)


def _settings(is_offloaded: bool) -> dict[str, Any]:
    return {"optimizer": OFFLOADED} if is_offloaded else {}


def _on_cpu(is_offloaded: bool) -> Trained:
    return train(mixture_engine(2, **_settings(is_offloaded)), STEPS)


def _on_device(is_offloaded: bool, behaviour: Behaviour) -> Trained:
    with behaviour.applied():
        engine = mixture_engine(2, **_settings(is_offloaded))
        trained = train(engine, STEPS)
        engine.state.optimizer.synchronize()
        return trained


@cache
def _expected(is_offloaded: bool) -> Trained:
    return run_ranks(2, _on_cpu, is_offloaded)[0]


@pytest.mark.parametrize("is_offloaded", [True, pytest.param(False, marks=pytest.mark.wide)])
@all_behaviours(LANES_LAST, ONE_QUEUE)
def test_experts_divided_over_devices_give_the_numbers_of_the_cpu(behaviour, is_offloaded):
    expected = _expected(is_offloaded)
    ranks = run_ranks(2, _on_device, is_offloaded, behaviour, device="sim")
    assert torch.equal(ranks[0].loads, expected.loads)
    for trained in ranks:
        assert trained.losses == ranks[0].losses
        assert trained.losses == pytest.approx(expected.losses, rel=1e-6)
        assert trained.norms == pytest.approx(expected.norms, rel=1e-5)


@on_ranks(2, device="sim")
def test_the_host_waits_once_for_an_exchange() -> None:
    import tests.simulated_accelerator.device as sim

    loads = torch.tensor([[3, 0, 1, 2], [0, 4, 2, 0]])[dist.get_rank()]
    exchange = ExpertExchange(dist.group.WORLD)
    counts = loads.to(rank_device())
    tokens = torch.arange(6.0).unsqueeze(1).to(rank_device()).requires_grad_()
    assert loads.sum() == len(tokens)

    before = sim.counters()
    sent = exchange.send(tokens, counts)
    done = sim.counters() - before
    assert (done.stream_syncs, done.event_syncs, done.sync_operators) == (1, 0, 0)

    before = sim.counters()
    outputs = exchange.bring_back(sent.tokens * 2, sent)
    outputs.sum().backward()
    done = sim.counters() - before
    assert (done.stream_syncs, done.event_syncs, done.sync_operators) == (0, 0, 0)
    assert torch.equal(outputs.cpu(), 2 * tokens.detach().cpu())
    assert torch.equal(tokens.grad.cpu(), torch.full((6, 1), 2.0))
