"""Pieces of Adam."""

from __future__ import annotations

import torch

from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.piece import Piece


def adam_piece(
    step: AdamStep,
    grad: torch.Tensor,
    weight: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    remainder: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> Piece:
    return Piece(step, grad, weight, {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}, remainder, out)
