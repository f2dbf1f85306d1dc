"""Models whose layers ranks divide, without an engine that shows each rank its parts."""

from __future__ import annotations

from torch import nn

from megatron.core.transformer.tensor_cut import TensorCut, tensor_cuts


def take_parts(model: nn.Module, rank: int, num_ranks: int) -> dict[str, TensorCut]:
    """Replaces the weights that ranks divide by the parts of this one. Returns their cuts."""
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
