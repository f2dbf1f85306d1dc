"""The two sides of a parameter: whole while its module computes, sharded at rest."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch import nn

# Left on a parameter that `fully_shard` has replaced and whose memory it has freed: the group that
# has it now, weakly, and its index there.
REPLACED = "_fsdp_replaced"

# Left on the whole side of a parameter, which no optimizer may have.
WHOLE = "_fsdp_whole"


@dataclass(frozen=True, eq=False)
class FsdpParameter:
    """One physical parameter, under all the names it has.

    Attributes:
        fqns: its names, from the module that was sharded.
        owners: the modules that have it, weakly, each with the name it has there.
        full: over the unsharded compute weights; without memory at rest.
        sharded: a DTensor over this rank's main weights.
    """

    fqns: tuple[str, ...]
    owners: tuple[tuple[weakref.ref[nn.Module], str], ...]
    full: nn.Parameter
    sharded: nn.Parameter

    def show(self, parameter: nn.Parameter) -> None:
        """Puts `full` or `sharded` into the owning modules."""
        for owner, name in self.owners:
            module = owner()
            if module is not None:
                module._parameters[name] = parameter

    def is_shown(self) -> bool:
        """Whether the owning modules still have `full` or `sharded`, and no replacement."""
        modules = [(owner(), name) for owner, name in self.owners]
        own = (id(self.full), id(self.sharded))
        return all(
            module is None or id(module._parameters.get(name)) in own for module, name in modules
        )


@dataclass(frozen=True, eq=False)
class OwnedParameter:
    """A parameter as `fully_shard` finds it."""

    fqns: tuple[str, ...]
    owners: tuple[tuple[nn.Module, str], ...]
    original: nn.Parameter
