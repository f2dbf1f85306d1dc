"""Documents packed into rows compute the same as each by itself."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.causal_conv import CausalConv1d, causal_conv
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents

VOCAB = 37
SIZES: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
DELTA_NET: dict[str, Any] = {
    "linear_attention_freq": "2",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
MODELS: dict[str, dict[str, Any]] = {
    "plain": {},
    "grouped": {"group_query_attention": True, "num_query_groups": 2},
    "a window": {"window_size": (3, 0)},
    "learned sinks": {"softmax_type": "learnable"},
    "delta net": DELTA_NET,
    "recomputed": {"recompute_granularity": "full", **DELTA_NET},
    "recomputed core": {"recompute_granularity": "selective"},
    "latents and experts": {
        "multi_latent_attention": True,
        "qk_head_dim": 8,
        "qk_pos_emb_head_dim": 4,
        "v_head_dim": 8,
        "num_experts": 4,
        "moe_ffn_hidden_size": 16,
    },
}
# Of two rows; lengths of one appear more than once, and are shorter than the convolution's reach.
LENGTHS = (9, 2, 5, 1, 7, 7, 2, 1)
ROW = 17


def build(**options: Any) -> GPTModel:
    torch.manual_seed(0)
    model = GPTModel(TransformerConfig(**{**SIZES, **options}), VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def tokens_of(lengths: tuple[int, ...]) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, VOCAB, (length + 1,), generator=generator) for length in lengths]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("has_positions", [False, True])
def test_packed_documents_have_the_losses_and_gradients_of_separate_ones(
    name: str, has_positions: bool
) -> None:
    model = build(**MODELS[name])
    texts = tokens_of(LENGTHS)
    separate = [model(text[None, :-1], text[None, 1:])[0] for text in texts]
    torch.cat(separate).sum().backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    tokens = torch.cat([text[:-1] for text in texts]).view(2, ROW)
    labels = torch.cat([text[1:] for text in texts]).view(2, ROW)
    positions = torch.cat([torch.arange(length) for length in LENGTHS]).view(2, ROW)
    losses = model(
        tokens,
        labels,
        positions=positions if has_positions else None,
        documents=Documents(LENGTHS),
    )
    torch.testing.assert_close(losses.flatten(), torch.cat(separate), rtol=1e-5, atol=1e-5)
    losses.sum().backward()
    for parameter, one in model.named_parameters():
        torch.testing.assert_close(
            one.grad, expected[parameter], rtol=1e-4, atol=1e-5, msg=parameter
        )
    assert not torch.allclose(model(tokens, labels), losses, atol=1e-3), "boundaries matter"


@pytest.mark.parametrize("kernel", [1, 2, 4])
@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(1, 9), min_size=1, max_size=8), seed=st.integers(0, 99))
def test_a_convolution_reads_zeros_before_each_document(
    kernel: int, lengths: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    conv = partial(causal_conv, CausalConv1d(3, kernel).weight)
    x = torch.randn(1, sum(lengths), 3)
    separate = torch.cat([conv(part) for part in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(conv(x, Documents(tuple(lengths))), separate)


@pytest.mark.parametrize(
    ("lengths", "told"),
    [
        ((34, 1), "fill 2 row"),
        ((33,), "fill 2 row"),
        ((10, 24), "end where a row ends"),
    ],
)
def test_documents_that_do_not_fill_the_rows_are_rejected(
    lengths: tuple[int, ...], told: str
) -> None:
    tokens = torch.zeros(2, ROW, dtype=torch.int64)
    with pytest.raises(ValueError, match=told):
        build()(tokens, documents=Documents(lengths))


@pytest.mark.parametrize(
    ("lengths", "padding"),
    [
        ((17, 10, 7), (7,)),
        ((17, 10, 7), (0, 6)),
        ((17, 17), (0, 17)),
        ((17, 10, 7), (-1, 7)),
    ],
)
def test_padding_that_is_not_the_end_of_a_row_is_rejected(
    lengths: tuple[int, ...], padding: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="padding that is the last document of each row"):
        Documents(lengths, padding).check(2, ROW)


def test_real_positions_are_those_before_the_padding_of_each_row() -> None:
    documents = Documents((17, 10, 7), (0, 7))
    documents.check(2, ROW)
    assert documents.without_padding() == (17, 10)
    assert documents.real_positions(torch.device("cpu")).tolist() == [*range(27)]
    documents = Documents((15, 2, 17), (2, 0))
    found = documents.real_positions(torch.device("cpu")).tolist()
    assert found == [*range(15), *range(17, 34)]
    for full in (Documents((17, 17)), Documents((17, 17), (0, 0))):
        assert full.without_padding() is None


def test_real_positions_of_parts_of_rows_are_counted_in_these() -> None:
    documents = Documents((15, 2, 3, 14), (2, 14))
    found = {}
    for within in (range(2, 4), range(14, 17), range(15, 17)):
        real = documents.real_positions(torch.device("cpu"), within).tolist()
        found[within] = (documents.without_padding(within), real)
    # Parts of the two rows, one behind the other.
    assert found[range(2, 4)] == ((2, 1), [0, 1, 2])
    assert found[range(14, 17)] == ((1, 0), [0])
    assert found[range(15, 17)] == ((0, 0), [])


def test_positions_of_another_shape_and_empty_documents_are_rejected() -> None:
    tokens = torch.zeros(2, ROW, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"positions of shape \(2, 17\), got \(17,\)"):
        build()(tokens, positions=torch.arange(ROW))
    for lengths in ((), (3, 0)):
        with pytest.raises(ValueError, match="at least one position each"):
            Documents(lengths)


@settings(deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=3),
    st.integers(-6, 12),
    st.integers(1, 12),
)
def test_a_part_of_each_row_has_the_documents_that_its_positions_are_in(rows, start, length):
    seq_length = max(map(sum, rows)) + 1
    rows = [[*row, seq_length - sum(row)] for row in rows]
    part = range(start, min(max(start, 0) + length, seq_length))
    if part.start >= part.stop:
        return
    found = Documents(tuple(length for row in rows for length in row)).cut(part, seq_length)

    expected: list[int] = []
    for row in rows:
        # The document of each position; -1: before the row.
        numbers = [number for number, length in enumerate(row) for _ in range(length)]
        own = [-1 if position < 0 else numbers[position] for position in part]
        expected += (own.count(number) for number in sorted(set(own)))
    assert found.lengths == tuple(expected)
