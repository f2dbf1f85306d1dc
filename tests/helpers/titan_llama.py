"""A Llama in plain PyTorch with torchtitan's names and layout, trained by FSDP2 and saved by
`dcp.save` as torchtitan does. It knows nothing of this project.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate

EPS, THETA = 1e-5, 10000.0
LR, BETAS, ADAM_EPS = 1e-2, (0.9, 0.95), 1e-8


class Sizes(NamedTuple):
    dim: int = 16
    num_heads: int = 4
    num_kv_heads: int = 2
    hidden: int = 24
    num_layers: int = 2
    vocabulary: int = 31  # odd: no number of ranks divides it

    @property
    def head(self) -> int:
        return self.dim // self.num_heads


class SplitQkv(nn.Module):
    """Three layers: what torchtitan calls QKVLinear."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        kv = sizes.num_kv_heads * sizes.head
        self.wq = nn.Linear(sizes.dim, sizes.dim, bias=False)
        self.wk, self.wv = (nn.Linear(sizes.dim, kv, bias=False) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.wq(x), self.wk(x), self.wv(x)


class FusedQkv(nn.Module):
    """One layer, group by group of heads, whose state dict has three weights: FusedQKVLinear."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        rows = (sizes.num_heads + 2 * sizes.num_kv_heads) * sizes.head
        self.wqkv = nn.Linear(sizes.dim, rows, bias=False)
        self.register_state_dict_post_hook(self._split)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._parts(self.wqkv(x).transpose(0, -1), transposed=True)

    def _parts(self, rows: Tensor, *, transposed: bool = False) -> tuple[Tensor, ...]:
        groups, head = self.sizes.num_kv_heads, self.sizes.head
        grouped = rows.unflatten(0, (groups, -1, head))
        parts = (grouped[:, :-2], grouped[:, -2:-1], grouped[:, -1:])
        found = (part.flatten(0, 2) for part in parts)
        return tuple(part.transpose(0, -1) if transposed else part.contiguous() for part in found)

    @staticmethod
    def _split(module: Any, state: dict[str, Tensor], prefix: str, _: Any) -> None:
        fused = state.pop(f"{prefix}wqkv.weight")
        if isinstance(fused, DTensor):
            fused = fused.redistribute(fused.device_mesh, [Replicate()])
        names = (f"{prefix}{name}.weight" for name in ("wq", "wk", "wv"))
        state.update(zip(names, module._parts(fused), strict=True))


class Attention(nn.Module):
    def __init__(self, sizes: Sizes, *, fused: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.qkv_linear = FusedQkv(sizes) if fused else SplitQkv(sizes)
        self.wo = nn.Linear(sizes.dim, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, self.sizes.head)).transpose(1, 2) for part in self.qkv_linear(x)
        )
        out = F.scaled_dot_product_attention(
            _turned(q), _turned(k), v, is_causal=True, enable_gqa=True
        )
        return self.wo(out.transpose(1, 2).flatten(2))


def _turned(x: Tensor) -> Tensor:
    """Neighbouring channels of each head are one complex number: [batch, heads, seq, head]."""
    length, head = x.shape[-2:]
    rates = THETA ** (-torch.arange(0, head, 2).float() / head)
    angles = torch.outer(torch.arange(length).float(), rates)
    turns = torch.polar(torch.ones_like(angles), angles)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * turns).flatten(-2)


class FeedForward(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.w1, self.w3 = (nn.Linear(sizes.dim, sizes.hidden, bias=False) for _ in range(2))
        self.w2 = nn.Linear(sizes.hidden, sizes.dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, sizes: Sizes, *, fused: bool) -> None:
        super().__init__()
        self.attention = Attention(sizes, fused=fused)
        self.feed_forward = FeedForward(sizes)
        self.attention_norm, self.ffn_norm = (nn.RMSNorm(sizes.dim, EPS) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    """Args: `fused` for one weight of query, key and value; `tied` for one of tokens and output."""

    def __init__(self, sizes: Sizes, *, fused: bool = True, tied: bool = False) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(sizes.vocabulary, sizes.dim)
        self.layers = nn.ModuleDict(
            {str(n): Block(sizes, fused=fused) for n in range(sizes.num_layers)}
        )
        self.norm = nn.RMSNorm(sizes.dim, EPS)
        self.lm_head = nn.Linear(sizes.dim, sizes.vocabulary, bias=False)
        if tied:
            self.lm_head.weight = self.tok_embeddings.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for layer in self.layers.values():
            x = layer(x)
        return self.lm_head(self.norm(x))


class Trained(NamedTuple):
    """A model that FSDP2 trains."""

    model: Llama
    optimizer: torch.optim.AdamW

    def step(self, windows: Tensor) -> float:
        """One step over this rank's windows of tokens; the mean loss of all ranks."""
        logits = self.model(windows[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), windows[:, 1:].flatten())
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / dist.get_world_size()

    def state(self) -> dict[str, Any]:
        """What torchtitan hands to `dcp.save`."""
        return {
            **self.model.state_dict(),
            "optimizer": self._flat_optimizer_state(),
            "train_state": {"step": 3, "ntokens_seen": 96},
            "lr_scheduler": {"last_epoch": 3},
            "dataloader": {"dp_rank_0": "state", "world_size": dist.get_world_size()},
        }

    def save(self, folder: str, **more: Any) -> None:
        dcp.save({**self.state(), **more}, checkpoint_id=folder)

    def _flat_optimizer_state(self) -> dict[str, Any]:
        names = {parameter: name for name, parameter in self.model.named_parameters()}
        flat = {
            f"state.{names[parameter]}.{name}": value
            for parameter, states in self.optimizer.state.items()
            for name, value in states.items()
        }
        for group in self.optimizer.param_groups:
            options = {name: value for name, value in group.items() if name != "params"}
            for parameter in group["params"]:
                flat |= {
                    f"param_groups.{names[parameter]}.{name}": value
                    for name, value in options.items()
                }
        return flat


def trained_llama(
    sizes: Sizes, batches: list[Tensor], *, fused: bool = True, tied: bool = False
) -> Trained:
    """A Llama that has learned from these batches on all ranks of the default group."""
    torch.manual_seed(5)
    model = Llama(sizes, fused=fused, tied=tied)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))  # so that norms are told apart
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LR, betas=BETAS, eps=ADAM_EPS, weight_decay=0.0
    )
    trained = Trained(model, optimizer)
    for windows in batches:
        trained.step(windows)
    return trained


def windows_of(step: int, sizes: Sizes, num: int = 6) -> Tensor:
    """A global batch: the same on every rank, to be divided."""
    generator = torch.Generator().manual_seed(100 + step)
    return torch.randint(sizes.vocabulary, (num, 9), generator=generator)


def own(windows: Tensor) -> Tensor:
    """This rank's share of a global batch."""
    return windows.chunk(dist.get_world_size())[dist.get_rank()]
