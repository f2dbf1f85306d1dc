"""Models whose layers ranks divide, without an engine that shows each rank its parts."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megatron.core.transformer.tensor_cut import TensorCut, tensor_cuts


def part_of(whole: Tensor, cut: TensorCut, num_parts: int, part: int) -> Tensor:
    """A rank's part of a weight."""
    num_rows = cut.part_shape(whole.shape, num_parts)[0]
    rows = range(part * num_rows, (part + 1) * num_rows)
    return torch.cat([whole[box.slices()] for box in cut.boxes(whole.shape, num_parts, rows)])


def take_parts(model: nn.Module, rank: int, num_ranks: int) -> dict[str, TensorCut]:
    """Replaces the weights that ranks divide by the parts of this one. Returns their cuts."""
    cuts = tensor_cuts(model)
    names = {name: cuts[part] for name, part in model.named_parameters() if part in cuts}
    for name, cut in names.items():
        owner, _, own = name.rpartition(".")
        module = model.get_submodule(owner)
        part = part_of(module.get_parameter(own).detach(), cut, num_ranks, rank)
        setattr(module, own, nn.Parameter(part))
    return names
