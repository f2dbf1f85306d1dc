"""The activations that are counted from shapes are the ones that autograd keeps."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from megatron.core import products
from megatron.core.distributed.context import divide_context
from megatron.core.distributed.tensor import divide_tensor
from megatron.core.layer_execution import use_recipe
from megatron.core.low_precision.recipes import Recipe, recipe_named
from megatron.core.models.gpt.activations import Microbatch, activation_bytes
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.delta_rule import state_nbytes
from megatron.core.transformer.layer_specs import model_spec
from tests.helpers.divided_layers import take_parts
from tests.helpers.ranks import run_ranks

VOCAB, SEQ, SIZE = 512, 128, 2
BASE: dict[str, Any] = {
    "num_layers": 2,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "ffn_hidden_size": 352,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
GROUPED = {"kv_channels": 32, "group_query_attention": True, "num_query_groups": 2}
MIXTURE = {"num_experts": 8, "moe_ffn_hidden_size": 64, "moe_router_topk": 2}
MODELS: dict[str, dict[str, Any]] = {
    "dense": GROUPED,
    "GELU, LayerNorm": {"normalization": "LayerNorm", "swiglu": False},
    "norms and gates of heads": {**GROUPED, "qk_layernorm": True, "attention_output_gate": True},
    "norms behind": {**GROUPED, "post_norm": True},
    "mixture": {**GROUPED, **MIXTURE},
    "shared experts": {**GROUPED, **MIXTURE, "moe_shared_expert_intermediate_size": 96},
    "gated delta nets": {
        "linear_attention_freq": "[1,0]",
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
    "latent attention": {
        "multi_latent_attention": True,
        "q_lora_rank": 48,
        "kv_lora_rank": 32,
        "qk_head_dim": 24,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 24,
        "qk_layernorm": True,
    },
    "recomputed": {**GROUPED, "recompute_granularity": "full"},
}


def _saved(
    config: TransformerConfig,
    dtype: torch.dtype,
    comm_type: str | None = None,
    *,
    divides_layers: bool = False,
    recipe: Recipe | None = None,
) -> int:
    """The bytes that a training forward leaves, each storage once, without weights; with
    `comm_type` all ranks divide the sequences, with `divides_layers` the layers.
    """
    torch.manual_seed(0)
    model = GPTModel(config, VOCAB).to(dtype)
    if recipe is not None:
        use_recipe(model, recipe)
    if comm_type is not None:
        divide_context(model, dist.group.WORLD, comm_type)
    if divides_layers:
        divide_tensor(model, dist.group.WORLD)
        take_parts(model, dist.get_rank(), dist.get_world_size())
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage
        return tensor

    tokens = torch.randint(VOCAB, (SIZE, SEQ))
    counts = torch.full(tokens.shape, 1.0 / tokens.numel())
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(tokens, tokens, loss_weights=counts)
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_count_is_what_autograd_keeps(monkeypatch, model, dtype):
    # Otherwise attention keeps fp32 inputs.
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    config = TransformerConfig(**{**BASE, **model})
    batch = Microbatch(SIZE, SEQ, dtype.itemsize, "cpu")
    counted = activation_bytes(model_spec(config), VOCAB, batch, config.recompute_granularity)
    # Statistics of rows are not counted, and the residual stream is not kept apart from norms.
    assert counted.kept == pytest.approx(_saved(config, dtype), rel=0.03)


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "blockwise", "mxfp8", "nvfp4"])
@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_the_count_in_low_precision_is_what_autograd_keeps(monkeypatch, model, name):
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    config, recipe = TransformerConfig(**{**BASE, **model}), recipe_named(name)
    batch = Microbatch(SIZE, SEQ, 2, "cpu", code_nbytes=recipe.kept_nbytes)
    counted = activation_bytes(model_spec(config), VOCAB, batch, config.recompute_granularity)
    # Besides, experts' tokens are padded to whole tiles.
    saved = _saved(config, torch.bfloat16, recipe=recipe)
    assert counted.kept == pytest.approx(saved, rel=0.05)
    if config.recompute_granularity is None:
        assert (
            counted.kept
            < activation_bytes(model_spec(config), VOCAB, replace(batch, code_nbytes=None)).kept
        )


@pytest.mark.parametrize("comm_type", ["a2a", "all_gather"])
def test_ranks_that_divide_sequences_keep_their_share(comm_type):
    models = [TransformerConfig(**{**BASE, **model}) for model in MODELS.values()]

    def kept() -> list[int]:
        with mock.patch.object(products, "_SLOW_DTYPES", frozenset()):
            return [_saved(config, torch.float32, comm_type) for config in models]

    batch = Microbatch(SIZE, SEQ, 4, "cpu")
    part = replace(batch, context_size=4, gathers=comm_type == "all_gather")
    for config, found in zip(models, run_ranks(4, kept)[1], strict=True):
        own, whole = (
            activation_bytes(model_spec(config), VOCAB, each, config.recompute_granularity).kept
            for each in (part, batch)
        )
        assert own == pytest.approx(found, rel=0.1)
        assert found < 1.1 * whole / 4


def test_ranks_that_divide_layers_keep_their_share():
    """Whole latents of latent attention come on top, and shared key heads."""
    models = [TransformerConfig(**{**BASE, **model}) for model in MODELS.values()]
    models = [
        replace(model, linear_num_key_heads=4) if any(model.linear_layers()) else model
        for model in models
    ]

    def kept() -> list[int]:
        with mock.patch.object(products, "_SLOW_DTYPES", frozenset()):
            return [_saved(config, torch.float32, divides_layers=True) for config in models]

    batch = Microbatch(SIZE, SEQ, 4, "cpu")
    part = replace(batch, tensor_size=4)
    for config, found in zip(models, run_ranks(4, kept)[1], strict=True):
        own, whole = (
            activation_bytes(model_spec(config), VOCAB, each, config.recompute_granularity).kept
            for each in (part, batch)
        )
        assert own == pytest.approx(found, rel=0.1), config
        if not config.multi_latent_attention:
            assert found < 1.2 * whole / 4


def test_each_rank_with_a_copy_of_a_key_head_of_delta_nets_keeps_it():
    nets = {"linear_attention_freq": "[1,1]", "linear_num_key_heads": 1, "ffn_hidden_size": 64}
    nets |= {"linear_key_head_dim": 128, "linear_num_value_heads": 4, "linear_value_head_dim": 8}
    config = TransformerConfig(**{**BASE, **nets})
    batch = Microbatch(SIZE, SEQ, 4, "cpu", context_size=4)
    counted = activation_bytes(model_spec(config), VOCAB, batch).kept
    for found in run_ranks(4, _saved, config, torch.float32, "a2a"):
        assert counted == pytest.approx(found, rel=0.05)


def test_recomputation_keeps_inputs_and_has_one_layer_at_a_time():
    config = TransformerConfig(**BASE)
    batch = Microbatch(SIZE, SEQ, 2, "cuda")
    whole = activation_bytes(model_spec(config), VOCAB, batch)
    recomputed = activation_bytes(model_spec(config), VOCAB, batch, "full")
    assert recomputed.layers == (SIZE * SEQ * 2 * 128,) * 2
    assert recomputed.recomputed == max(whole.layers) > recomputed.layers[0]
    assert (recomputed.rest, recomputed.loss) == (whole.rest, whole.loss)


def test_delta_nets_keep_the_states_of_the_device_that_is_planned_for():
    config = TransformerConfig(**{**BASE, **MODELS["gated delta nets"]})
    on_cpu, on_gpu = (
        activation_bytes(model_spec(config), VOCAB, Microbatch(64, 1024, 4, kind)).layers
        for kind in ("cpu", "cuda")
    )
    states = [
        state_nbytes(1024, 64 * 4, key_dim=16, value_dim=24, device_kind=kind)
        for kind in ("cpu", "cuda")
    ]
    assert states[0] == 16 * states[1] == 16 * 64 * 4 * 16 * 24 * 4
    # The other layer has the same norms and MLP; those keep two tensors instead of one on the CPU.
    assert (on_cpu[0] - on_cpu[1]) - (on_gpu[0] - on_gpu[1]) == states[0] - states[1]


def test_tokens_that_travel_to_experts_are_kept_where_they_arrive_too():
    config = TransformerConfig(**BASE, **MIXTURE)
    spec, near = model_spec(config), Microbatch(SIZE, SEQ, 2, "cuda")
    far = Microbatch(SIZE, SEQ, 2, "cuda", exchanges_tokens=True)
    more = activation_bytes(spec, VOCAB, far).kept - activation_bytes(spec, VOCAB, near).kept
    assert more == 2 * SIZE * SEQ * (2 * 2 * 128) * 2
