"""Llama-7B's weights and moments as N simulated ranks hold them, without memory for tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import torch

from megatron.core.dist_checkpointing.format.index import SavedAs
from megatron.core.dist_checkpointing.layout.holdings import (
    EvenShards,
    FlatShards,
    Holdings,
    RankMesh,
    replicated,
    section_holdings,
)
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.transformer.fused_weight import FusedWeight

NUM_LAYERS, HIDDEN, FFN, VOCABULARY = 32, 4096, 11008, 32000
MOMENTS = ("exp_avg", "exp_avg_sq")
RANDOM_STATES = {"torch": 5056, "python": 20048}  # bytes, of each rank


class Weight(NamedTuple):
    """A parameter, by its name in its unit; sections take the place of the last part before
    `.weight`.
    """

    name: str
    shape: tuple[int, ...]
    fused: FusedWeight | None = None


ROOT = [
    Weight("embedding.word_embeddings.weight", (VOCABULARY, HIDDEN)),
    Weight("decoder.final_layernorm.weight", (HIDDEN,)),
    Weight("output_layer.weight", (VOCABULARY, HIDDEN)),
]
QKV = FusedWeight([("query", HIDDEN), ("key", HIDDEN), ("value", HIDDEN)])
GATE_UP = FusedWeight([("gate", FFN), ("up", FFN)])
LAYER = [
    Weight("input_layernorm.weight", (HIDDEN,)),
    Weight("self_attention.linear_qkv.weight", (QKV.num_rows, HIDDEN), QKV),
    Weight("self_attention.linear_proj.weight", (HIDDEN, HIDDEN)),
    Weight("pre_mlp_layernorm.weight", (HIDDEN,)),
    Weight("mlp.linear_fc1.weight", (GATE_UP.num_rows, HIDDEN), GATE_UP),
    Weight("mlp.linear_fc2.weight", (HIDDEN, FFN)),
]
UNITS = {"": ROOT, **{f"decoder.layers.{number}.": LAYER for number in range(NUM_LAYERS)}}


def layouts_for(num_ranks: int) -> dict[str, GlobalLayout]:
    """Each unit's buffer, divided among so many ranks."""
    return {
        prefix: GlobalLayout.build([weight.shape for weight in weights], num_ranks)
        for prefix, weights in UNITS.items()
    }


class Named(NamedTuple):
    """A weight, or a section of one, under its key in the checkpoint."""

    fqn: str
    shape: tuple[int, ...]
    holdings: Holdings


def named(prefix: str, weight: Weight, whole: Holdings) -> list[Named]:
    """The weight, or its sections."""
    if weight.fused is None:
        return [Named(prefix + weight.name, weight.shape, whole)]
    parent = prefix + weight.name.rsplit(".", 2)[0]
    found = []
    for name, num_rows in weight.fused.sections:
        first_row = weight.fused.row_range(name)[0]
        shape = (num_rows, *weight.shape[1:])
        found.append(
            Named(
                f"{parent}.{name}.weight",
                shape,
                partial(section_holdings, whole, first_row, num_rows),
            )
        )
    return found


def tensors_of(weights: Sequence[Named]) -> list[SavedAs]:
    """Weights and moments."""
    keys = ("model.{}", *(f"optimizer.state.{{}}.{moment}" for moment in MOMENTS))
    return [
        SavedAs(key.format(w.fqn), torch.float32, w.shape, w.holdings)
        for key in keys
        for w in weights
    ]


def flat_tensors(
    layouts: dict[str, GlobalLayout],
    num_ranks: int,
    *,
    is_whole: bool = False,
    rank: int | None = None,
) -> list[SavedAs]:
    """All tensors in the order of a save, made anew for each as `collect` does.

    Args:
        is_whole: with step counters and random states.
        rank: whose random states; None: every rank's, which only rank 0 describes.
    """
    mesh, everyone = RankMesh((num_ranks,), tuple(range(num_ranks))), range(num_ranks)
    alike: dict[FlatShards, FlatShards] = {}
    found = []
    for prefix, weights in UNITS.items():
        shards = FlatShards(layouts[prefix], mesh, (True,))
        shards = alike.setdefault(shards, shards)
        for number, weight in enumerate(weights):
            parts = named(prefix, weight, partial(shards.holdings, number))
            found += tensors_of(parts)
            if is_whole:
                keys = [f"optimizer.state.{part.fqn}.step" for part in parts]
                found += [SavedAs(key, torch.float32, (), replicated((), everyone)) for key in keys]
    if is_whole:
        for kind, nbytes in RANDOM_STATES.items():
            shape = (nbytes,)
            found += [
                SavedAs(f"rng.{r}.{kind}", torch.uint8, shape, replicated(shape, (r,)))
                for r in (everyone if rank is None else (rank,))
            ]
    return found


def even_tensors(num_ranks: int) -> list[SavedAs]:
    """All tensors, each with its rows divided among all ranks, fused weights by their sections."""
    mesh = RankMesh((num_ranks,), tuple(range(num_ranks)))
    found = []
    for prefix, weights in UNITS.items():
        for weight in weights:
            for part in named(prefix, weight, replicated(weight.shape, (0,))):
                found += tensors_of(
                    [part._replace(holdings=EvenShards(part.shape, mesh, [0]).holdings)]
                )
    return found
