"""Metrics of how evenly tokens are distributed over experts."""

from __future__ import annotations

from typing import Any

from torch import Tensor

# Keys of a training record.
CV, WORST_CV, CV_BY_LAYER = "expert_load_cv", "expert_load_cv_max", "expert_load_cv_by_layer"
BUSIEST, IDLE, LOAD = "busiest_expert", "idle_experts", "expert_load"


def load_record(load: Tensor | None, *, with_experts: bool) -> dict[str, Any]:
    """Returns the metrics of a step's expert loads; empty for a model without experts.

    The coefficient of variation is the standard deviation of the loads of a layer's experts over
    their mean: 0 if all have the same, and sqrt(experts - 1) if one has everything.

    Args:
        load: tokens that chose each expert: [layers with experts, experts], on the host.
        with_experts: whether the record gets the load of each expert.

    Returns:
        expert_load_cv, expert_load_cv_max: the mean of the layers' coefficients, and the largest.
        busiest_expert: the largest load of an expert, in units of its layer's mean: with expert
            parallelism a layer takes about as long as its busiest rank.
        idle_experts: how many have no token.
        expert_load_cv_by_layer: [layers with experts].
        expert_load: [layers with experts][experts].
    """
    if load is None:
        return {}
    tokens = load.double()
    mean = tokens.mean(dim=1, keepdim=True).clamp(min=1e-300)  # no tokens: all loads are 0
    cv = (tokens / mean).std(dim=1, correction=0)
    record: dict[str, Any] = {
        CV: cv.mean().item(),
        WORST_CV: cv.max().item(),
        BUSIEST: (tokens / mean).max().item(),
        IDLE: int((load == 0).sum()),
        CV_BY_LAYER: cv.tolist(),
    }
    if with_experts:
        record[LOAD] = load.tolist()
    return record
