"""The tensors of an engine, unsharded, to compare trainings bit by bit."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch.distributed.tensor import DTensor

from megatron.training.engines import ModuleEngine


class Contents(NamedTuple):
    """Main weights by name, and the optimizer's states by name and kind."""

    weights: dict[str, torch.Tensor]
    states: dict[str, torch.Tensor]


def contents_of(engine: ModuleEngine) -> Contents:
    """The engine's weights and states, once pending updates are done. All ranks call it."""
    engine.state.optimizer.synchronize()
    weights, states = {}, {}
    for name, parameter in engine.model.named_parameters():
        weights[name] = _whole(parameter)
        for kind, value in engine.state.optimizer.optimizer.state[parameter].items():
            if torch.is_tensor(value):
                states[f"{name}.{kind}"] = _whole(value)
    return Contents(weights, states)


def differing(one: Contents, other: Contents) -> list[str]:
    """The names of weights and states that are not the same bits. Both have the same names."""
    found = []
    for own, theirs in ((one.weights, other.weights), (one.states, other.states)):
        assert own.keys() == theirs.keys()
        found += [name for name in own if not torch.equal(own[name], theirs[name])]
    return found


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    # Of replicas, `full_tensor` is the local one.
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).clone()
