"""GPTModel: tokens to logits, or to the loss of every token."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.cross_entropy import vocab_cross_entropy
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles


class WordEmbeddings(nn.Embedding):
    """`nn.Embedding` whose initial weights are normal(0, init_std)."""

    def __init__(self, vocab_size: int, hidden_size: int, init_std: float) -> None:
        # Before nn.Embedding's constructor, which calls reset_parameters.
        self.init_std = init_std
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draws the initial weights from the default generator of their device."""
        nn.init.normal_(self.weight, mean=0.0, std=self.init_std)


class LanguageModelEmbedding(nn.Module):
    """Word embeddings with dropout. Positions enter in the attention."""

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        self.hidden_dropout = config.hidden_dropout
        self.word_embeddings = WordEmbeddings(
            vocab_size, config.hidden_size, config.init_method_std
        )

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, hidden]."""
        return F.dropout(self.word_embeddings(tokens), self.hidden_dropout, self.training)


class TransformerBlock(nn.Module):
    """The stack of layers and the normalization after them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.layers = nn.ModuleList(TransformerLayer(config) for _ in range(config.num_layers))
        self.final_layernorm = build_norm(config, config.hidden_size)

    def forward(self, hidden: Tensor, rotary: RotaryAngles | None = None) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, hidden], same dtype."""
        for layer in self.layers:
            hidden = layer(hidden, rotary)
        normalized: Tensor = self.final_layernorm(hidden)
        return normalized


class GPTModel(nn.Module):
    """A decoder-only language model.

    With tied embeddings (the default) the output projection reads the embedding's weight: one
    parameter under one name, `embedding.word_embeddings.weight`.

    Args:
        config: shapes and arithmetic.
        vocab_size: rows of the embedding and of the output projection, padding included.
    """

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"Expected a vocabulary of at least one token, got {vocab_size}.")

        self.config = config
        self.vocab_size = vocab_size
        self.embedding = LanguageModelEmbedding(config, vocab_size)
        self.decoder = TransformerBlock(config)
        self.output_layer = (
            Linear(config.hidden_size, vocab_size, bias=False, init_std=config.init_method_std)
            if config.untie_embeddings_and_output_weights
            else None
        )

    def forward(self, tokens: Tensor, labels: Tensor | None = None) -> Tensor:
        """The model's logits, or its losses against `labels`.

        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64, the token that follows each.

        Returns:
            losses [batch, seq] fp32 where there are labels, else logits [batch, seq, vocab] in the
            compute dtype.

        Raises:
            ValueError: tokens are not [batch, seq], labels have another shape, or the sequence is
                longer than max_position_embeddings.
        """
        self._check_inputs(tokens, labels)
        rotary = None
        if self.config.position_embedding_type == "rope":
            rotary = rotary_angles(self.config, tokens.shape[1], tokens.device)

        logits = self._logits(self.decoder(self.embedding(tokens), rotary))
        if labels is None:
            return logits
        return vocab_cross_entropy(logits, labels)

    def _logits(self, hidden: Tensor) -> Tensor:
        """[batch, seq, hidden] -> [batch, seq, vocab]."""
        if self.output_layer is None:
            return F.linear(hidden, self.embedding.word_embeddings.weight)
        logits: Tensor = self.output_layer(hidden)
        return logits

    def _check_inputs(self, tokens: Tensor, labels: Tensor | None) -> None:
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise ValueError(
                f"Expected int64 tokens [batch, seq], got {tokens.dtype} {tuple(tokens.shape)}."
            )

        longest = self.config.max_position_embeddings
        if longest is not None and tokens.shape[1] > longest:
            raise ValueError(
                f"Expected at most --max-position-embeddings {longest} tokens, got "
                f"{tokens.shape[1]}."
            )

        if labels is not None and labels.shape != tokens.shape:
            raise ValueError(
                f"Expected labels of shape {tuple(tokens.shape)}, got {tuple(labels.shape)}."
            )
