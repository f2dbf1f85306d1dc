"""Mixers whose rows are divided over ranks compute what one rank with the whole rows computes."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.activation_offload import ActivationOffload
from megatron.core.compiled_layers import compile_layers
from megatron.core.device import Device
from megatron.core.distributed import context
from megatron.core.distributed.config import A2A, ALL_GATHER, check_heads
from megatron.core.distributed.context import PositionExchange, divide_context
from megatron.core.models.gpt.gpt_model import Places, TransformerBlock
from megatron.core.options import ConfigError
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.spec import (
    AttentionSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    Mixer,
    NormKind,
    NormSpec,
    RotarySpec,
    Sinks,
)
from tests.helpers.ranks import on_ranks, run_ranks

HIDDEN, BATCH, SEQ = 32, 2, 48
ROTARY = RotarySpec(dim=8, base=10000.0)
GROUPED = AttentionSpec(
    num_heads=8,
    num_key_value_heads=4,
    head_dim=8,
    scale=0.4,
    rotary=ROTARY,
    qk_norm=NormSpec(NormKind.RMS_NORM, 1e-6),
    has_output_gate=True,
)
LATENT = LatentAttentionSpec(
    num_heads=4,
    query_rank=20,
    key_value_rank=12,
    content_dim=6,
    rotary_dim=8,
    value_dim=10,
    scale=0.3,
    rotary=ROTARY,
    latent_norm=NormSpec(NormKind.RMS_NORM, 1e-6),
)
MIXERS: dict[str, Mixer] = {
    "grouped queries": GROUPED,
    "one key head": replace(GROUPED, num_key_value_heads=1),
    "three key heads of twelve": replace(GROUPED, num_heads=12, num_key_value_heads=3),
    "a window and learned sinks": replace(GROUPED, window=7, sinks=Sinks.LEARNED),
    "a window longer than a slice, a sink": replace(GROUPED, window=30, sinks=Sinks.ZERO),
    "a window, learned sinks and a softcap": replace(
        GROUPED, window=7, sinks=Sinks.LEARNED, softcap=2.0
    ),
    "latent attention": LATENT,
    "a gated delta net": GatedDeltaNetSpec(4, 8, 6, 5, conv_kernel=4, norm_eps=1e-6),
    "a gated delta net with one key head": GatedDeltaNetSpec(1, 4, 6, 5, 4, 1e-6),
    "a convolution longer than a slice": GatedDeltaNetSpec(2, 4, 6, 5, 20, 1e-6),
    "a convolution of one position": GatedDeltaNetSpec(2, 4, 6, 5, 1, 1e-6),
}
# Documents that cross the cuts, and one that is over two of them. Padding behind.
DOCUMENTS = Documents((7, 31, 4, 6, 13, 29, 6), padding=(0, 6))


def _build(spec: Mixer) -> nn.Module:
    """With weights large enough for the scores to matter, alike on all ranks."""
    torch.manual_seed(3)
    stds = {"init_std": 0.3, "output_init_std": 0.3}
    if isinstance(spec, GatedDeltaNetSpec):
        return GatedDeltaNet(spec, HIDDEN, **stds)
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(spec, HIDDEN, **stds)
    return SelfAttention(spec, HIDDEN, **stds)


def _angles(positions: Tensor) -> RotaryAngles:
    return rotary_angles(ROTARY, positions)


def _run(
    mixer: nn.Module,
    hidden: Tensor,
    positions: Tensor,
    factors: Tensor,
    documents: Documents | None,
) -> dict[str, Tensor]:
    """The output of a mixer and the gradients of everything."""
    hidden = hidden.clone().requires_grad_()
    output = mixer(hidden, _angles(positions), documents)
    (output * factors).sum().backward()
    gradients = {name: parameter.grad for name, parameter in mixer.named_parameters()}
    return {"output": output.detach(), "hidden": hidden.grad, **gradients}


def _compare(
    spec: Mixer,
    documents: Documents | None,
    divide: Callable[[nn.Module], None],
) -> None:
    """On every rank: holds a divided mixer against the whole one. In fp64: in fp32 the gradients of
    a delta net's decays differ by more, since slices have other chunks.
    """
    generator = torch.Generator().manual_seed(5)
    hidden, factors = (
        torch.randn(BATCH, SEQ, HIDDEN, generator=generator, dtype=torch.float64) for _ in range(2)
    )
    positions = torch.arange(SEQ)
    expected = _run(_build(spec).double(), hidden, positions, factors, documents)

    divided = _build(spec).double()
    divide(divided)
    num_ranks, rank = dist.get_world_size(), dist.get_rank()

    def own(whole: Tensor, dim: int = 1) -> Tensor:
        return whole.chunk(num_ranks, dim=dim)[rank]

    found = _run(divided, own(hidden), own(positions, 0), own(factors), documents)
    for name, whole in expected.items():
        part = found[name]
        if name in ("output", "hidden"):
            whole = own(whole)
        else:
            dist.all_reduce(part)
        error = (part - whole).abs().max() / whole.abs().max()
        assert error < 1e-6, (name, error)


def _divide(comm_type: str, module: nn.Module) -> None:
    divide_context(module, dist.group.WORLD, comm_type)


# Positions of rows that travel in parts, by (batch, position, head, channel): exact in bf16.
def _numbered(num_heads: int, dim: int, dtype: torch.dtype) -> Tensor:
    shape = (BATCH, 8, num_heads, dim)
    return (torch.arange(math.prod(shape)) % 251).view(shape).to(dtype)


@on_ranks(4)
def test_heads_of_several_numbers_and_dtypes_travel_together_and_back() -> None:
    rank = dist.get_rank()
    exchange = PositionExchange(SequenceSlice(rank, 4, Tensor.clone), dist.group.WORLD, A2A)
    whole = [
        _numbered(8, 3, torch.bfloat16),
        _numbered(2, 5, torch.bfloat16),
        _numbered(4, 1, torch.float32),
    ]
    slices = [part.chunk(4, dim=1)[rank].clone().requires_grad_() for part in whole]
    first, second, third = exchange.to_heads(*slices)
    assert torch.equal(first, whole[0][:, :, 2 * rank : 2 * rank + 2])
    assert torch.equal(second, whole[1][:, :, rank // 2 : rank // 2 + 1]), "for two ranks each"
    assert torch.equal(third, whole[2][:, :, rank : rank + 1])
    assert torch.equal(exchange.own(torch.arange(8)), torch.tensor([2 * rank, 2 * rank + 1]))
    assert torch.equal(exchange.own(torch.arange(2)), torch.tensor([rank // 2]))

    assert torch.equal(exchange.to_positions(first), slices[0])
    # Each rank's factor; a head that goes to two ranks has the sum of theirs.
    (first.sum() + second.sum() * (rank + 1) + third.sum() * (rank + 1)).backward()
    assert torch.equal(slices[0].grad, torch.ones_like(slices[0]))
    assert slices[1].grad[0, 0, :, 0].tolist() == [1 + 2, 3 + 4]
    assert slices[2].grad[0, 0, :, 0].tolist() == [1, 2, 3, 4]


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("spec", MIXERS.values(), ids=MIXERS)
def test_divided_rows_give_the_outputs_and_gradients_of_whole_rows(
    spec, documents, comm_type, num_ranks
):
    run_ranks(num_ranks, _compare, spec, documents, partial(_divide, comm_type))


@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("name", ["grouped queries", "a gated delta net"])
def test_ranks_that_gather_need_not_divide_the_heads(name, documents):
    run_ranks(3, _compare, MIXERS[name], documents, partial(_divide, ALL_GATHER))


HYBRID = {
    "num_layers": 5,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "group_query_attention": True,
    "attention_output_gate": True,
    "ffn_hidden_size": 96,
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}


def _block(**options: Any) -> TransformerBlock:
    torch.manual_seed(2)
    config = TransformerConfig(**{**HYBRID, **options})
    return TransformerBlock(model_spec(config), config.recompute_granularity)


def _hidden(seq_length: int) -> tuple[Tensor, Places]:
    """This rank's slice of random rows, and its places."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(1, seq_length, HYBRID["hidden_size"], generator=generator)
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    positions = torch.arange(seq_length).expand(1, -1).chunk(num_ranks, dim=1)[rank]
    return hidden.chunk(num_ranks, dim=1)[rank], Places(positions.contiguous())


def _gradients(block: TransformerBlock, seq_length: int = 64) -> list[Tensor]:
    hidden, places = _hidden(seq_length)
    (block(hidden, places)[0] * hidden.roll(1, dims=-1)).sum().backward()
    return [parameter.grad for parameter in block.parameters()]


def _offload(block: TransformerBlock) -> None:
    ActivationOffload(Device("cpu"), 64 << 20, smallest_nbytes=256).attach(block.layers)


@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@on_ranks(2)
def test_recomputed_and_offloaded_layers_give_the_same_bits(comm_type: str) -> None:
    expected: list[Tensor] = []
    for options in ({}, {"recompute_granularity": "full"}, {"recompute_granularity": "selective"}):
        for prepare in (None, _offload):
            block = _block(**options)
            _divide(comm_type, block)
            if prepare is not None:
                prepare(block)
            found = _gradients(block)
            expected = expected or found
            assert all(map(torch.equal, found, expected)), (options, prepare)


@pytest.mark.wide
@on_ranks(2)
def test_exchanges_stay_outside_of_compiled_layers() -> None:
    plain, compiled = _block(), _block()
    for block in (plain, compiled):
        _divide(A2A, block)
    with mock.patch.object(tempfile, "tempdir", "/tmp"):
        compile_layers(compiled)
        found = _gradients(compiled)
    for ours, expected in zip(found, _gradients(plain), strict=True):
        assert (ours - expected).abs().max() < 1e-4 * expected.abs().max()


@pytest.mark.parametrize("granularity", [None, "full", "selective"])
@on_ranks(2)
def test_exchanges_are_recorded_in_the_order_of_their_issue(granularity: str | None) -> None:
    # A delta net, then attention.
    block = _block(num_layers=2, recompute_granularity=granularity)
    records: list[tuple[str, bool]] = []

    def record(module: nn.Module, is_backward: bool) -> None:
        records.append((type(module).__name__, is_backward))

    divide_context(block, dist.group.WORLD, A2A, record)
    _gradients(block)
    net, attention = "GatedDeltaNet", "SelfAttention"
    forward = {name: [(name, False)] * 2 for name in (net, attention)}
    backward = {name: [(name, True)] * 2 for name in (net, attention)}
    # Recomputing the core of attention exchanges nothing.
    again = forward if granularity == "full" else {net: [], attention: []}
    expected = forward[net] + forward[attention] + again[attention] + backward[attention]
    assert records == expected + again[net] + backward[net]


LENGTH = 6  # of the slices that are counted


def _sent_bytes(spec: Mixer, comm_type: str) -> tuple[int, int]:
    """By this rank, in forward and in backward."""
    num_ranks, sent = dist.get_world_size(), [0]

    def exchanged(received: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> None:
        sent[0] += own.nbytes * (num_ranks - 1) // num_ranks
        all_to_all(received, own, *args, **kwargs)

    def gathered(received: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> None:
        sent[0] += own.nbytes * (num_ranks - 1)
        all_gather(received, own, *args, **kwargs)

    all_to_all, all_gather = context.dist.all_to_all_single, context.all_gather_on_device
    mixer = _build(spec)
    _divide(comm_type, mixer)
    hidden = torch.randn(1, LENGTH, HIDDEN)
    with (
        mock.patch.object(context.dist, "all_to_all_single", exchanged),
        mock.patch.object(context, "all_gather_on_device", gathered),
    ):
        output = mixer(hidden, _angles(torch.arange(LENGTH)))
        forward, sent[0] = sent[0], 0
        output.sum().backward()
    return forward, sent[0]


# A hybrid, and attention only: queries that share key heads, with a learned sink, and latent ones.
KEPT: dict[str, dict[str, Any]] = {
    "a hybrid": {},
    "attention": {"linear_attention_freq": "[0]*5"},
    "a learned sink": {"linear_attention_freq": "[0]*5", "softmax_type": "learnable"},
    "latent attention": {
        "linear_attention_freq": "[0]*5",
        "group_query_attention": False,
        "num_query_groups": None,
        "attention_output_gate": False,
        "multi_latent_attention": True,
        "kv_lora_rank": 32,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
    },
}


def _formula(spec: Mixer, comm_type: str, num_ranks: int) -> float:
    """Bytes that a rank sends for one of its tokens in one forward, in fp32: as
    docs/long_context.md has them.
    """
    away = (num_ranks - 1) / num_ranks
    if isinstance(spec, GatedDeltaNetSpec) and comm_type == ALL_GATHER:
        inputs = (spec.conv_kernel - 1) * (2 * spec.key_size + spec.value_size)
        states = spec.num_value_heads * spec.key_head_dim
        states *= spec.key_head_dim + spec.value_head_dim
        return (num_ranks - 1) * 4 * (inputs + states) / LENGTH
    if isinstance(spec, GatedDeltaNetSpec):
        keys = math.lcm(spec.num_key_heads, num_ranks)
        values = spec.num_value_heads * spec.value_head_dim
        return away * (4 * (2 * keys * spec.key_head_dim + 2 * values) + 8 * spec.num_value_heads)

    heads = spec.num_heads
    if isinstance(spec, LatentAttentionSpec):
        groups, value_dim = heads, spec.value_dim
    else:
        groups, value_dim = spec.num_key_value_heads, spec.head_dim
    widths = spec.head_dim + value_dim
    if comm_type == ALL_GATHER:
        return (num_ranks - 1) * 4 * groups * widths
    return away * 4 * (heads * widths + math.lcm(groups, num_ranks) * widths)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize(
    "name", ["grouped queries", "one key head", "latent attention", "a gated delta net"]
)
def test_ranks_send_the_bytes_of_the_documented_formula(name, comm_type, num_ranks):
    spec = MIXERS[name]
    expected = LENGTH * _formula(spec, comm_type, num_ranks)
    gathers_again = comm_type == ALL_GATHER and not isinstance(spec, GatedDeltaNetSpec)
    for sent in run_ranks(num_ranks, _sent_bytes, spec, comm_type):
        assert sent == pytest.approx((expected, (1 + gathers_again) * expected), rel=1e-12)


def _kept_bytes(seq_length: int, comm_type: str, options: dict[str, Any]) -> int:
    """The bytes that a forward saves for its backward, each storage once, without weights."""
    num_ranks = dist.get_world_size()
    block, hidden = _block(**options), torch.randn(1, seq_length // num_ranks, 64)
    if num_ranks > 1:
        _divide(comm_type, block)
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    # Not by the profiler, which does not see what gloo's threads free.
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        block(hidden.requires_grad_())
    weights = {parameter.untyped_storage().data_ptr() for parameter in block.parameters()}
    return sum(storage.nbytes() for data, storage in kept.items() if data not in weights)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize("options", KEPT.values(), ids=KEPT)
def test_activations_of_a_rank_are_its_share_and_at_most_a_tenth_more(
    options, comm_type, num_ranks
):
    (whole,) = run_ranks(1, _kept_bytes, 2048, comm_type, options)
    for part in run_ranks(num_ranks, _kept_bytes, 2048, comm_type, options):
        assert part < whole * (1 / num_ranks + 0.1)


@pytest.mark.parametrize("spec", [GROUPED, MIXERS["a gated delta net"]])
def test_heads_that_ranks_cannot_divide_are_not_exchanged(spec):
    with pytest.raises(ConfigError, match=r"--context-parallel-size: .* 8 .* 3\."):
        check_heads([spec], 3, A2A)
    check_heads([spec], 3, ALL_GATHER)


@on_ranks(2)
def test_attention_to_all_patches_of_an_image_is_not_divided() -> None:
    tower = _build(replace(GROUPED, is_causal=False))
    _divide(A2A, tower)
    assert tower.exchange is None
