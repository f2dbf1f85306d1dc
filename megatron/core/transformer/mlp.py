"""The position-wise MLP of a transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.spec import Activation, DenseSpec


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.SILU: F.silu,
    Activation.SQUARED_RELU: _squared_relu,
}


def activation_of(spec: DenseSpec) -> Callable[[Tensor], Tensor]:
    """The function between the two linear layers."""
    return _ACTIVATIONS[spec.activation]


class MLP(nn.Module):
    """An activation between two linear layers, or a gated one: fc2(activation(gate) * up) (Shazeer
    2020, arXiv:2002.05202).

    If it is gated, `linear_fc1` holds the gate's rows and then those of up.
    """

    def __init__(
        self, spec: DenseSpec, hidden_size: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        bias = spec.has_bias
        self.linear_fc1: Linear
        if spec.is_gated:
            sections = FusedWeight((("gate", spec.size), ("up", spec.size)))
            self.linear_fc1 = FusedLinear(hidden_size, sections, bias, init_std=init_std)
        else:
            self.linear_fc1 = Linear(hidden_size, spec.size, bias, init_std=init_std)
        self.activation = activation_of(spec)
        self.linear_fc2 = Linear(spec.size, hidden_size, bias, init_std=output_init_std)

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype."""
        inner: Tensor = self.linear_fc1(hidden)
        if isinstance(self.linear_fc1, FusedLinear):
            gate, up = self.linear_fc1.split(inner)
            inner = self.activation(gate) * up
        else:
            inner = self.activation(inner)
        output: Tensor = self.linear_fc2(inner)
        return output
