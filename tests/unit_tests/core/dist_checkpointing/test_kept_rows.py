"""PyTorch DCP's checkpoints of rows that stay sharded in computation, such as experts."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from megatron.core.dist_checkpointing.fsdp_checkpoint import load_checkpoint, save_checkpoint
from megatron.core.distributed.fsdp import Placements, fully_shard, fully_shard_context
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.transformer.fused_weight import FusedWeight, HasSections
from tests.helpers.ranks import run_ranks

NUM_PARTS, ROWS, WIDTH = 4, 3, 5


class Parts(HasSections, nn.Module):
    """Some matrices that are rows of one parameter; computes with the local ones."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(NUM_PARTS * ROWS, WIDTH))

    def sections_of(self, parameter: str) -> FusedWeight:  # noqa: ARG002  it has one
        return FusedWeight([(f"parts.{number}", ROWS) for number in range(NUM_PARTS)])

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.mT


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.parts = Parts()

    def forward(self, x: Tensor) -> Tensor:
        return self.parts(self.first(x))


def build(seed: int, ep: int) -> tuple[Model, FusedAdam]:
    torch.manual_seed(seed)
    model = Model()
    placements, num_ranks = Placements.for_strategy("optim_grads_params"), dist.get_world_size()
    dense = init_device_mesh("cpu", (num_ranks,), mesh_dim_names=("dp",))
    mesh = init_device_mesh("cpu", (num_ranks // ep, ep), mesh_dim_names=("edp", "ep"))
    with fully_shard_context("cpu"):
        if ep > 1:
            fully_shard(model.parts, mesh, placements.with_kept_axis("ep", ["edp"]))
        fully_shard(model, dense, placements)
    return model, FusedAdam(model.parameters(), lr=0.01)


def whole(model: Model, optimizer: FusedAdam) -> list[Tensor]:
    tensors = [
        tensor for own in model.parameters() for tensor in (own.detach(), *_states(optimizer, own))
    ]
    return [t.full_tensor() if isinstance(t, DTensor) else t.clone() for t in tensors]


def _states(optimizer: FusedAdam, parameter: Tensor) -> list[Tensor]:
    return [state for _, state in sorted(optimizer.state[parameter].items())]


def _save(folder: str, ep: int) -> list[Tensor]:
    model, optimizer = build(0, ep)
    for _ in range(2):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_checkpoint(model, optimizer, folder)
    return whole(model, optimizer)


def _load(folder: str, ep: int) -> list[Tensor]:
    model, optimizer = build(1, ep)
    load_checkpoint(model, optimizer, folder)
    return whole(model, optimizer)


@pytest.mark.parametrize("saved_as", [(4, 2), (3, 1)], ids=str)
def test_a_checkpoint_loads_on_any_ranks_whichever_rows_they_keep(tmp_path, saved_as):
    folder = str(tmp_path / "mine")
    num_ranks, ep = saved_as
    (saved, *_) = run_ranks(num_ranks, _save, folder, ep)

    for other_ranks, other_ep in ((1, 1), (2, 2), (4, 4)):
        for loaded in run_ranks(other_ranks, _load, folder, other_ep):
            assert len(loaded) == len(saved)
            assert all(torch.equal(one, two) for one, two in zip(loaded, saved, strict=True))
