"""FSDP2's precision policy where modules are partly frozen, or take and return dataclasses."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from typing import Any

import pytest
import torch
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from megatron.core.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from tests.helpers.ranks import on_ranks

BF16, FP32 = torch.bfloat16, torch.float32


class Named(OrderedDict[str, Any]):
    """A subclass of dict, like output classes."""


@dataclasses.dataclass
class Part:
    x: torch.Tensor
    ids: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Batch:
    part: Part
    more: list[Any]
    name: str = "batch"


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.proj = nn.Linear(4, 2)
        self.seen: list[torch.dtype] = []

    def forward(self, batch: Batch, **more: Any) -> Batch:
        tensors = (batch.part.x, batch.more[0]["x"], batch.part.ids, more["part"].x)
        self.seen = [tensor.dtype for tensor in tensors]
        y = self.proj(batch.part.x)
        return Batch(Part(y, batch.part.ids), [Named(x=2 * y, deep=Part(y, batch.part.ids))])


@pytest.mark.skipif(torch.__version__ < "2.12", reason="FSDP2 does not look into dataclasses")
@on_ranks(2)
def test_dataclasses_are_cast_as_fsdp2_casts_them() -> None:
    mesh = init_device_mesh("cpu", (2,))
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, output_dtype=FP32)
    found = []
    for fully in (fsdp2.fully_shard, fully_shard):
        net = Net()
        fully(net, mesh=mesh, mp_policy=policy)
        x, ids = torch.ones(3, 4), torch.arange(3)
        batch = Batch(Part(x, ids), [Named(x=x)])
        out = net(batch, part=Part(x, ids))

        assert net.seen == [BF16, BF16, torch.int64, BF16]
        assert (batch.part.x is x, batch.more[0]["x"] is x) == (True, True), "inputs stay"
        assert (type(out), type(out.more[0]), out.name) == (Batch, Named, "batch")
        tensors = [out.part.x, out.more[0]["x"], out.more[0]["deep"].x]
        assert {tensor.dtype for tensor in tensors} == {FP32}
        assert out.part.ids.dtype == torch.int64

        sum(tensor.sum() for tensor in tensors).backward()
        found.append([p.grad.full_tensor() for p in net.parameters()] + tensors)
    torch.testing.assert_close(found[1], found[0])


def adapter() -> nn.Module:
    """A frozen layer with a trained one."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
    model[0].requires_grad_(False)
    return model


@on_ranks(2)
def test_frozen_parameters_keep_their_values_under_fsdp2s_policy() -> None:
    mesh = init_device_mesh("cpu", (2,))
    policy = fsdp2.MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=FP32)
    expected = adapter().state_dict()
    outputs, changed = [], {name: value + 0.1 for name, value in expected.items()}
    for fully in (fsdp2.fully_shard, fully_shard):
        model = adapter()
        fully(model, mesh=mesh, mp_policy=policy)
        for name, value in model.state_dict().items():
            assert value.dtype == FP32
            assert torch.equal(value.full_tensor(), expected[name])

        outputs.append(model(torch.ones(2, 6)))
        assert outputs[-1].dtype == BF16
        outputs[-1].sum().backward()
        assert [p.grad is None for p in model.parameters()] == [True, True, False, False]

        # The next forward uses the values written to the frozen weights.
        with torch.no_grad():
            for parameter in model[0].parameters():
                parameter.add_(0.1)
        outputs.append(model(torch.ones(2, 6)))
        for name, value in model[0].state_dict().items():
            torch.testing.assert_close(value.full_tensor(), changed[f"0.{name}"])
    assert torch.equal(outputs[0], outputs[2])
    assert torch.equal(outputs[1], outputs[3])
    assert not torch.equal(outputs[0], outputs[1])


@on_ranks(2)
@pytest.mark.parametrize("frozen", [None, FP32])
def test_ours_keeps_frozen_parameters_as_asked(frozen: torch.dtype | None) -> None:
    policy = MixedPrecisionPolicy(compute_dtype=BF16, frozen_params_dtype=frozen)
    model = fully_shard(adapter(), mixed_precision_policy=policy)
    assert [p.dtype for p in model.parameters()] == [frozen or BF16] * 2 + [FP32] * 2
