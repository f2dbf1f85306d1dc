"""Activations in host memory: the same bits, and two layers' worth of memory on the device."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from benchmarks.helpers.memory import peak_bytes
from megatron.core.activation_offload import ActivationOffload, _Storage, moving_layers
from megatron.core.device import Device
from megatron.core.lanes import delays, is_lane_thread
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents

CPU = Device("cpu")
VOCAB, BATCH, SEQ = 64, 2, 64
ROOM = 64 << 20

MODELS: dict[str, dict[str, Any]] = {
    "dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "recomputed": {"recompute_granularity": "full", "hidden_dropout": 0.1},
    "delta nets": {
        "linear_attention_freq": "2",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
    },
    "experts": {"num_experts": 4, "moe_router_topk": 2},
}


def build(num_layers: int = 5, hidden_size: int = 32, **options: Any) -> GPTModel:
    torch.manual_seed(0)
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **options}
    config = TransformerConfig(
        num_layers=num_layers, hidden_size=hidden_size, num_attention_heads=2, **options
    )
    return GPTModel(config, VOCAB)


def offloaded(model: GPTModel, nbytes: int = ROOM, **options: Any) -> ActivationOffload:
    offload = ActivationOffload(CPU, nbytes, **{"smallest_nbytes": 256, **options})
    offload.attach(model.decoder.layers)
    return offload


def loss_of(model: GPTModel, seed: int = 1, documents: Documents | None = None) -> Tensor:
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    losses: Tensor = model(tokens, tokens.roll(-1, 1), documents=documents)
    return losses.mean()


def gradients(model: nn.Module) -> list[Tensor]:
    return [
        parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None
    ]


def assert_same_bits(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected) > 0
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_losses_and_gradients_keep_their_bits_under_delays(name: str) -> None:
    plain, moved = build(**MODELS[name]), build(**MODELS[name])
    offload = offloaded(moved)
    documents = (None, Documents((40, 24, 1, 63)), Documents((64, 64)))
    for seed, some in enumerate(documents):
        expected = loss_of(plain, seed, some)
        expected.backward()
        with delays(seed):
            found = loss_of(moved, seed, some)
            found.backward()
        assert found.item() == expected.item()
    # Of three microbatches, added up.
    assert_same_bits(gradients(moved), gradients(plain))
    assert offload.peak_nbytes > 0


def test_a_batch_may_go_backward_when_another_has_gone_forward() -> None:
    plain, moved = build(), build()
    offloaded(moved)
    for order in ((0, 1), (1, 0)):
        for model in (plain, moved):
            with delays(3):
                losses = [loss_of(model, seed) for seed in range(2)]
                for number in order:
                    losses[number].backward()
        assert_same_bits(gradients(moved), gradients(plain))


def test_a_graph_that_is_kept_goes_backward_twice() -> None:
    plain, moved = build(), build()
    offloaded(moved)
    for model in (plain, moved):
        loss = loss_of(model)
        loss.backward(retain_graph=True)
        loss.backward()
    assert_same_bits(gradients(moved), gradients(plain))


def test_gradients_of_some_layers_alone() -> None:
    plain, moved = build(), build()
    offloaded(moved)
    found = []
    for model in (plain, moved):
        # The layer that was brought back ahead is not needed.
        weight = model.decoder.layers[2].mlp.linear_fc2.weight
        found.append(torch.autograd.grad(loss_of(model), [weight])[0])
        loss_of(model).backward()
    assert torch.equal(*found)
    assert_same_bits(gradients(moved), gradients(plain))


def test_forwards_that_nobody_goes_backward_from_give_their_memory_back() -> None:
    model = build()
    offload = offloaded(model)
    loss_of(model).backward()
    once = offload.peak_nbytes
    for seed in range(5):
        loss_of(model, seed)
    with torch.no_grad():
        loss_of(model)
    gc.collect()
    loss_of(model).backward()
    assert offload.peak_nbytes == once > 0


def test_a_forward_that_fails_does_no_harm() -> None:
    plain, moved = build(), build()
    offload = offloaded(moved)
    with pytest.raises(ValueError, match="documents that fill"):
        loss_of(moved, documents=Documents((7,)))
    hook = moved.decoder.layers[3].mlp.register_forward_hook(_fail)
    with pytest.raises(ArithmeticError):
        loss_of(moved)
    hook.remove()

    loss_of(plain).backward()
    loss_of(moved).backward()
    assert_same_bits(gradients(moved), gradients(plain))
    assert offload.peak_nbytes > 0


def _fail(*_: object) -> None:
    raise ArithmeticError


def test_activations_beyond_the_limit_stay_and_are_logged_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plain, moved = build(), build()
    whole = offloaded(build())
    offload = offloaded(moved, nbytes=100_000)
    with caplog.at_level(logging.WARNING):
        for model in (plain, moved):
            for seed in range(2):
                loss_of(model, seed).backward()
    assert_same_bits(gradients(moved), gradients(plain))
    assert 0 < offload.peak_nbytes <= 100_000 < whole.nbytes
    assert ["97.66 KiB" in record.getMessage() for record in caplog.records] == [True]


def _growth(num_layers: int, fraction: float, **options: Any) -> int:
    """Peak bytes of a step, besides weights and gradients."""
    model = build(num_layers, 128, **options)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=256)
    offload.attach(model.decoder.layers, fraction=fraction)
    return peak_bytes(lambda: loss_of(model).backward())


@pytest.mark.parametrize("options", [{}, {"recompute_granularity": "full"}])
def test_the_peak_of_a_step_does_not_grow_with_the_number_of_layers(
    options: dict[str, Any],
) -> None:
    few, more, many = (_growth(n, 1.0, **options) for n in (3, 6, 12))
    assert few < 1.05 * more
    assert many < 1.02 * more

    # It does without.
    few, many = (_growth(n, 0.0, **options) for n in (3, 12))
    a_layer = (many - few) / 9
    assert a_layer > BATCH * SEQ * 128 * 4 * 0.9
    # Two layers' activations, and a layer's gradients.
    assert more < few


# A fraction of the layers.


@given(size=st.integers(1, 200), share=st.floats(0, 1))
def test_layers_that_move_are_spread_evenly(size: int, share: float) -> None:
    moving = moving_layers(size + 2, share)
    assert len(moving) == round(share * size)
    if moving:
        window = size // len(moving)
        ends = [*moving[1:], size]
        gaps = [after - before for before, after in zip(moving, ends, strict=True)]
        assert moving[0] == 0
        # Each has as long a time for its way, also the last one: two more layers stay.
        assert min(gaps) >= window
        assert max(gaps) <= window + 1
    assert moving_layers(size + 2, "auto") == [*range(size)]


def test_models_of_two_layers_or_fewer_move_no_activations() -> None:
    assert [moving_layers(n, 1.0) for n in range(4)] == [[], [], [], [0]]


FRACTIONS = (0.0, 0.2, 1 / 3, 0.5, 0.7, 1.0)


@pytest.mark.parametrize("options", [{}, {"recompute_granularity": "full"}])
def test_every_fraction_gives_the_same_bits_in_less_memory(options: dict[str, Any]) -> None:
    plain = build(8, 128, **options)
    expected = loss_of(plain)
    expected.backward()
    peaks = []
    for seed, fraction in enumerate(FRACTIONS):
        moved = build(8, 128, **options)
        offload = ActivationOffload(CPU, ROOM, smallest_nbytes=256)
        offload.attach(moved.decoder.layers, fraction=fraction)
        assert offload.num_moving == round(6 * fraction)
        with delays(seed):
            found = loss_of(moved)
            found.backward()
        assert found.item() == expected.item()
        assert_same_bits(gradients(moved), gradients(plain))
        peaks.append(_growth(8, fraction, **options))
    assert peaks == sorted(peaks, reverse=True)
    # Each layer that moves is gone at the peak. Recomputation keeps little, and its peak is a
    # layer's.
    assert len(set(peaks)) == len(peaks) or options


def test_a_layer_that_moves_has_the_time_of_the_layers_up_to_the_next_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, seen = build(8), list[str]()
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=256)
    offload.attach(model.decoder.layers, fraction=1 / 3)
    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(lambda *_, n=number: seen.append(f"{n}"))
        layer.register_full_backward_pre_hook(lambda *_, n=number: seen.append(f"-{n}"))
    for name, shown in (("send_down", "down"), ("bring_up", "up"), ("wait", "wait")):
        own = getattr(offload, name)
        monkeypatch.setattr(
            offload, name, lambda *given, own=own, shown=shown: (seen.append(shown), own(*given))[1]
        )
    loss_of(model).backward()
    forward = "0 1 down 2 3 4 wait down 5 6 7 wait"
    backward = "-7 -6 up -5 -4 -3 up wait -2 -1 -0 wait"
    assert " ".join(seen) == f"{forward} {backward}"


class _Timed:
    """A second for a layer's forward, and some for the copies of one."""

    def __init__(self, seconds_of_copies: float) -> None:
        self._of_copies = seconds_of_copies
        self.seconds: float | None = None

    def __enter__(self) -> None:
        self.seconds = self._of_copies if is_lane_thread() else 1.0

    def __exit__(self, *_: object) -> None:
        pass


@pytest.mark.parametrize(("copies", "moving"), [(0.1, 6), (2.0, 4), (4.0, 2), (100.0, 0)])
def test_auto_moves_as_many_layers_as_copies_hide(
    copies: float, moving: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Device, "span", lambda *_: _Timed(copies))
    plain, moved = build(8), build(8)
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=256)
    offload.attach(moved.decoder.layers, fraction="auto")
    numbers = []
    with caplog.at_level(logging.INFO):
        for seed in range(4):
            for model in (plain, moved):
                loss_of(model, seed).backward()
            numbers.append(offload.num_moving)
            offload.end_step()
    # The first step's times are not taken.
    assert numbers == [6, 6, moving, moving]
    assert_same_bits(gradients(moved), gradients(plain))
    assert [f"{moving} of 6 layers" in record.getMessage() for record in caplog.records] == [True]


def test_tensors_of_one_storage_move_once_and_weights_do_not() -> None:
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1000))

        def forward(self, hidden: Tensor, angles: Tensor) -> Tensor:
            first, second = (hidden * angles).split(500)
            return torch.cat((first * second, second * first)) * self.weight

    layers = nn.ModuleList(Layer() for _ in range(3))
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=1)
    offload.attach(layers)
    hidden = torch.ones(1000, requires_grad=True)
    angles = torch.full((1000,), 2.0, requires_grad=True)
    for layer in layers:
        hidden = layer(hidden, angles)
    hidden.sum().backward()
    # Of the first layer: its input, the product that the halves are views of, and the weight's
    # factor. The other two stay.
    assert offload.peak_nbytes == pytest.approx(3 * 4000, abs=3 * 64)


def test_a_tensor_that_is_written_after_it_was_saved_is_an_error() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            self.saved = hidden * 2
            return self.saved.exp().mul(self.saved)

    layers = nn.ModuleList(Layer() for _ in range(4))
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=1)
    offload.attach(layers)
    hidden = layers[0](torch.ones(100, requires_grad=True))
    layers[0].saved.zero_()
    for layer in layers[1:]:
        hidden = layer(hidden)
    with pytest.raises(RuntimeError, match="not modified in place before backward"):
        hidden.sum().backward()

    # The next batch is unaffected.
    hidden = torch.ones(100, requires_grad=True)
    for layer in layers:
        hidden = layer(hidden)
    hidden.sum().backward()


def test_tensors_that_were_saved_and_dropped_may_be_written() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            own = hidden * 2
            (own * own).sum()  # saved, and dropped
            own += 1
            return own * own

    layers = nn.ModuleList(Layer() for _ in range(3))
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=1)
    offload.attach(layers)
    first = torch.full((100,), 0.1, requires_grad=True)
    hidden = first
    for layer in layers:
        hidden = layer(hidden)
    hidden.sum().backward()
    plain = torch.full((100,), 0.1, requires_grad=True)
    hidden = plain
    for _ in layers:
        hidden = Layer()(hidden)
    hidden.sum().backward()
    assert first.grad is not None
    assert plain.grad is not None
    assert torch.equal(first.grad, plain.grad)


def test_conjugates_stay() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return (hidden.conj() * hidden * hidden.mH.mT).tanh()

    found = []
    for attaches in (False, True):
        layers = nn.ModuleList(Layer() for _ in range(4))
        if attaches:
            ActivationOffload(CPU, ROOM, smallest_nbytes=1).attach(layers)
        first = torch.complex(torch.linspace(0.1, 0.9, 16), torch.linspace(0.9, 0.3, 16)).view(4, 4)
        hidden = first.requires_grad_()
        for layer in layers:
            hidden = layer(hidden)
        hidden.abs().sum().backward()
        found.append(first.grad)
    assert torch.equal(*found)


def test_small_outputs_that_are_saved_with_their_operation_keep_no_graph_alive() -> None:
    class Layer(nn.Module):
        def forward(self, hidden: Tensor) -> Tensor:
            return hidden.sin() * hidden.mean().sigmoid()

    layers = nn.ModuleList(Layer() for _ in range(4))
    offload = ActivationOffload(CPU, ROOM, smallest_nbytes=1000)
    offload.attach(layers)
    gc.collect()
    before = sum(isinstance(one, _Storage) for one in gc.get_objects())
    for _ in range(3):
        hidden = torch.ones(1000, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden)
        del hidden
    gc.collect()
    assert sum(isinstance(one, _Storage) for one in gc.get_objects()) == before


def test_wrong_use_is_rejected() -> None:
    model = build()
    offload = offloaded(model)
    with pytest.raises(ValueError, match="not attached yet, got layer 0"):
        offload.attach(model.decoder.layers)
    one = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="got layer 1 twice"):
        offload.attach([one, one])
    for fraction in (-0.1, 1.5, float("nan")):
        with pytest.raises(ValueError, match=f"from 0 to 1, or 'auto', got {fraction}"):
            offload.attach(build(3).decoder.layers, fraction=fraction)
    with pytest.raises(ValueError, match="at least one byte, got 0"):
        ActivationOffload(CPU, 0)


def test_a_copy_of_a_model_is_independent() -> None:
    model = build()
    offload = offloaded(model)
    other = copy.deepcopy(model)
    loss_of(other).backward()
    assert offload.peak_nbytes == 0
    loss_of(model).backward()
    assert offload.peak_nbytes > 0
    assert_same_bits(gradients(other), gradients(model))
    offloaded(other)


def test_what_stays_for_want_of_room_is_freed_with_its_graph() -> None:
    gc.collect()
    gc.disable()
    try:
        layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))
        offload = ActivationOffload(CPU, 1, smallest_nbytes=1)
        offload.attach(layers)
        hidden = torch.ones(8, 64, requires_grad=True)
        for layer in layers:
            hidden = layer(hidden).sin()
        assert [one for one in gc.get_objects() if isinstance(one, _Storage)]
        del hidden
        assert not [one for one in gc.get_objects() if isinstance(one, _Storage)]
    finally:
        gc.enable()


def test_a_model_is_freed_with_its_offload() -> None:
    gc.collect()
    gc.disable()
    try:
        model = build()
        offload = offloaded(model)
        loss_of(model).backward()
        alive = [weakref.ref(model.decoder.layers[0].mlp), weakref.ref(offload)]
        del model, offload
        assert [one() for one in alive] == [None, None]
    finally:
        gc.enable()


def test_timings_report_moves_and_waits() -> None:
    model = build()
    offload = offloaded(model, records_timings=True)
    for seed in range(2):
        loss_of(model, seed).backward()
        offload.end_step()
    timings = offload.timings()
    assert timings is not None
    assert timings.num_steps == 2
    assert min(timings.d2h, timings.h2d, timings.waited_d2h, timings.waited_h2d) > 0
    assert timings.host == 0
    assert offload.timings() is None
    assert offloaded(build()).timings() is None
