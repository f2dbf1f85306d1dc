"""The gated delta net: a mixer whose time and memory grow linearly with the sequence.

One projection makes queries, keys, values, an output gate z and two numbers for each value head:
beta, how much is written, and alpha, from which the decay is made. A short causal convolution mixes
queries, keys and values with the positions just before; then the gated delta rule moves information
over any distance.
"""

from __future__ import annotations

import importlib
import logging
import math
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.drivers import kernels_of, why_triton_fails
from megatron.core.fp32_module import Fp32Module
from megatron.core.log import printable
from megatron.core.transformer.causal_conv import CausalConv1d, causal_conv
from megatron.core.transformer.delta_rule import gated_delta_rule
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.rotary import RotaryAngles
from megatron.core.transformer.sequence_slice import ContextExchange
from megatron.core.transformer.spec import GatedDeltaNetSpec
from megatron.core.transformer.tensor_exchange import (
    TensorExchange,
    gathered_linear,
    scattered_linear,
)

logger = logging.getLogger(__name__)

# The most channels of a key head that fla's kernels take.
FLA_MAX_KEY_DIM = 256

# Ranges that initial values are drawn from: the decay's rate, uniformly, and its time step, the
# logarithm uniformly.
RATE_RANGE = (1.0, 16.0)
TIME_STEP_RANGE = (1e-3, 1e-1)


class Decay(Fp32Module):
    """How much of each head's state a position keeps, as a logarithm: -rate * time step, with the
    rate exp(A_log) and the time step softplus(alpha + dt_bias) (Gu and Dao 2023, arXiv:2312.00752).

    In bf16 a rate near 16 would change in steps of 1.6 %, and smaller updates would be lost.

    Attributes:
        A_log, dt_bias: [num_value_heads] fp32. Names and case are as in all published models.
    """

    tensor_dims: ClassVar[Mapping[str, int]] = {"A_log": 0, "dt_bias": 0}

    def __init__(self, num_value_heads: int) -> None:
        super().__init__()
        self.A_log = nn.Parameter(torch.empty(num_value_heads))
        self.dt_bias = nn.Parameter(torch.empty(num_value_heads))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Rates from 1 to 16, as in Megatron-LM, and time steps from 0.001 to 0.1, as in Mamba-2
        and the gated delta net's own code (flash-linear-attention).

        transformers and Megatron-LM start with a bias of one instead: a time step of 1.3, at which
        a head of the middling rate 8 forgets 99.997 % with each position.
        """
        with torch.no_grad():
            nn.init.uniform_(self.A_log, *RATE_RANGE).log_()
            low, high = (math.log(step) for step in TIME_STEP_RANGE)
            step = nn.init.uniform_(self.dt_bias, low, high).exp()
            # The inverse of softplus, log(exp(step) - 1), without its cancellation.
            self.dt_bias.copy_(step + (-torch.expm1(-step)).log())

    def forward(self, alpha: Tensor) -> Tensor:
        """alpha [batch, seq, num_value_heads] -> log decays of the same shape, fp32, below zero."""
        return -self.A_log.float().exp() * F.softplus(alpha.float() + self.dt_bias.float())


class GatedRMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight * silu(gate) over the last dim: the gate comes after the
    norm. fp32 inside.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self.weight = nn.Parameter(torch.empty(size))  # [size]
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Sets the scale to one."""
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        """[..., size] twice -> [..., size], x's dtype."""
        normalized = F.rms_norm(x.float(), (self.size,), self.weight.float(), self.eps)
        return (normalized * F.silu(gate.float())).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Yang et al. 2024, arXiv:2412.06464, with the layout of Qwen3-Next and Qwen3.5.

    Value head h reads query and key head h // (value heads / key heads).

    Args:
        hidden_size: channels of the input and of the output.
        init_std: standard deviation of the input projection's initial weights.
        output_init_std: that of the output projection's.

    Attributes:
        exchange, tensor: see `Attention`.
    """

    exchange: ContextExchange | None = None
    tensor: TensorExchange | None = None

    def __init__(
        self, spec: GatedDeltaNetSpec, hidden_size: int, *, init_std: float, output_init_std: float
    ) -> None:
        super().__init__()
        self.spec = spec
        sections = FusedWeight(
            (
                ("query", spec.key_size),
                ("key", spec.key_size),
                ("value", spec.value_size),
                ("z", spec.value_size),
                ("beta", spec.num_value_heads),
                ("alpha", spec.num_value_heads),
            ),
            num_heads=(*[spec.num_key_heads] * 2, *[spec.num_value_heads] * 2, 1, 1),
        )
        self.in_proj = FusedLinear(
            hidden_size, sections, bias=False, init_std=init_std, tensor_dim=0
        )
        self.conv1d = CausalConv1d(sum(sections.sizes[:3]), spec.conv_kernel)
        self.decay = Decay(spec.num_value_heads)
        self.out_norm = GatedRMSNorm(spec.value_head_dim, spec.norm_eps)
        self.out_proj = Linear(
            spec.value_size, hidden_size, bias=False, init_std=output_init_std, tensor_dim=1
        )

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryAngles | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        """Mixes the positions of each sequence, each with itself and earlier ones.

        Args:
            hidden: [batch, seq, hidden].
            rotary: not read. Layers call every mixer alike; here decays encode how far apart
                positions are.
            documents: documents of the whole rows; None: each row is one.

        Returns:
            [batch, seq, hidden], same dtype.
        """
        mixed, gate = self.inputs(hidden, rotary)
        return self.output(self.core(mixed, documents), gate)

    def inputs(
        self,
        hidden: Tensor,
        rotary: RotaryAngles | None,  # noqa: ARG002
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """The core's inputs: queries, keys and values before the convolution [batch, seq,
        channels], log decays and betas [batch, seq, value heads] fp32. And the output's other
        input: the gate [batch, seq, value_size].
        """
        projected = gathered_linear(self.in_proj, hidden, self.tensor)
        # In four parts, not in the six sections: the convolution takes three of them as one.
        num_parts = self.in_proj.fused.num_rows // projected.shape[-1]
        sizes = sum(self.in_proj.fused.sizes[:3]), *self.in_proj.fused.sizes[3:]
        mixed, z, beta, alpha = projected.split([size // num_parts for size in sizes], dim=-1)
        if self.exchange is not None:
            # Saved for backward: a view would keep the rest, too.
            z = z.clone()
        return (mixed, self.decay(alpha), beta.float().sigmoid()), (z,)

    def core(self, mixed: tuple[Tensor, ...], documents: Documents | None) -> Tensor:
        """Each head's value from its state: [batch, seq, value heads, value_head_dim]."""
        channels, log_decay, beta = mixed
        if self.exchange is None:
            return self._core(channels, log_decay, beta, documents)
        if self.exchange.gathers:
            return self._core_of_slice(self.exchange, channels, log_decay, beta, documents)

        *heads, log_decay, beta = self.exchange.to_heads(
            *self._by_head(channels, -1), log_decay.unsqueeze(-1), beta.unsqueeze(-1)
        )
        channels = torch.cat([part.flatten(2) for part in heads], dim=-1)
        # Saved for backward; views would keep all that has arrived.
        log_decay, beta = log_decay.squeeze(-1).clone(), beta.squeeze(-1).clone()
        output = self._core(channels, log_decay, beta, documents)
        return self.exchange.to_positions(output)

    def _convolution_weight(self) -> Tensor:
        """Of the channels of this rank's heads, from the weight of all, which is small."""
        weight: Tensor = self.conv1d.weight
        exchange = None if self.exchange is None or self.exchange.gathers else self.exchange
        if self.tensor is None and exchange is None:
            return weight
        heads = [*self._by_head(weight, 0)]
        if self.tensor is not None:
            heads = [part.chunk(self.tensor.num_ranks)[self.tensor.rank] for part in heads]
        if exchange is not None:
            heads = [exchange.own(part) for part in heads]
        return torch.cat([part.flatten(0, 1) for part in heads])

    def _core_of_slice(
        self,
        exchange: ContextExchange,
        channels: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Documents | None,
    ) -> Tensor:
        """As `core`, of this rank's slice of each row. PyTorch computes it on every device."""
        convolved = self._convolved_slice(exchange, channels, documents)
        query, key, value = self._by_head(convolved, -1)
        if documents is not None:
            own = exchange.part.of_rank(channels.shape[1])
            is_start = torch.zeros(documents.num_positions, dtype=torch.bool, device=beta.device)
            is_start.index_fill_(0, documents.starts(beta.device), True)
            is_start = is_start.view(len(beta), -1)[:, own.start : own.stop]
            log_decay = log_decay.masked_fill(is_start.unsqueeze(2), -math.inf)
        return gated_delta_rule(query, key, value, log_decay, beta, exchange=exchange)

    def _convolved_slice(
        self, exchange: ContextExchange, channels: Tensor, documents: Documents | None
    ) -> Tensor:
        """The convolution of this rank's slice of each row, [batch, seq / ranks, channels] both."""
        reach, length = self.spec.conv_kernel - 1, channels.shape[1]
        if reach:
            # The last inputs of all slices; before the first one are zeros.
            (ends,) = exchange.gather(channels[:, -reach:].unsqueeze(2))
            before = F.pad(ends.flatten(2), (0, 0, reach, 0))
            start = exchange.part.rank * min(reach, length)
            channels = torch.cat((before[:, start : start + reach], channels), dim=1)
        if documents is None:
            return causal_conv(self._convolution_weight(), channels)[:, reach:]

        own = exchange.part.of_rank(length)
        documents = documents.cut(range(own.start - reach, own.stop), length * exchange.part.size)
        row = channels.flatten(0, 1).unsqueeze(0)
        convolved = causal_conv(self._convolution_weight(), row, documents)
        return convolved.view(channels.shape)[:, reach:]

    def _by_head(self, channels: Tensor, dim: int) -> Iterator[Tensor]:
        """Queries, keys and values, whose channels are at `dim`, as [..., heads, head_dim, ...]."""
        spec = self.spec
        # Of all heads, or of equal parts of the sections.
        key_size = spec.key_size * channels.shape[dim] // (2 * spec.key_size + spec.value_size)
        sections = channels.tensor_split((key_size, 2 * key_size), dim=dim)
        widths = (spec.key_head_dim, spec.key_head_dim, spec.value_head_dim)
        for section, width in zip(sections, widths, strict=True):
            yield section.unflatten(dim, (-1, width))

    def _core(
        self,
        channels: Tensor,
        log_decay: Tensor,
        beta: Tensor,
        documents: Documents | None,
    ) -> Tensor:
        """As `core`, of whole rows and of all heads or some."""
        shape, spec = log_decay.shape, self.spec
        if documents is not None:
            channels, log_decay, beta = (
                part.flatten(0, 1).unsqueeze(0) for part in (channels, log_decay, beta)
            )
        value_size = shape[-1] * spec.value_head_dim
        key_size = (channels.shape[-1] - value_size) // 2
        mixed = causal_conv(self._convolution_weight(), channels, documents)
        query, key, value = mixed.split((key_size, key_size, value_size), dim=-1)
        output = _delta_rule(
            query.unflatten(-1, (-1, spec.key_head_dim)),
            key.unflatten(-1, (-1, spec.key_head_dim)),
            value.unflatten(-1, (-1, spec.value_head_dim)),
            log_decay,
            beta,
            documents,
        )
        return output.reshape(*shape, -1)

    def output(self, read: Tensor, gate: tuple[Tensor, ...]) -> Tensor:
        """From the core's result: [batch, seq, hidden]."""
        gated = self.out_norm(read, gate[0].unflatten(-1, (-1, self.spec.value_head_dim)))
        return scattered_linear(self.out_proj, gated.flatten(-2), self.tensor)


def _delta_rule(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: Documents | None,
) -> Tensor:
    """`gated_delta_rule`, by flash-linear-attention where it is installed and takes the tensors."""
    kernel = _fla_kernel() if _suits_fla(query) else None
    if kernel is not None:
        return _fla_delta_rule(kernel, query, key, value, log_decay, beta, documents)

    if documents is not None:
        # A decay to zero: the first position of a document finds a state of zeros.
        starts = documents.starts(log_decay.device)
        log_decay = log_decay.index_fill(1, starts, -math.inf)
    return gated_delta_rule(query, key, value, log_decay, beta)


@cache
def _fla_kernel() -> Callable[..., tuple[Tensor, Any]] | None:
    """flash-linear-attention's kernel, or None.

    It is imported when it is first needed, not with this file: it imports Triton, which a machine
    without an accelerator has no use for, and looks at devices, which a process that forks later
    must not.
    """
    try:
        module = importlib.import_module("fla.ops.gated_delta_rule")
        kernel: Callable[..., tuple[Tensor, Any]] = module.chunk_gated_delta_rule
        if missing := why_triton_fails():
            raise RuntimeError(missing)
    except Exception as error:  # a release that does not fit torch or Triton fails in any way
        logger.info(
            "Gated delta nets are computed by PyTorch: flash-linear-attention cannot be used (%s).",
            printable(f"{type(error).__name__}: {error}"),
        )
        return None
    return kernel


def _suits_fla(query: Tensor) -> bool:
    """Whether fla's kernels, which are Triton's, take such queries: its releases before 0.5 reject
    fp32. It chooses their block sizes, and so the order of sums, by measured times.
    """
    return (
        kernels_of(query.device).has_triton
        and not torch.are_deterministic_algorithms_enabled()
        and query.dtype.itemsize == 2
        and query.shape[-1] <= FLA_MAX_KEY_DIM
    )


def _fla_delta_rule(
    kernel: Callable[..., tuple[Tensor, Any]],
    query: Tensor,
    key: Tensor,
    value: Tensor,
    log_decay: Tensor,
    beta: Tensor,
    documents: Documents | None,
) -> Tensor:
    """The same by flash-linear-attention >= 0.2. Written by its documentation; it has not been run
    on a GPU.
    """
    # Its releases before 0.5 take as many key heads as value heads.
    num_repeats = value.shape[2] // key.shape[2]
    if num_repeats > 1:
        query = query.repeat_interleave(num_repeats, dim=2)
        key = key.repeat_interleave(num_repeats, dim=2)

    output, _ = kernel(
        q=query,
        k=key,
        v=value,
        g=log_decay,
        beta=beta.to(query.dtype),
        use_qk_l2norm_in_kernel=True,
        cu_seqlens=None if documents is None else documents.bounds(query.device),
    )
    return output
