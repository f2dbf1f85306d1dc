"""The output projection and the cross entropy in one, which never have the logits of all tokens."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.helpers.memory import peak_bytes
from megatron.core import products
from megatron.core.transformer.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)

NUM_TOKENS, VOCAB, WIDTH = 37, 50, 12
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


class Inputs(NamedTuple):
    hidden: Tensor
    weight: Tensor
    labels: Tensor
    token_weights: Tensor


def inputs(dtype: torch.dtype = torch.float32, num_tokens: int = NUM_TOKENS) -> Inputs:
    """Leaves that want gradients, and weights some of which are zero."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(VOCAB, WIDTH, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    counts = torch.rand(num_tokens, generator=generator) * (torch.arange(num_tokens) % 3 > 0)
    return Inputs(hidden, weight, labels, counts / max(1, num_tokens))


def expected_of(given: Inputs, options: HeadOptions) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The weighted sum, the z-loss in it, and both gradients, by torch in fp64."""
    hidden, weight = (x.detach().double().requires_grad_() for x in given[:2])
    logits = F.linear(hidden, weight)
    if options.softcap is not None:
        logits = options.softcap * torch.tanh(logits / options.softcap)
    losses = F.cross_entropy(logits, given.labels, reduction="none")
    z_loss = options.z_coeff * (given.token_weights * logits.logsumexp(1).square()).sum()
    total = (given.token_weights * losses).sum() + z_loss
    total.backward()
    assert hidden.grad is not None
    assert weight.grad is not None
    return total.detach(), z_loss.detach(), hidden.grad, weight.grad


def assert_close(found: Tensor | None, expected: Tensor, dtype: torch.dtype) -> None:
    """Up to rounding, relative to the largest element."""
    assert found is not None
    tolerance = TOLERANCE[dtype]
    scale = max([1e-30, *expected.abs().flatten().tolist()])
    torch.testing.assert_close(
        found.double() / scale, expected / scale, rtol=tolerance, atol=tolerance
    )


OPTIONS = [
    HeadOptions(chunk_numel=1),
    HeadOptions(chunk_numel=5 * VOCAB),
    HeadOptions(),
    HeadOptions(softcap=2.0, chunk_numel=5 * VOCAB),
    HeadOptions(z_coeff=0.1, chunk_numel=5 * VOCAB),
    HeadOptions(softcap=2.0, z_coeff=0.1),
]


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_sums_and_losses_of_tokens_and_their_gradients_are_torchs(
    dtype: torch.dtype, options: HeadOptions
) -> None:
    given = inputs(dtype)
    found = weighted_cross_entropy(*given, options)
    found.loss.backward()
    loss, z_loss, of_hidden, of_weight = expected_of(given, options)
    assert found.loss.dtype == torch.float32
    assert not found.z_loss.requires_grad
    assert_close(found.loss.detach(), loss, dtype)
    assert_close(found.z_loss, z_loss, dtype)
    assert given.hidden.grad is not None
    assert given.hidden.grad.dtype == dtype
    assert_close(given.hidden.grad, of_hidden, dtype)
    assert_close(given.weight.grad, of_weight, dtype)
    assert bool((z_loss > 0.01) == (options.z_coeff > 0)), "the z-loss matters"

    alone = inputs(dtype)
    losses = linear_cross_entropy(*alone[:3], options)
    assert losses.dtype == torch.float32
    (losses * alone.token_weights).sum().backward()
    loss, _, of_hidden, of_weight = expected_of(alone, HeadOptions(options.softcap))
    assert_close((losses * alone.token_weights).sum().detach(), loss, dtype)
    assert_close(alone.hidden.grad, of_hidden, dtype)
    assert_close(alone.weight.grad, of_weight, dtype)


@settings(max_examples=40, deadline=None)
@given(
    num_tokens=st.integers(0, 40),
    chunk_numel=st.integers(1, 50 * VOCAB),
    scale=st.sampled_from([1e-20, 0.3, 1.0, 65536.0]),
    factor=st.sampled_from([0.0, 1e-30, 1.0, 7.0, -3.0]),
)
def test_any_number_of_tokens_in_any_chunks_with_any_weights(
    num_tokens: int, chunk_numel: int, scale: float, factor: float
) -> None:
    drawn = inputs(num_tokens=num_tokens)
    drawn = drawn._replace(token_weights=drawn.token_weights * factor)
    options = HeadOptions(z_coeff=0.1, chunk_numel=chunk_numel)
    (weighted_cross_entropy(*drawn, options).loss * scale).backward()
    _, _, of_hidden, of_weight = expected_of(drawn, options)
    assert_close(drawn.hidden.grad, of_hidden * scale, torch.float32)
    assert_close(drawn.weight.grad, of_weight * scale, torch.float32)


def test_leading_dims_match_the_labels_and_losses_are_no_view() -> None:
    given = inputs(num_tokens=36)
    expected = linear_cross_entropy(*given[:3])
    hidden = given.hidden.view(4, 9, WIDTH)
    losses = linear_cross_entropy(hidden, given.weight, given.labels.view(4, 9))
    assert torch.equal(losses, expected.view(4, 9))
    assert not losses._is_view()
    (first,) = torch.autograd.grad(losses.sum(), given.hidden)
    (second,) = torch.autograd.grad(expected.sum(), given.hidden)
    assert torch.equal(first, second)
    in_rows = [part.view(4, 9) for part in (given.labels, given.token_weights)]
    found = weighted_cross_entropy(hidden, given.weight, *in_rows)
    assert torch.equal(found.loss, weighted_cross_entropy(*given).loss)


def test_large_logits_do_not_overflow() -> None:
    hidden = torch.tensor([[100.0]], requires_grad=True)
    weight = torch.tensor([[100.0], [-100.0], [0.0]], requires_grad=True)
    found = weighted_cross_entropy(hidden, weight, torch.tensor([1]), torch.ones(1))
    found.loss.backward()
    assert found.loss.item() == 2e4
    assert weight.grad is not None
    assert weight.grad.flatten().tolist() == [100.0, -100.0, 0.0]


def test_gradients_in_fp16_are_not_lost_for_weights_that_are_small() -> None:
    given = inputs(torch.float16)
    small = given.token_weights * 2.0**-30
    # As a loss scaler has it: too small values are multiplied afterwards.
    (weighted_cross_entropy(*given[:3], small).loss * 2.0**30).backward()
    _, _, of_hidden, of_weight = expected_of(given, HeadOptions())
    assert_close(given.hidden.grad, of_hidden, torch.float16)
    assert_close(given.weight.grad, of_weight, torch.float16)
    assert bool((of_hidden.abs() * 2.0**-30 < 2.0**-25).all()), "fp16 has no such numbers"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1024, 4000, 16, 32), (128, 40_000, 4, 8)], ids=str)
def test_memory_is_bounded_by_the_chunk_and_the_gradients(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    # Otherwise blocks in fp32, whose size does not depend on these matrices, are added.
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    num_tokens, vocab, width, rows = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(vocab, width, generator=generator).to(dtype).requires_grad_()
    labels = torch.randint(vocab, (num_tokens,), generator=generator)
    counts = torch.full((num_tokens,), 1 / num_tokens)
    options = HeadOptions(chunk_numel=rows * vocab)

    gradients = 4 * weight.numel() + (weight.nbytes if dtype.itemsize < 4 else 0) + hidden.nbytes
    chunk = rows * vocab * (4 + dtype.itemsize)
    rest = 32 * num_tokens * 4
    bound = gradients + chunk + rest

    def ours() -> None:
        weighted_cross_entropy(hidden, weight, labels, counts, options).loss.backward()

    def one_by_one() -> None:
        (linear_cross_entropy(hidden, weight, labels, options) * counts).sum().backward()

    def of_torch() -> None:
        F.cross_entropy(F.linear(hidden, weight).float(), labels).backward()

    logits = num_tokens * vocab * dtype.itemsize
    assert bound < logits / 3
    for function in (ours, one_by_one):
        hidden.grad = weight.grad = None
        assert peak_bytes(function) <= bound
    hidden.grad = weight.grad = None
    assert peak_bytes(of_torch) > 2 * logits, "the measure sees what torch's own loss holds"


@pytest.mark.parametrize("frozen", [("hidden",), ("weight",), ("hidden", "weight")])
def test_only_gradients_that_are_wanted_are_computed(frozen: tuple[str, ...]) -> None:
    whole = inputs()
    weighted_cross_entropy(*whole).loss.backward()
    some = inputs()
    for name in frozen:
        getattr(some, name).requires_grad_(False)
    found = weighted_cross_entropy(*some).loss
    losses = linear_cross_entropy(*some[:3])
    assert found.requires_grad == losses.requires_grad == (len(frozen) < 2)
    if len(frozen) < 2:
        found.backward()
    for name in ("hidden", "weight"):
        grad = getattr(some, name).grad
        assert (grad is None) == (name in frozen)
        if grad is not None:
            assert torch.equal(grad, getattr(whole, name).grad)


def test_autocast_decides_the_dtype_of_the_projection() -> None:
    given = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        found = weighted_cross_entropy(*given)
        losses = linear_cross_entropy(*given[:3])
    narrow = [part.detach().bfloat16() for part in given[:2]]
    assert torch.equal(losses, linear_cross_entropy(*narrow, given.labels))
    found.loss.backward()
    assert given.weight.grad is not None
    assert given.weight.grad.dtype == torch.float32


def test_a_second_backward_is_rejected_where_the_first_has_given_the_gradients_away() -> None:
    given = inputs()
    loss = weighted_cross_entropy(*given).loss
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="got a second"):
        loss.backward()
    losses = linear_cross_entropy(*given[:3]).sum()
    losses.backward(retain_graph=True)
    losses.backward()  # computes them again


def test_gradients_of_the_gradient_are_rejected() -> None:
    given = inputs()
    for loss in (linear_cross_entropy(*given[:3]).sum(), weighted_cross_entropy(*given).loss):
        with pytest.raises(RuntimeError, match="cannot be differentiated"):
            torch.autograd.grad(loss, given.hidden, create_graph=True)


@pytest.mark.parametrize("label", [-1, -100, VOCAB])
def test_labels_out_of_range_are_named(label: int) -> None:
    given = inputs()
    given.labels[3] = label
    told = rf"Expected labels in \[0, {VOCAB}\), got labels from .*{label}"
    with pytest.raises(ValueError, match=told):
        linear_cross_entropy(*given[:3])
    with pytest.raises(ValueError, match=told):
        weighted_cross_entropy(*given)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"weight": torch.zeros(VOCAB, WIDTH + 1)}, r"got \(37, 12\) and \(50, 13\)"),
        ({"weight": torch.zeros(WIDTH)}, r"a weight \[vocab, hidden\]"),
        ({"labels": torch.zeros(3, dtype=torch.int64)}, r"labels of shape \(37,\), got"),
        ({"labels": torch.zeros(NUM_TOKENS, dtype=torch.int32)}, "got torch.int32"),
        ({"weight": torch.zeros(VOCAB, WIDTH, dtype=torch.bfloat16)}, "one floating dtype"),
        ({"token_weights": torch.zeros(3)}, r"fp32 weights of shape \(37,\)"),
        ({"token_weights": torch.zeros(NUM_TOKENS, dtype=torch.float64)}, "got torch.float64"),
    ],
)
def test_inputs_that_do_not_fit_are_rejected(changed: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        weighted_cross_entropy(*inputs()._replace(**changed))


def test_hidden_states_that_are_not_contiguous_are_taken() -> None:
    given = inputs()
    expected = linear_cross_entropy(*given[:3])
    across = given.hidden.detach().t().contiguous().t().requires_grad_()
    found = linear_cross_entropy(across, given.weight, given.labels)
    assert torch.equal(found, expected)
    weighted_cross_entropy(across, *given[1:]).loss.backward()
    weighted_cross_entropy(*given).loss.backward()
    assert given.hidden.grad is not None
    assert torch.equal(across.grad, given.hidden.grad)
