"""A mixture of experts gives the same results on an accelerator as on the CPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer import grouped_matmul
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.spec import (
    Activation,
    Balancing,
    DenseSpec,
    MoeSpec,
    RouterSpec,
    Scores,
)
from tests.helpers.ranks import run_ranks

pytestmark = pytest.mark.sim


def _step(kind: str, dtype: torch.dtype, **changes: Any) -> list[Tensor]:
    """Output, report and gradients."""
    router = RouterSpec(
        8,
        2,
        Scores.SIGMOID,
        is_scored_first=True,
        is_normalized=True,
        num_groups=4,
        top_groups=2,
        has_expert_bias=True,
        dtype="fp32",
        balancing=Balancing.SEQUENCE,
        balance_coeff=0.1,
        z_coeff=0.1,
    )
    dense = DenseSpec(8, Activation.SILU, is_gated=True, has_bias=True)
    torch.manual_seed(0)
    layer = MoELayer(
        MoeSpec(router, dense, shared=dense, **changes), 16, init_std=0.5, output_init_std=0.5
    )
    hidden = torch.randn(2, 9, 16).to(dtype)
    # Tokens of few experts, so that others have none.
    hidden[:, 3:] = hidden[:, :1]

    layer = layer.to(kind, dtype)
    hidden = hidden.to(kind).requires_grad_()
    output, report = layer(hidden)
    (output.float().square().sum() + report.balance_loss + report.z_loss).backward()
    gradients = [x.grad for x in (hidden, *layer.parameters())]
    return [x.detach().cpu() for x in (output, *report, *gradients)]


def _both(dtype: torch.dtype, changes: dict[str, Any]) -> tuple[list[Tensor], list[Tensor], bool]:
    found = _step("sim", dtype, **changes)
    return found, _step("cpu", dtype, **changes), grouped_matmul._has_kernel(torch.device("sim"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, {"capacity_factor": 0.75}])
def test_a_mixture_gives_the_same_results_as_on_the_cpu(
    dtype: torch.dtype, changes: dict[str, Any]
) -> None:
    ((found, expected, has_kernel),) = run_ranks(1, _both, dtype, changes, device="sim")
    assert has_kernel  # so bf16 takes it, and fp32 the loop over experts
    tolerance = 1e-5 if dtype is torch.float32 else 2**-6
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= tolerance * theirs.abs().max()
    load = expected[3]
    assert load.sum() == 36
    assert (load == 0).any()
