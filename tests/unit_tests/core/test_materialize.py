"""materialize: initial weights that do not depend on the number of ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from megatron.core.materialize import materialize
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import Linear
from tests.helpers.ranks import on_ranks

SEED = 1234


def _gpt(device: str = "meta") -> GPTModel:
    """With 32 rows of vocabulary and 20 channels, which three ranks do not divide evenly."""
    config = TransformerConfig(
        2, 20, 2, ffn_hidden_size=28, swiglu=True, untie_embeddings_and_output_weights=True
    )
    with torch.device(device):
        return GPTModel(config, vocab_size=32)


def _weights(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def test_meta_and_real_construction_end_in_the_same_weights() -> None:
    from_meta, from_real = _gpt("meta"), _gpt("cpu")
    before = _weights(from_real)
    for model in (from_meta, from_real):
        materialize(model, "cpu", SEED)
    a, b = _weights(from_meta), _weights(from_real)
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert not torch.equal(
        before["embedding.word_embeddings.weight"], b["embedding.word_embeddings.weight"]
    )


def test_weights_follow_the_seed_and_the_modules_name() -> None:
    models = [_gpt() for _ in range(3)]
    for model, seed in zip(models, (SEED, SEED, SEED + 1), strict=True):
        materialize(model, "cpu", seed)
    first, again, other = (_weights(model) for model in models)
    name = "decoder.layers.0.mlp.linear_fc1.weight"
    assert torch.equal(first[name], again[name])
    assert not torch.equal(first[name], other[name])
    assert not torch.equal(first[name], first[name.replace("layers.0", "layers.1")])


def test_weights_have_the_configured_deviations() -> None:
    config = TransformerConfig(2, 128, 4, init_method_std=0.1)
    with torch.device("meta"):
        model = GPTModel(config, vocab_size=256)
    materialize(model, "cpu", SEED)
    weights = _weights(model)
    layer = "decoder.layers.1."
    for name in (
        "embedding.word_embeddings.weight",
        layer + "self_attention.linear_qkv.weight",
        layer + "mlp.linear_fc1.weight",
    ):
        assert weights[name].std().item() == pytest.approx(0.1, rel=0.03)
    for name in (layer + "self_attention.linear_proj.weight", layer + "mlp.linear_fc2.weight"):
        assert weights[name].std().item() == pytest.approx(0.1 / 2, rel=0.03)
    assert weights[layer + "mlp.linear_fc2.bias"].eq(0).all()
    assert weights[layer + "input_layernorm.weight"].eq(1).all()


def test_global_random_state_is_left_as_it_was() -> None:
    torch.manual_seed(9)
    before = torch.get_rng_state()
    materialize(_gpt(), "cpu", SEED)
    assert torch.equal(torch.get_rng_state(), before)


def test_parameters_keep_their_identity_dtype_and_requires_grad() -> None:
    model = _gpt("cpu").bfloat16()
    model.embedding.requires_grad_(False)
    before = dict(model.named_parameters())
    materialize(model, "cpu", SEED)
    after = dict(model.named_parameters())
    assert all(after[name] is parameter for name, parameter in before.items())
    assert not after["embedding.word_embeddings.weight"].requires_grad
    assert after["output_layer.weight"].dtype == torch.bfloat16
    assert after["output_layer.weight"].requires_grad


class _Bare(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.empty(3))


class _Forgetful(Linear):
    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)


class _Buffered(Linear):
    def __init__(self) -> None:
        super().__init__(2, 2)
        self.register_buffer("table", torch.arange(2.0), persistent=False)


def test_parameters_without_an_initializer_are_named_and_nothing_is_touched() -> None:
    model = nn.ModuleDict({"good": Linear(2, 2), "bad": _Bare()}).to("meta")
    with pytest.raises(RuntimeError, match=r"got none for \['bad.scale'\]"):
        materialize(model, "cpu", SEED)
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_parameter_that_reset_parameters_forgets_is_named() -> None:
    model = nn.ModuleDict({"a": _Forgetful(2, 2)}).to("meta")
    with pytest.raises(RuntimeError, match=r"_Forgetful.reset_parameters to fill bias"):
        materialize(model, "cpu", SEED)


def test_buffers_on_meta_are_rejected_and_real_ones_keep_their_values() -> None:
    with pytest.raises(RuntimeError, match=r"got \['inner.table'\] on meta"):
        materialize(nn.ModuleDict({"inner": _Buffered()}).to("meta"), "cpu", SEED)
    model = _Buffered()
    model.weight = nn.Parameter(model.weight.to("meta"))
    materialize(model, "cpu", SEED)
    assert model.table.tolist() == [0.0, 1.0]
    assert not model.weight.is_meta


def test_a_shared_parameter_is_initialized_by_its_first_module() -> None:
    model = nn.ModuleDict({"first": Linear(4, 4), "second": Linear(4, 4)})
    model["second"].weight = model["first"].weight
    alone = nn.ModuleDict({"first": Linear(4, 4)})
    materialize(model, "cpu", SEED)
    materialize(alone, "cpu", SEED)
    assert model["second"].weight is model["first"].weight
    assert torch.equal(model["first"].weight, alone["first"].weight)
    assert model["second"].bias.eq(0).all()


def _tied() -> nn.Sequential:
    """On meta; three names, in two modules, of one parameter."""
    with torch.device("meta"):
        model = nn.Sequential(Linear(5, 5), Linear(5, 5))
    model[1].weight = model[0].weight
    model[1].alias = model[0].weight
    return model


@on_ranks(2)
def test_a_parameter_shared_on_meta_stays_shared_when_sharded() -> None:
    plain, model = _tied(), _tied()
    fully_shard(model, mesh=DeviceMesh("cpu", list(range(dist.get_world_size()))))
    for each in (plain, model):
        materialize(each, "cpu", SEED)
    assert [name for name, _ in model.named_parameters()] == ["0.weight", "0.bias", "1.bias"]
    assert isinstance(model[1].weight, DTensor)
    assert model[0].weight is model[1].weight is model[1].alias
    assert torch.equal(model[1].weight.full_tensor(), plain[1].weight)
    # Not only the modules, but also the engine has the new parameter.
    x = torch.arange(10.0).view(2, 5)
    torch.testing.assert_close(model(x), plain(x))


@on_ranks(3)
def test_sharded_weights_are_bit_equal_to_the_plain_models_on_1_2_and_3_ranks() -> None:
    world_size = dist.get_world_size()
    plain = _gpt()
    materialize(plain, "cpu", SEED)
    expected = _weights(plain)
    # Every rank makes every mesh, members of it or not.
    meshes: list[Any] = [DeviceMesh("cpu", list(range(size))) for size in range(1, world_size + 1)]
    meshes.append(DeviceMesh("cpu", [[0], [1]], mesh_dim_names=("replicate", "shard")))
    for mesh in meshes:
        if mesh.get_coordinate() is None:
            continue
        model = _gpt()
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        materialize(model, "cpu", SEED)
        for name, parameter in model.named_parameters():
            assert isinstance(parameter, DTensor)
            assert torch.equal(parameter.full_tensor(), expected[name]), f"{name} on {mesh}"
