"""The position-wise MLP of a transformer layer."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.spec import Activation, DenseSpec
from megatron.core.transformer.tensor_exchange import (
    TensorExchange,
    gathered_linear,
    scattered_linear,
)


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _squared_relu(x: Tensor) -> Tensor:
    return F.relu(x).square()


_ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    Activation.GELU: F.gelu,
    Activation.GELU_TANH: _gelu_tanh,
    Activation.QUICK_GELU: _quick_gelu,
    Activation.SILU: F.silu,
    Activation.SQUARED_RELU: _squared_relu,
}


def activate(spec: DenseSpec, inner: Tensor) -> Tensor:
    """The activation of a network without a gate."""
    return _ACTIVATIONS[spec.activation](inner)


def activate_gated(spec: DenseSpec, gate: Tensor, up: Tensor) -> Tensor:
    """The activation of a gated network: see `DenseSpec`."""
    if spec.clamp is not None:
        gate = gate.clamp(max=spec.clamp)
        up = up.clamp(-spec.clamp, spec.clamp)
    if spec.up_offset:
        up = up + spec.up_offset
    return _ACTIVATIONS[spec.activation](gate) * up


class MLP(nn.Module):
    """An activation between two linear layers, or a gated one: fc2(activation(gate) * up) (Shazeer
    2020, arXiv:2002.05202).

    If it is gated, `linear_fc1` holds the gate's rows and then the up rows.

    Attributes:
        tensor: how ranks that divide the channels exchange positions; None: this rank has all of
            them. Tensor parallelism sets it.
    """

    tensor: TensorExchange | None = None

    def __init__(
        self, spec: DenseSpec, hidden_size: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        self.spec = spec
        bias = spec.has_bias
        self.linear_fc1: Linear
        if spec.is_gated:
            sections = FusedWeight((("gate", spec.size), ("up", spec.size)))
            self.linear_fc1 = FusedLinear(
                hidden_size, sections, bias, init_std=init_std, tensor_dim=0
            )
        else:
            self.linear_fc1 = Linear(hidden_size, spec.size, bias, init_std=init_std, tensor_dim=0)
        self.linear_fc2 = Linear(
            spec.size, hidden_size, bias, init_std=output_init_std, tensor_dim=1
        )

    def forward(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype."""
        inner = gathered_linear(self.linear_fc1, hidden, self.tensor)
        if isinstance(self.linear_fc1, FusedLinear):
            gate, up = self.linear_fc1.split(inner)
            inner = activate_gated(self.spec, gate, up)
        else:
            inner = activate(self.spec, inner)
        return scattered_linear(self.linear_fc2, inner, self.tensor)
