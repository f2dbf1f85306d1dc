"""A model with parameters that stay fp32, and its training by hand, sharded by nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from megatron.core.fp32_module import Fp32Module
from megatron.core.materialize import materialize
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import build_torch_optimizer

Batch = dict[str, torch.Tensor]

# So that every rank's part of every tensor is a whole number of cache lines, on 1 and 2 ranks.
DIM = 64
LR = 1e-2
SEED = 5
NUM_MICROBATCHES = 2


class Gate(Fp32Module):
    """Two vectors, and the dtypes that they were last seen to have."""

    def __init__(self) -> None:
        super().__init__()
        self.rate = nn.Parameter(torch.empty(DIM))
        self.shift = nn.Parameter(torch.empty(DIM))
        self.seen: set[torch.dtype] = set()

    def reset_parameters(self) -> None:
        # Steps of 1e-2 at 256 and above are lost in bf16, whose neighbours are 2 apart there.
        nn.init.uniform_(self.rate, 256, 260)
        nn.init.normal_(self.shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {self.rate.dtype, self.shift.dtype}
        return (torch.cos(self.rate) * torch.sigmoid(x.float() + self.shift)).to(x.dtype)


class Layer(nn.Module):
    def __init__(self, has_gate: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)
        self.gate = Gate() if has_gate else nn.Tanh()
        self.seen: set[torch.dtype] = set()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen |= {self.linear.weight.dtype, self.linear.bias.dtype, x.dtype}
        return x + self.gate(self.linear(x))


class Model(nn.Module):
    """Three layers, of which the middle one has a gate, and a head and a gate of the root's own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(has_gate=number == 1) for number in range(3))
        self.gate = Gate()
        self.head = nn.Linear(DIM, DIM, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.gate(x))


NUM_IN_FP32 = 4 * DIM  # elements, in two gates
NUM_OTHERS = 3 * (DIM * DIM + DIM) + DIM * DIM


def seen_dtypes(model: nn.Module) -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Of the gates' parameters, and of the layers' own and their inputs, in forwards so far."""
    gates = [module.seen for module in model.modules() if isinstance(module, Gate)]
    layers = [module.seen for module in model.modules() if isinstance(module, Layer)]
    return set().union(*gates), set().union(*layers)


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return (model(batch["x"]).float() - batch["y"]).square().mean()


def batches(step: int, rank: int) -> list[Batch]:
    """A rank's microbatches of one step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    drawn = torch.randn(NUM_MICROBATCHES, 2, 4, DIM, generator=generator)
    return [{"x": x, "y": y} for x, y in drawn]


class Reference(NamedTuple):
    """The result of a training without sharding."""

    losses: list[float]
    norms: list[float]
    weights: dict[str, torch.Tensor]  # the main weights, fp32


def train_unsharded(
    steps: int,
    world_size: int,
    config: OptimizerConfig,
    dtype: torch.dtype,
    fp32_types: Sequence[type[nn.Module]] = (Fp32Module,),
) -> Reference:
    """Trains on all ranks' batches, in `dtype` over fp32 main weights.

    Args:
        fp32_types: classes whose own parameters stay fp32.
    """
    main = Model().to("meta")
    materialize(main, "cpu", SEED)
    compute = Model()
    for module in compute.modules():
        if not isinstance(module, tuple(fp32_types)):
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().to(dtype)))
    pairs = list(zip(main.parameters(), compute.parameters(), strict=True))

    optimizer = build_torch_optimizer(main, config, LR)
    found = Reference([], [], dict(main.named_parameters()))
    for step in range(steps):
        with torch.no_grad():
            for weight, rounded in pairs:
                rounded.copy_(weight)
                weight.grad = torch.zeros_like(weight)

        total = 0.0
        for number in range(NUM_MICROBATCHES):
            for rank in range(world_size):
                loss = forward_step(compute, batches(step, rank)[number]) / NUM_MICROBATCHES
                loss.backward()
                total += loss.item() / world_size
                for weight, rounded in pairs:
                    weight.grad.add_(rounded.grad.float() / world_size)
                    rounded.grad = None

        squares = [weight.grad.double().square().sum() for weight, _ in pairs]
        norm = float(sum(squares) ** 0.5)
        for weight, _ in pairs:
            weight.grad.mul_(min(1.0, config.clip_grad / (norm + 1e-6)))
        optimizer.step()
        found.losses.append(total)
        found.norms.append(norm)
    return found
