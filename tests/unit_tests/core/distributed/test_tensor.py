"""Layers whose heads and channels are divided over ranks compute what one rank with whole layers
computes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.helpers.divided_layers import part_of, take_parts
from benchmarks.helpers.memory import peak_bytes
from megatron.core.distributed.config import A2A, ALL_GATHER
from megatron.core.distributed.context import Record, divide_context
from megatron.core.distributed.experts import divide_experts
from megatron.core.distributed.tensor import TensorGroup, divide_tensor
from megatron.core.models.gpt.gpt_model import GPTModel, Places
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.experts import ExpertLinear
from megatron.core.transformer.linear_cross_entropy import (
    HeadOptions,
    linear_cross_entropy,
    weighted_cross_entropy,
)
from megatron.core.transformer.tensor_cut import TensorCut
from tests.helpers.ranks import on_ranks, run_ranks
from tests.unit_tests.core.models.multimodal.helpers.their_images import image_batch
from tests.unit_tests.core.models.multimodal.helpers.vision_models import VISION

VOCAB, BATCH, SEQ = 96, 2, 48
DENSE = {
    "num_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "group_query_attention": True,
    "ffn_hidden_size": 96,
    "max_position_embeddings": SEQ,
    "init_method_std": 0.1,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
MOE = {
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 32,
    "moe_shared_expert_intermediate_size": 64,
    "moe_shared_expert_gate": True,
    "moe_aux_loss_coeff": 0.1,
    "moe_z_loss_coeff": 0.01,
}
LATENT = {
    "multi_latent_attention": True,
    "kv_lora_rank": 24,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 10,
    "num_query_groups": None,
    "group_query_attention": False,
}
HYBRID = {
    "attention_output_gate": True,
    "linear_attention_freq": "2",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 6,
}
MODELS: dict[str, dict[str, Any]] = {
    "grouped queries and SwiGLU": {"swiglu": True, "qk_layernorm": True},
    "one key head": {"num_query_groups": 1, "qk_layernorm": True, "normalization": "RMSNorm"},
    "two key heads": {"num_query_groups": 2},
    "biases, no gate, and untied embeddings": {
        "add_bias_linear": True,
        "add_qkv_bias": True,
        "normalization": "LayerNorm",
        "untie_embeddings_and_output_weights": True,
    },
    "a z-loss, softcaps and scaled embeddings": {
        "z_loss_coeff": 0.01,
        "final_logit_softcapping": 3.0,
        "attn_logit_softcapping": 5.0,
        "embedding_multiplier": 3.0,
    },
    "windows and learned sinks": {
        "window_size": (9, 0),
        "window_attn_skip_freq": "2",
        "softmax_type": "learnable",
    },
    "latent attention": {**LATENT, "q_lora_rank": 20},
    "latent attention without a latent of queries": {**LATENT, "q_lora_rank": None},
    "a gated delta net and gated attention": HYBRID,
    "a mixture of experts": MOE,
    "a mixture of experts, balanced by sequence": {
        **MOE,
        "moe_router_load_balancing_type": "seq_aux_loss",
        "moe_shared_expert_gate": False,
    },
}
# Documents that cross the cuts, and one that is over two of them. Padding behind.
DOCUMENTS = Documents((7, 31, 4, 6, 13, 29, 6), padding=(0, 6))


def _model(options: dict[str, Any]) -> GPTModel:
    """With the same weights on all ranks; none is zero or one."""
    torch.manual_seed(3)
    model = GPTModel(TransformerConfig(**{**DENSE, **options}), VOCAB)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model


def _vision_model() -> VisionLanguageModel:
    torch.manual_seed(3)
    vision = replace(VISION, vision_deepstack_layers=(0,))
    return VisionLanguageModel(TransformerConfig(**DENSE), vision, VOCAB)


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, and weights of the losses."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator)
    return tokens, labels, torch.rand(BATCH, SEQ, generator=generator) / (BATCH * SEQ)


def _take_experts(model: nn.Module, rank: int, num_ranks: int) -> set[str]:
    """Replaces the weights of all experts by the weights of this rank's experts."""
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            for own, weight in list(module.named_parameters()):
                part = weight.detach().chunk(num_ranks)[rank]
                setattr(module, own, nn.Parameter(part.clone()))
                names.add(f"{name}.{own}")
    return names


Found = dict[str, Tensor | None]
Build = Callable[[], nn.Module]


def _run_text(documents: Documents | None, is_weighted: bool, model: GPTModel) -> Found:
    """The losses of a model in training, and the gradients of their sum."""
    options = {"documents": documents, "with_routing": True}
    return _gradients(model, model, _batch(), options, is_weighted=is_weighted)


def _run_images(model: VisionLanguageModel) -> Found:
    """As `_run_text`, of rows with images, which text of a few tokens follows."""
    batch = image_batch()
    rest = -batch.tokens.shape[1] % 4
    tokens = F.pad(batch.tokens, (0, rest), value=1)
    more = batch.positions[..., -1:] + torch.arange(1, rest + 1)
    positions = torch.cat((batch.positions, more), dim=-1)
    weights = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(6))
    options = {"images": batch.images, "positions": positions, "with_routing": True}
    inputs = tokens, tokens.roll(-1, 1), weights
    return _gradients(model, model.language_model, inputs, options, is_weighted=True)


def _gradients(
    model: nn.Module,
    decoder: GPTModel,
    inputs: tuple[Tensor, Tensor, Tensor],
    options: dict[str, Any],
    *,
    is_weighted: bool,
) -> Found:
    tokens, labels, weights = inputs
    found: Found = {}
    if is_weighted:
        output, report = model(tokens, labels, loss_weights=weights, **options)
        loss, found["z-loss"] = output
    else:
        output, report = model(tokens, labels, **options)
        part = decoder.sequence_slice
        own = weights if part is None else part.cut(weights) * part.size
        loss, found["losses"] = (output * own).sum(), output.detach()
    if report is not None:
        loss = loss + report.balance_loss + report.z_loss
        found |= {"balance loss": report.balance_loss.detach(), "load": report.load}
    loss.backward()
    found["loss"] = loss.detach()
    return found | {name: parameter.grad for name, parameter in model.named_parameters()}


class _Ranks:
    """The groups of this rank: tensor ranks are consecutive, then context ranks; experts are
    divided over consecutive ranks.
    """

    def __init__(self, tensor: int, experts: int) -> None:
        num_ranks = dist.get_world_size()
        self.context_size = num_ranks // tensor
        mesh = dist.init_device_mesh(
            "cpu", (self.context_size, tensor), mesh_dim_names=("cp", "tp")
        )
        self.context, self.tensor = mesh.get_group("cp"), mesh.get_group("tp")
        expert_mesh = dist.init_device_mesh(
            "cpu", (num_ranks // experts, experts), mesh_dim_names=("edp", "ep")
        )
        self.same_experts, self.experts = expert_mesh.get_group("edp"), expert_mesh.get_group("ep")


def _mean(tensor: Tensor, group: dist.ProcessGroup) -> Tensor:
    tensor = tensor.clone()
    dist.all_reduce(tensor, group=group)
    return tensor / dist.get_world_size(group)


def _divided(
    build: Build, ranks: _Ranks, comm_type: str = A2A, record: Record | None = None
) -> tuple[nn.Module, dict[str, TensorCut]]:
    """A model of which this rank has its part; and how its weights are divided."""
    model, num_ranks = build(), dist.get_world_size(ranks.tensor)
    if ranks.context_size > 1:
        divide_context(model, ranks.context, comm_type)
    divide_tensor(model, ranks.tensor, record)
    return model, take_parts(model, dist.get_rank(ranks.tensor), num_ranks)


def _compare(
    build: Build,
    run: Callable[[Any], Found],
    tensor_size: int,
    comm_type: str = A2A,
    expert_size: int = 1,
) -> None:
    """On every rank: holds a divided model against the whole one."""
    expected = run(build())

    ranks = _Ranks(tensor_size, expert_size)
    model, cuts = _divided(build, ranks, comm_type)
    experts: set[str] = set()
    if expert_size > 1:
        divide_experts(model, ranks.experts)
        experts = _take_experts(model, dist.get_rank(ranks.experts), expert_size)
    found = run(model)
    assert found.keys() == expected.keys()
    assert cuts, "some weights are divided"
    errors = {}
    for name, whole in expected.items():
        part = found[name]
        if part is None or whole is None:
            assert part is whole, name
        elif name == "load":
            dist.all_reduce(part)
            assert torch.equal(part, whole)
        else:
            if name == "losses":
                whole = whole.chunk(ranks.context_size, dim=1)[dist.get_rank(ranks.context)]
            elif name in experts:
                part = _mean(part, ranks.same_experts) * (tensor_size / expert_size)
                whole = whole.chunk(expert_size)[dist.get_rank(ranks.experts)]
            else:
                part = _mean(part, ranks.context)
            if name in cuts:
                whole = part_of(whole, cuts[name], tensor_size, dist.get_rank(ranks.tensor))
            elif whole.dim() and name != "losses" and name not in experts:
                part = _mean(part, ranks.tensor) * tensor_size
            errors[name] = float((part - whole).norm() / (whole.norm() + 1e-30))
    # Gradients of weights of norms are small sums of large terms of either sign.
    limits = {name: 1e-5 if "." in name else 1e-6 for name in errors}
    wrong = {name: error for name, error in errors.items() if not error < limits[name]}
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("num_ranks", "documents"), [(2, None), (4, DOCUMENTS)], ids=["2 ranks, rows", "4, documents"]
)
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_divided_layers_give_the_losses_and_gradients_of_whole_layers(
    options, num_ranks, documents
):
    run = partial(_run_text, documents, True)
    run_ranks(num_ranks, _compare, partial(_model, options), run, num_ranks)


@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_slices_of_rows_are_divided_further(options):
    run = partial(_run_text, DOCUMENTS, True)
    run_ranks(4, _compare, partial(_model, options), run, 2)


@pytest.mark.parametrize(
    "name", ["windows and learned sinks", "a gated delta net and gated attention"]
)
def test_ranks_that_gather_keys_are_divided_further(name):
    run = partial(_run_text, DOCUMENTS, True)
    run_ranks(4, _compare, partial(_model, MODELS[name]), run, 2, ALL_GATHER)


@pytest.mark.parametrize(("num_ranks", "tensor_size"), [(2, 2), (4, 4), (4, 2)])
def test_the_loss_of_each_token_and_its_gradients_do_not_depend_on_the_ranks(
    num_ranks, tensor_size
):
    options = {**MODELS["a z-loss, softcaps and scaled embeddings"], "swiglu": True}
    run = partial(_run_text, None, False)
    run_ranks(num_ranks, _compare, partial(_model, options), run, tensor_size)


@pytest.mark.parametrize(
    ("num_ranks", "tensor_size", "expert_size"), [(2, 2, 2), (4, 2, 2), (4, 4, 2), (4, 2, 4)]
)
def test_tokens_of_all_ranks_reach_their_experts(num_ranks, tensor_size, expert_size):
    run = partial(_run_text, DOCUMENTS, True)
    run_ranks(num_ranks, _compare, partial(_model, MOE), run, tensor_size, A2A, expert_size)


@pytest.mark.parametrize(("num_ranks", "tensor_size"), [(2, 2), (4, 2)])
def test_a_decoder_of_images_is_divided_and_its_tower_is_not(num_ranks, tensor_size):
    run_ranks(num_ranks, _compare, _vision_model, _run_images, tensor_size)


def _bits_and_records(
    granularity: str | None, *, is_weighted: bool = True
) -> tuple[list[Tensor], list[tuple[str, bool]]]:
    records: list[tuple[str, bool]] = []

    def record(module: nn.Module, is_backward: bool) -> None:
        records.append((type(module).__name__, is_backward))

    options = {**HYBRID, "recompute_granularity": granularity}
    model, _ = _divided(partial(_model, options), _Ranks(2, 1), record=record)
    found = _run_text(DOCUMENTS, is_weighted, model)
    return [found["loss"], *(parameter.grad for parameter in model.parameters())], records


@on_ranks(2)
def test_recomputed_layers_exchange_again_and_give_the_same_bits() -> None:
    net, attention, mlp = "GatedDeltaNet", "SelfAttention", "MLP"
    expected, plain = _bits_and_records(None)
    # Of each a gather and a scatter; in backward a gather for the scatter, then for the weight's
    # gradient, and a scatter. The head gathers its inputs and exchanges two statistics of logits.
    forward = [(name, False) for name in (net, mlp, attention, mlp) for _ in range(2)]
    backward = [(name, True) for name in (mlp, attention, mlp, net) for _ in range(3)]
    embedding, head = "WordEmbeddings", "GPTModel"
    first = [(embedding, False), *forward, *[(head, False)] * 3, (head, True)]
    assert plain == [*first, *backward, (embedding, True)]

    # Losses of single tokens exchange the statistics again in backward.
    _, of_tokens = _bits_and_records(None, is_weighted=False)
    assert of_tokens == [*first, *[(head, True)] * 2, *backward, (embedding, True)]

    found, records = _bits_and_records("selective")
    assert records == plain, "the core has no exchange"
    assert all(map(torch.equal, found, expected))

    found, records = _bits_and_records("full")
    assert all(map(torch.equal, found, expected))
    assert records[: len(first)] == first
    # Backward does not need the scatter at a layer's end, which recomputation may leave out.
    assert len(records) - len(plain) in (len(forward), len(forward) - 2)


@on_ranks(4)
def test_positions_are_gathered_and_sums_rounded_once() -> None:
    group = TensorGroup(dist.group.WORLD)
    whole = torch.arange(2 * 8 * 3, dtype=torch.float32).view(2, 8, 3)
    part = whole.chunk(4, dim=1)[group.rank].clone().requires_grad_()
    gathered = group.gather(part)
    assert torch.equal(gathered, whole)
    (gathered * whole * (group.rank + 1)).sum().backward()
    assert torch.equal(part.grad, part.detach() * (1 + 2 + 3 + 4))

    # The neighbours of 256 in bf16 are 255 and 258: added one by one, ones would be lost.
    sums = torch.full((1, 4, 1), 256.0 if group.rank == 0 else 1.0, dtype=torch.bfloat16)
    own = group.scatter(sums.requires_grad_())
    assert own.tolist() == [[[260.0]]]
    (own * (group.rank + 1)).sum().backward()
    assert sums.grad.flatten().tolist() == [1, 2, 3, 4]

    assert group.maximum(torch.tensor([group.rank, -group.rank])).tolist() == [3, 0]
    with pytest.raises(ValueError, match=r"4 ranks .* got 6 positions"):
        group.scatter(torch.zeros(1, 6, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@on_ranks(2)
def test_logits_of_any_size_are_summed_over_the_vocabulary_chunk_by_chunk(
    dtype: torch.dtype,
) -> None:
    generator = torch.Generator().manual_seed(1)
    group = TensorGroup(dist.group.WORLD)
    hidden = torch.randn(3, 7, 16, generator=generator).to(dtype)
    weight = torch.randn(40, 16, generator=generator).to(dtype)
    # Beyond the exponential's range, and far above or below the other rank's logits.
    weight[:20] *= 30
    labels = torch.randint(40, (3, 7), generator=generator)
    token_weights = torch.rand(3, 7, generator=generator)
    results = []
    for tensor in (None, group):
        own = weight if tensor is None else weight.chunk(2)[group.rank]
        x, own = hidden.clone().requires_grad_(), own.clone().requires_grad_()
        options = HeadOptions(z_coeff=1e-3, chunk_numel=5 * len(own), tensor=tensor)
        loss, z_loss = weighted_cross_entropy(x, own, labels, token_weights, options)
        loss.backward()
        if tensor is not None:
            dist.all_reduce(x.grad)
        losses = linear_cross_entropy(hidden, own.detach(), labels, options)
        results.append([loss.detach(), z_loss, losses, x.grad, own.grad])
    expected, found = results
    expected[-1] = expected[-1].chunk(2)[group.rank]
    for one, other in zip(found, expected, strict=True):
        tolerance = 1e-6 if one.dtype == torch.float32 else 1e-2
        assert (one - other).norm() <= tolerance * other.norm()
    with pytest.raises(ValueError, match=r"\[0, 40\), got labels from 40 to 40"):
        linear_cross_entropy(hidden, own, torch.full_like(labels, 40), options)


@on_ranks(2)
def test_a_token_outside_of_the_vocabulary_is_an_error_on_every_rank() -> None:
    model, _ = _divided(partial(_model, {}), _Ranks(2, 1))
    for token in (-1, VOCAB):
        with pytest.raises(IndexError):
            model(torch.full((1, SEQ), token))


@on_ranks(4)
def test_indivisible_layers_are_an_error_before_any_is_divided() -> None:
    for options, vocab_size, told in [
        ({"num_attention_heads": 6, "num_query_groups": 6, "kv_channels": 4}, VOCAB, "6 attention"),
        (
            {"num_attention_heads": 12, "num_query_groups": 6, "kv_channels": 4},
            VOCAB,
            "6 key heads",
        ),
        ({"num_query_groups": 1, "kv_channels": 2}, VOCAB, "2 channels of key heads"),
        ({"qk_layernorm": True, "qk_layernorm_across_heads": True}, VOCAB, "across-heads"),
        ({**HYBRID, "linear_num_key_heads": 2}, VOCAB, "2 key heads of gated"),
        ({**HYBRID, "linear_num_key_heads": 2, "linear_num_value_heads": 6}, VOCAB, "6 value"),
        ({**LATENT, "num_attention_heads": 6, "q_lora_rank": 20}, VOCAB, "6 attention"),
        ({"ffn_hidden_size": 90}, VOCAB, "90 rows .*linear_fc1.weight"),
        ({}, VOCAB + 2, f"{VOCAB + 2} rows .*word_embeddings.weight"),
    ]:
        with torch.device("meta"):
            model = GPTModel(TransformerConfig(**{**DENSE, **options}), vocab_size)
        with pytest.raises(ValueError, match=f"ensor.*parallel.*{told}"):
            divide_tensor(model, dist.group.WORLD)
        assert model.tensor is None


@on_ranks(2)
def test_logits_are_of_the_rank_s_part_of_the_vocabulary() -> None:
    build = partial(_model, MODELS["a z-loss, softcaps and scaled embeddings"])
    ranks = _Ranks(2, 1)
    tokens, *_ = _batch()
    with torch.no_grad():
        whole = build()(tokens)
        part = _divided(build, ranks)[0](tokens)
    whole = whole.chunk(2, dim=-1)[dist.get_rank(ranks.tensor)]
    assert (part - whole).norm() < 1e-6 * whole.norm()


def _sent_bytes() -> tuple[int, int]:
    """By a layer of this rank, in forward and in backward."""
    num_ranks, sent = dist.get_world_size(), [0]

    def exchanged(received: Tensor, own: Tensor, *args: Any, **kwargs: Any) -> None:
        sent[0] += own.nbytes * (num_ranks - 1) // num_ranks
        all_to_all(received, own, *args, **kwargs)

    def send(own: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += own.nbytes
        return isend(own, *args, **kwargs)

    model, _ = _divided(partial(_model, {"num_layers": 1}), _Ranks(num_ranks, 1))
    hidden = torch.randn(BATCH, SEQ // num_ranks, DENSE["hidden_size"])
    places = Places(torch.arange(SEQ))
    all_to_all, isend = dist.all_to_all_single, dist.isend
    with (
        mock.patch.object(dist, "all_to_all_single", exchanged),
        mock.patch.object(dist, "isend", send),
    ):
        output, _ = model.decoder(hidden.requires_grad_(), places)
        forward, sent[0] = sent[0], 0
        output.sum().backward()
    return forward, sent[0]


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_a_layer_sends_four_parts_of_its_hidden_states_and_six_in_backward(num_ranks):
    part = 4 * BATCH * SEQ * DENSE["hidden_size"] * (num_ranks - 1) // num_ranks
    assert run_ranks(num_ranks, _sent_bytes) == [(4 * part, 6 * part)] * num_ranks


def _kept_bytes(seq_length: int, num_ranks: int) -> int:
    """The most bytes of a forward whose graph is kept."""
    build = partial(_model, {"num_layers": 4, "swiglu": True})
    model = build() if num_ranks == 1 else _divided(build, _Ranks(num_ranks, 1))[0]
    hidden = torch.randn(1, seq_length // num_ranks, DENSE["hidden_size"]).requires_grad_()
    places = Places(torch.arange(seq_length))
    return peak_bytes(lambda: model.decoder(hidden, places)[0])


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_activations_of_a_rank_are_its_share_and_at_most_a_tenth_more(num_ranks):
    (whole,) = run_ranks(1, _kept_bytes, 2048, 1)
    for part in run_ranks(num_ranks, _kept_bytes, 2048, num_ranks):
        assert part < whole * (1 / num_ranks + 0.1)
