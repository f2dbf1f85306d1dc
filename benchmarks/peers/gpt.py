"""The model that all sides train, in plain PyTorch, and its data: the model of no project, so that
only the engines differ.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_CHANNELS = 64


@dataclass(frozen=True)
class Shape:
    """Of the model and of a rank's batch."""

    layers: int
    hidden: int
    vocabulary: int
    micro_batch: int
    sequence: int

    @property
    def ffn(self) -> int:
        """Width inside the MLP: 8/3 of the hidden size, in steps of 64."""
        return -(-self.hidden * 8 // 3) // 64 * 64


class Layer(nn.Module):
    """Attention and a SwiGLU MLP, each after an RMSNorm and added to the residual stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        hidden = shape.hidden
        self.attention_norm = nn.RMSNorm(hidden)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.projection = nn.Linear(hidden, hidden, bias=False)
        self.mlp_norm = nn.RMSNorm(hidden)
        self.gate_up = nn.Linear(hidden, 2 * shape.ffn, bias=False)
        self.down = nn.Linear(shape.ffn, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """[batch, sequence, hidden] -> the same."""
        batch, sequence, hidden = x.shape
        split = (batch, sequence, hidden // HEAD_CHANNELS, HEAD_CHANNELS)
        query, key, value = (
            part.view(split).transpose(1, 2)
            for part in self.qkv(self.attention_norm(x)).chunk(3, dim=-1)
        )
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.projection(attended.transpose(1, 2).reshape(x.shape))

        gate, up = self.gate_up(self.mlp_norm(x)).chunk(2, dim=-1)
        mixed: Tensor = self.down(F.silu(gate) * up)
        return x + mixed


class GPT(nn.Module):
    """A GPT with learned positions and an untied output layer."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.tokens = nn.Embedding(shape.vocabulary, shape.hidden)
        self.positions = nn.Embedding(shape.sequence, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden)
        self.output = nn.Linear(shape.hidden, shape.vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        """[batch, sequence] int64, both -> the mean loss, fp32."""
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for layer in self.layers:
            x = layer(x)
        logits = self.output(self.norm(x))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def build_gpt(shape: Shape, seed: int) -> GPT:
    """In fp32, with the same weights in every process: matrices normal(0, 0.02), norms 1."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = GPT(shape)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
    return model


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Parameter groups of an optimizer: matrices decay, norms do not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.ndim <= 1]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]


def batch_of(shape: Shape, step: int, rank: int, seed: int) -> tuple[Tensor, Tensor]:
    """A rank's tokens and labels in a step: [micro batch, sequence] int64 each.

    A token follows from the one before, up to a remainder of 4 that is drawn: something that a
    model can learn, so that losses fall and a difference between trainings shows.
    """
    generator = torch.Generator().manual_seed((seed * 1_000_003 + step) * 1_000_003 + rank)
    rows = shape.micro_batch
    drawn = torch.randint(4, (rows, shape.sequence), generator=generator)
    text = [torch.randint(shape.vocabulary, (rows,), generator=generator)]
    for column in drawn.unbind(1):
        text.append((5 * text[-1] + 7 + column) % shape.vocabulary)
    whole = torch.stack(text, dim=1)
    return whole[:, :-1].contiguous(), whole[:, 1:].contiguous()
