"""Mixers whose rows are divided over ranks compute what one rank with the whole rows computes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron.core.distributed.context import A2A, ALL_GATHER, divide_context
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles
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
from tests.helpers.ranks import run_ranks

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
}
# Documents that cross the cuts, and one that is over two of them. Padding behind.
DOCUMENTS = Documents((7, 31, 4, 6, 13, 29, 6), padding=(0, 6))


def _build(spec: Mixer, recomputes_core: bool = False) -> nn.Module:
    """With weights large enough for the scores to matter, alike on all ranks."""
    torch.manual_seed(3)
    stds = {"init_std": 0.3, "output_init_std": 0.3}
    if isinstance(spec, GatedDeltaNetSpec):
        return GatedDeltaNet(spec, HIDDEN, **stds)
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(spec, HIDDEN, recomputes_core=recomputes_core, **stds)
    return SelfAttention(spec, HIDDEN, recomputes_core=recomputes_core, **stds)


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
    recomputes_core: bool = False,
) -> None:
    """On every rank: holds a divided mixer against the whole one."""
    generator = torch.Generator().manual_seed(5)
    hidden, factors = (torch.randn(BATCH, SEQ, HIDDEN, generator=generator) for _ in range(2))
    positions = torch.arange(SEQ)
    expected = _run(_build(spec), hidden, positions, factors, documents)

    divided = _build(spec, recomputes_core)
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


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize("documents", [None, DOCUMENTS], ids=["rows", "documents"])
@pytest.mark.parametrize("spec", MIXERS.values(), ids=MIXERS)
def test_divided_rows_give_the_outputs_and_gradients_of_whole_rows(
    spec, documents, comm_type, num_ranks
):
    run_ranks(num_ranks, _compare, spec, documents, partial(_divide, comm_type))
