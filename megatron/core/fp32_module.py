"""`Fp32Module`: parameters for which 16 bits are too few, whatever a model computes in."""

from __future__ import annotations

from torch import nn


class Fp32Module(nn.Module):
    """A module whose own parameters are computed with in fp32, whatever the compute dtype of the
    model.

    Their main weights and gradients are not narrower either. Parameters of modules inside it follow
    the model. Use the parameters in the module's own forward: only there does every engine have
    them whole.
    """


def names_in_fp32(model: nn.Module) -> set[str]:
    """The names of a model's parameters that belong to an `Fp32Module`."""
    own = {
        id(parameter)
        for module in model.modules()
        if isinstance(module, Fp32Module)
        for parameter in module.parameters(recurse=False)
    }
    return {name for name, parameter in model.named_parameters() if id(parameter) in own}
