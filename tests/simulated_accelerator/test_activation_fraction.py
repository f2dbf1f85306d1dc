"""A fraction of the layers' activations in host memory, on an accelerator: the same losses, and the
more layers move, the less memory a step takes.
"""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch

from megatron.core.activation_offload import ActivationOffload
from megatron.core.device import Device, reserve_of
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.behaviours import (
    DEFAULT_LAST,
    GPU_WITH_PAUSES,
    LANES_LAST,
    WITH_PAUSES,
    Behaviour,
    these_behaviours,
)

NUM_LAYERS, NUM_MOVABLE = 8, 6
FRACTIONS = (0.0, 1 / 6, 1 / 3, 0.5, 2 / 3, 1.0)


class Seen(NamedTuple):
    """Two steps: losses, the sums of all gradients, and peak bytes besides the weights."""

    losses: list[float]
    gradients: list[float]
    peak: int


def _model(kind: str = "sim") -> GPTModel:
    torch.manual_seed(0)
    sizes = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return GPTModel(TransformerConfig(NUM_LAYERS, 64, 2, **sizes), 64).to(kind)


def _tokens(step: int, kind: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(64, (4, 32), generator=generator).pin_memory().to(kind)


def _step(model: GPTModel, step: int) -> torch.Tensor:
    tokens = _tokens(step, model.embedding.word_embeddings.weight.device.type)
    loss = model(tokens, tokens.roll(-1, 1)).mean()
    loss.backward()
    return loss.detach()


def _seen(fraction: float, kind: str) -> Seen:
    model, module = _model(kind), torch.get_device_module(kind)
    offload = ActivationOffload(Device(kind), 16 << 20, smallest_nbytes=1024)
    offload.attach(model.decoder.layers, fraction=fraction)
    losses = []
    for step in range(2):  # the second one has gradients from the start
        gc.collect()
        module.synchronize()
        module.reset_peak_memory_stats()
        before = torch.accelerator.memory_allocated()
        losses.append(_step(model, step))
        peak = torch.accelerator.max_memory_allocated() - before
    sums = [parameter.grad.double().sum() for parameter in model.parameters()]  # type: ignore[union-attr]
    return Seen([each.item() for each in losses], [each.item() for each in sums], peak)


def _seen_on_device(behaviour: Behaviour) -> list[Seen]:
    with behaviour.applied():
        return [_seen(fraction, behaviour.kind) for fraction in FRACTIONS]


@these_behaviours(LANES_LAST, DEFAULT_LAST, WITH_PAUSES, GPU_WITH_PAUSES)
def test_the_more_layers_move_the_less_memory_a_step_takes(behaviour: Behaviour) -> None:
    (found,) = run_ranks(1, _seen_on_device, behaviour, device=behaviour.kind)
    assert [seen[:2] for seen in found] == [found[0][:2]] * len(FRACTIONS)
    peaks = [seen.peak for seen in found]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks)


def _numbers_moving(rooms: list[float]) -> list[int]:
    """How many layers move on a link of no speed, with room for this many layers' activations."""
    import tests.simulated_accelerator.device as sim

    found = []
    for room in rooms:
        model = _model()
        offload = ActivationOffload(Device("sim"), 16 << 20, smallest_nbytes=1024)
        offload.attach(model.decoder.layers, fraction="auto")
        _step(model, 0)
        torch.sim.synchronize()  # type: ignore[attr-defined]
        reserved = torch.sim.memory_reserved()  # type: ignore[attr-defined]
        a_layer = offload.peak_nbytes // NUM_MOVABLE
        # Such a device has less than its reserve, but for the room.
        total = int(room * a_layer) + reserve_of(0)
        assert reserved < reserve_of(0) // 2
        with sim.configured(memory_bytes=total):
            offload._adapt(compute=1e-6, link=1e6)
        found.append(offload.num_moving)
        _step(model, 1)
    return found


@pytest.mark.sim
def test_auto_keeps_no_more_layers_than_the_device_has_room_for() -> None:
    (found,) = run_ranks(1, _numbers_moving, [0.0, 0.5, 2.5, 4.0, 100.0], device="sim")
    assert found == [6, 6, 4, 2, 0]


def _adapted() -> Any:
    model = _model()
    offload = ActivationOffload(Device("sim"), 16 << 20, smallest_nbytes=1024)
    offload.attach(model.decoder.layers, fraction="auto")
    losses = []
    for step in range(4):
        losses.append(_step(model, step).item())
        offload.end_step()
    return losses, offload._spans is None, offload.num_moving


@pytest.mark.sim
def test_auto_decides_by_the_devices_own_times() -> None:
    ((losses, is_decided, moving),) = run_ranks(1, _adapted, device="sim")
    assert is_decided
    assert 0 <= moving <= NUM_MOVABLE

    def plain() -> list[float]:
        model = _model()
        return [_step(model, step).item() for step in range(4)]

    (expected,) = run_ranks(1, plain, device="sim")
    assert losses == expected
