"""One transformer layer, built of the parts that its spec names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.gated_delta_net import GatedDeltaNet
from megatron.core.transformer.latent_attention import LatentAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles
from megatron.core.transformer.router import RouterReport
from megatron.core.transformer.spec import (
    FeedForward,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    Mixer,
    MoeSpec,
)

LayerOutput: TypeAlias = Tensor | tuple[Tensor, RouterReport]
# A replacement of a layer's body; see compiled_layers.py.
CompiledBody: TypeAlias = (
    "Callable[[TransformerLayer, Tensor, RotaryAngles | None, Documents | None], LayerOutput]"
)


class TransformerLayer(nn.Module):
    """A mixer and a feed-forward network. Each reads the normalized residual stream, and its
    output, normalized once more where the spec has a second norm, is added to the stream after
    dropout.

    The mixer is `self_attention` and the other `mlp`, whatever they are, as in Megatron.

    Args:
        recompute_granularity: see TransformerConfig.

    Attributes:
        compiled: a replacement of the body, if any.
    """

    def __init__(
        self,
        spec: LayerSpec,
        hidden_size: int,
        *,
        init_std: float,
        output_init_std: float,
        recompute_granularity: str | None = None,
    ) -> None:
        super().__init__()
        self.spec = spec
        self.recomputes_all = recompute_granularity == "full"
        self.compiled: CompiledBody | None = None

        self.input_layernorm = build_norm(spec.norm, hidden_size)
        self.self_attention = _build_mixer(
            spec.mixer,
            hidden_size,
            init_std=init_std,
            output_init_std=output_init_std,
            recompute_granularity=recompute_granularity,
        )
        self.post_self_attn_layernorm = (
            None if spec.post_norm is None else build_norm(spec.post_norm, hidden_size)
        )
        self.pre_mlp_layernorm = build_norm(spec.norm, hidden_size)
        self.mlp = _build_feed_forward(
            spec.feed_forward, hidden_size, init_std=init_std, output_init_std=output_init_std
        )
        self.post_mlp_layernorm = (
            None if spec.post_norm is None else build_norm(spec.post_norm, hidden_size)
        )

    def forward(
        self,
        hidden: Tensor,
        rotary: RotaryAngles | None = None,
        documents: Documents | None = None,
    ) -> LayerOutput:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype; a layer with experts gives
        their router's report besides. It is an output, not a note on the side, so that backward
        finds this layer's weights gathered, and recomputation counts no token twice.

        With documents, positions see their own document only, and padding is sent to no expert.

        With --recompute-granularity full, a training forward keeps only `hidden` and backward runs
        the body again.
        """
        if self.recomputes_all and self.training and torch.is_grad_enabled():
            # Inside forward, so that recomputation does not run this module's FSDP hooks again.
            recomputed: LayerOutput = checkpoint(
                self._body, hidden, rotary, documents, use_reentrant=False
            )
            return recomputed

        return self._body(hidden, rotary, documents)

    def _body(
        self, hidden: Tensor, rotary: RotaryAngles | None, documents: Documents | None
    ) -> LayerOutput:
        if self.compiled is not None:
            return self.compiled(self, hidden, rotary, documents)

        mixed = self.self_attention(self.input_layernorm(hidden), rotary, documents)
        hidden = self.add(hidden, mixed, self.post_self_attn_layernorm)
        normalized = self.pre_mlp_layernorm(hidden)
        if not isinstance(self.mlp, MoELayer):
            return self.add(hidden, self.mlp(normalized), self.post_mlp_layernorm)

        output, report = self.mlp(normalized, documents)
        return self.add(hidden, output, self.post_mlp_layernorm), report

    def add(self, hidden: Tensor, output: Tensor, norm: nn.Module | None) -> Tensor:
        """The residual stream with the output of a branch."""
        if norm is not None:
            output = norm(output)
        return hidden + F.dropout(output, self.spec.dropout, self.training)


def _build_feed_forward(
    spec: FeedForward, hidden_size: int, *, init_std: float, output_init_std: float
) -> MLP | MoELayer:
    if isinstance(spec, MoeSpec):
        return MoELayer(spec, hidden_size, init_std=init_std, output_init_std=output_init_std)
    return MLP(spec, hidden_size, init_std=init_std, output_init_std=output_init_std)


def _build_mixer(
    spec: Mixer,
    hidden_size: int,
    *,
    init_std: float,
    output_init_std: float,
    recompute_granularity: str | None,
) -> SelfAttention | LatentAttention | GatedDeltaNet:
    stds = {"init_std": init_std, "output_init_std": output_init_std}
    if isinstance(spec, GatedDeltaNetSpec):
        # Selective recomputation is about attention's scores, which a delta net does not have.
        return GatedDeltaNet(spec, hidden_size, **stds)
    options: dict[str, Any] = {**stds, "recompute_granularity": recompute_granularity}
    if isinstance(spec, LatentAttentionSpec):
        return LatentAttention(spec, hidden_size, **options)
    return SelfAttention(spec, hidden_size, **options)
