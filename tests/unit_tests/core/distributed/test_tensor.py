"""Layers whose heads and channels are divided over ranks compute what one rank with whole layers
computes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.context import A2A, ALL_GATHER, divide_context
from megatron.core.distributed.experts import divide_experts
from megatron.core.distributed.tensor import check_tensor, divide_tensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.experts import ExpertLinear
from megatron.core.transformer.linear_cross_entropy import WeightedLoss
from megatron.core.transformer.tensor_cut import TensorCut, tensor_cuts
from tests.helpers.ranks import run_ranks

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


def _batch() -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, labels, and weights of the losses."""
    generator = torch.Generator().manual_seed(5)
    tokens, labels = torch.randint(VOCAB, (2, BATCH, SEQ), generator=generator)
    return tokens, labels, torch.rand(BATCH, SEQ, generator=generator) / (BATCH * SEQ)


def _take_parts(model: nn.Module, rank: int, num_ranks: int) -> dict[str, TensorCut]:
    """Replaces the weights that ranks divide by the parts of this one."""
    cuts = tensor_cuts(model)
    names = {name: cuts[part] for name, part in model.named_parameters() if part in cuts}
    for name, cut in names.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        whole = module.get_parameter(own)
        cut.check(whole.shape, num_ranks, name)
        part = cut.to_stored(whole.detach(), num_ranks).chunk(num_ranks)[rank]
        setattr(module, own, nn.Parameter(part.clone()))
    return names


def _take_experts(model: nn.Module, rank: int, num_ranks: int) -> set[str]:
    """Replaces the weights of experts by those of this rank's share of the experts."""
    names = set()
    for name, module in model.named_modules():
        if isinstance(module, ExpertLinear):
            for own, weight in list(module.named_parameters()):
                part = weight.detach().chunk(num_ranks)[rank]
                setattr(module, own, nn.Parameter(part.clone()))
                names.add(f"{name}.{own}")
    return names


def _run(
    model: GPTModel, documents: Documents | None, is_weighted: bool
) -> dict[str, Tensor | None]:
    """The losses of a model in training, and the gradients of their sum."""
    tokens, labels, weights = _batch()
    options = {"documents": documents, "with_routing": True}
    if is_weighted:
        output, report = model(tokens, labels, loss_weights=weights, **options)
        assert isinstance(output, WeightedLoss)
        losses, loss, z_loss = None, output.loss, output.z_loss
    else:
        output, report = model(tokens, labels, **options)
        part = model.sequence_slice
        own = weights if part is None else part.cut(weights) * part.size
        losses, loss, z_loss = output.detach(), (output * own).sum(), None
    found = {"losses": losses, "z-loss": z_loss}
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


def _compare(
    options: dict[str, Any],
    tensor_size: int,
    documents: Documents | None = None,
    is_weighted: bool = True,
    comm_type: str = A2A,
    expert_size: int = 1,
) -> None:
    """On every rank: holds a divided model against the whole one."""
    expected = _run(_model(options), documents, is_weighted)

    model, ranks = _model(options), _Ranks(tensor_size, expert_size)
    if ranks.context_size > 1:
        divide_context(model, ranks.context, comm_type)
    for layer in model.spec.layers:
        check_tensor(layer, tensor_size)
    divide_tensor(model, ranks.tensor)
    rank = dist.get_rank(ranks.tensor)
    cuts = _take_parts(model, rank, tensor_size)
    experts: set[str] = set()
    if expert_size > 1:
        divide_experts(model, ranks.experts)
        experts = _take_experts(model, dist.get_rank(ranks.experts), expert_size)

    found = _run(model, documents, is_weighted)
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
                whole = cuts[name].to_stored(whole, tensor_size).chunk(tensor_size)[rank]
            elif whole.dim() and name != "losses" and name not in experts:
                part = _mean(part, ranks.tensor) * tensor_size
            errors[name] = float((part - whole).norm() / (whole.norm() + 1e-30))
    wrong = {name: error for name, error in errors.items() if not error < 1e-6}
    assert not wrong, wrong


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_divided_layers_give_the_losses_and_gradients_of_whole_layers(
    options, documents, num_ranks
):
    run_ranks(num_ranks, _compare, options, num_ranks, documents)


@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("options", MODELS.values(), ids=MODELS)
def test_slices_of_rows_are_divided_further(options, documents, comm_type):
    run_ranks(4, _compare, options, 2, documents, True, comm_type)
