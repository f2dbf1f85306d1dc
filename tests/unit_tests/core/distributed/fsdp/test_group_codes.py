"""Groups that store and gather quantized weights: bit-equal to layers that quantize gathered bf16
weights, with at most half of the bytes.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import (
    FsdpModule,
    MixedPrecisionPolicy,
    Placements,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.dtensors import local_tensor
from megatron.core.low_precision.amax_history import AmaxHistory
from megatron.core.low_precision.linear import linear
from megatron.core.low_precision.recipes import HistoryOptions, recipe_named
from tests.helpers.ranks import on_ranks, rank_device, run_ranks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import (
    groups_of,
    mesh_and_placements,
)

FP32, BF16, E4M3 = torch.float32, torch.bfloat16, torch.float8_e4m3fn
# No multiples of the block size, so that ranks share blocks.
DIM, INNER = 136, 200
RECIPES = ["blockwise", "tensorwise", "mxfp8", "nvfp4"]
ON_TWO = ["no_shard", "optim", "optim_grads", "optim_grads_params"]


class Quantized(nn.Linear):
    """A linear layer that quantizes its operands, like the linear layers of transformer layers."""

    def __init__(self, inputs: int, outputs: int, recipe: str, *, bias: bool = True) -> None:
        super().__init__(inputs, outputs, bias)
        self.recipe = recipe_named(recipe).with_one_plane()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return linear(self.recipe, x, self.weight, self.bias)


class Layer(nn.Module):
    """A layer with two quantized weights, their biases, and a norm."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = Quantized(DIM, INNER, recipe)
        self.down = Quantized(INNER, DIM, recipe)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def policy(gathers_codes: bool) -> MixedPrecisionPolicy:
    return MixedPrecisionPolicy(FP32, FP32, compute_dtype=BF16, gathers_codes=gathers_codes)


def sharded(sharding: str, recipe: str, gathers_codes: bool) -> nn.Sequential:
    torch.manual_seed(3)
    model = nn.Sequential(*[Layer(recipe) for _ in range(2)]).to(rank_device())
    mesh, placements = mesh_and_placements(sharding)
    with fully_shard_context(rank_device()):
        for layer in model:
            fully_shard(layer, mesh, placements, policy(gathers_codes))
        fully_shard(model, mesh, placements, policy(gathers_codes))
    return model


def loss_of(model: nn.Module, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    x = torch.randn(5, DIM, generator=generator).to(rank_device(), BF16)
    return model(x).float().square().mean()


def _trained(
    sharding: str, recipe: str, gathers_codes: bool
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Returns the losses of three steps and the unsharded main weights after them."""
    model = sharded(sharding, recipe, gathers_codes)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    fully_shard_optimizer(optimizer)
    losses = []
    for step in range(3):
        for number in range(2):
            with microbatch(model[0].context, is_last=number == 1):
                loss = loss_of(model, 2 * step + number)
                loss.backward()
                losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses, {name: own.full_tensor().clone() for name, own in model.named_parameters()}


def _same_bits(sharding: str, recipe: str) -> None:
    losses, weights = _trained(sharding, recipe, gathers_codes=True)
    expected, their_weights = _trained(sharding, recipe, gathers_codes=False)
    assert losses == expected
    assert len(set(losses)) == len(losses)
    assert all(torch.equal(weights[name], theirs) for name, theirs in their_weights.items())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("sharding", ON_TWO)
def test_two_ranks_match_layers_that_quantize_gathered_weights(sharding: str, recipe: str) -> None:
    run_ranks(2, _same_bits, sharding, recipe)


@pytest.mark.parametrize("sharding", ["hsdp", "hfsdp", "full", "optim_grads_params"])
def test_four_ranks_match_layers_that_quantize_gathered_weights(sharding: str) -> None:
    run_ranks(4, _same_bits, sharding, "blockwise")


def codes_of(model: nn.Module) -> list[FsdpParameterGroup]:
    return [group for group in groups_of([model]) if group.codes is not None]


@on_ranks(2)
def test_frozen_weights_and_weights_shared_with_a_bf16_layer_are_not_quantized() -> None:
    torch.manual_seed(3)
    layer = Layer("blockwise")
    layer.frozen = Quantized(DIM, DIM, "blockwise", bias=False).requires_grad_(False)
    layer.shared = Quantized(DIM, DIM, "blockwise", bias=False)
    layer.plain = nn.Linear(DIM, DIM, bias=False)
    layer.plain.weight = layer.shared.weight
    assert isinstance(fully_shard(layer, mixed_precision_policy=policy(True)), FsdpModule)

    (group,) = codes_of(layer)
    assert group.names == ["up.weight", "down.weight"]
    buffers = group.model_weight, group.post_optimizer_model_weight, group.unsharded_weight
    assert {buffer.dtype for buffer in buffers} == {E4M3}
    assert (group.dtype, group.main_weight.dtype, group.plan.grad_dtype) == (BF16, FP32, FP32)
    others = [group for group in groups_of([layer]) if group.codes is None]
    assert {group.model_weight.dtype for group in others} == {BF16}


@on_ranks(2)
def test_a_weight_shared_by_layers_with_separate_amax_histories_is_not_quantized() -> None:
    layers = nn.Sequential(*[Quantized(DIM, DIM, "delayed", bias=False) for _ in range(3)])
    for layer in layers:
        layer.amax_history = AmaxHistory(HistoryOptions(1, "most_recent"))
    layers[1].weight = layers[0].weight
    fully_shard(layers, mixed_precision_policy=policy(True))
    (group,) = codes_of(layers)
    assert group.names == ["2.weight"]


@on_ranks(2)
def test_the_placeholder_of_a_quantized_weight_reads_as_nan() -> None:
    model = sharded("optim_grads_params", "blockwise", gathers_codes=True)
    loss_of(model, 0).backward()
    model[0].unshard()
    weight = model[0].up.weight
    assert (weight.shape, weight.dtype, weight.is_leaf) == ((INNER, DIM), BF16, True)
    assert weight.untyped_storage().nbytes() == BF16.itemsize
    assert weight.isnan().all()
    assert weight.quantized.codes.dtype == E4M3
    assert weight.quantized.codes.float().abs().max() > 0
    model[0].reshard()
    assert local_tensor(model[0].up.weight).dtype == FP32


@on_ranks(2)
def test_fp4_weights_with_an_odd_number_of_columns_are_gathered_in_bf16() -> None:
    layers = nn.Sequential(Quantized(DIM, 7, "nvfp4"), Quantized(7, DIM, "nvfp4"))
    fully_shard(layers, mixed_precision_policy=policy(True))
    (group,) = codes_of(layers)
    assert group.names == ["0.weight"]
    assert group.model_weight.dtype == torch.uint8


class Weights(nn.Sequential):
    """Two linear layers, all of whose parameters are quantized."""

    def __init__(self, recipe: str = "blockwise") -> None:
        super().__init__(*[Quantized(256, 256, recipe, bias=False) for _ in range(2)])


def _sends_few_bytes(recipe: str, per_byte: int) -> None:
    mesh, placements = mesh_and_placements("optim_grads_params")
    torch.manual_seed(3)
    model = Weights(recipe)
    fully_shard(model, mesh, placements, policy(True))
    (group,) = codes_of(model)
    sent = list[int]()
    original = dist.isend

    def counted(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        sent.append(tensor.nbytes)
        return original(tensor, *args, **kwargs)

    dist.isend = counted
    try:
        with torch.no_grad():
            model(torch.ones(2, 256, dtype=BF16))
            after_update = sum(sent)
            sent.clear()
            model(torch.ones(2, 256, dtype=BF16))
    finally:
        dist.isend = original

    # Each rank sends its half of the elements.
    numel = sum(parameter.full.numel() for parameter in group.fsdp_parameters) // 2
    assert per_byte * sum(sent) == per_byte * group.plan.gathered_nbytes == numel
    assert after_update == group.plan.gathered_nbytes + group.plan.maxima_nbytes
    assert after_update <= (1 / per_byte + 0.04) * numel
    assert group.plan.maxima_nbytes > 0


@pytest.mark.parametrize(("recipe", "per_byte"), [("blockwise", 1), ("nvfp4", 2)])
def test_a_gather_after_an_update_sends_codes_and_less_than_4_percent_more(
    recipe: str, per_byte: int
) -> None:
    run_ranks(2, _sends_few_bytes, recipe, per_byte)


@on_ranks(2)
def test_backward_raises_if_weights_were_updated_after_forward() -> None:
    mesh, placements = mesh_and_placements("optim_grads")
    model = Weights()
    fully_shard(model, mesh, placements, policy(True))
    inputs = torch.ones(2, 256, dtype=BF16, requires_grad=True)
    early = model(inputs).sum()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
        model(inputs)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        early.backward()


def _divided(gathers_codes: bool) -> list[float]:
    """Returns the losses of a layer whose rows are divided over a kept axis."""
    mesh = init_device_mesh(rank_device().type, (2, 2), mesh_dim_names=("edp", "ep"))
    placements = Placements.for_strategy("optim_grads_params").with_kept_axis("ep", ("edp",))
    torch.manual_seed(3)
    layer = Quantized(DIM, 2 * INNER, "blockwise", bias=False)
    fully_shard(layer, mesh, placements, policy(gathers_codes))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    losses = []
    for step in range(2):
        loss = loss_of(layer, step)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@on_ranks(4)
def test_ranks_of_a_kept_axis_quantize_the_blocks_of_their_rows() -> None:
    assert _divided(gathers_codes=True) == _divided(gathers_codes=False)


def test_gathering_codes_requires_fp32_main_weights() -> None:
    for dtype in (None, BF16):
        with pytest.raises(ValueError, match="main_params_dtype"):
            MixedPrecisionPolicy(main_params_dtype=dtype, gathers_codes=True)
