"""State dicts of torch's AdamW, `FusedAdam` and `HybridDeviceOptimizer` load into each other by
PyTorch's helpers, without options.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from megatron.core.distributed.fsdp import fully_shard
from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from tests.helpers.ranks import run_ranks

SHARDS = {"fully_shard": fully_shard, "FSDP2": fsdp2.fully_shard}
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda params, **options: torch.optim.AdamW(params, fused=True, **options),
    "FusedAdam": FusedAdam,
    "HybridDeviceOptimizer": HybridDeviceOptimizer,
}
FORMS = {
    "full": StateDictOptions(full_state_dict=True),
    "sharded": StateDictOptions(),
    "flat": StateDictOptions(flatten_optimizer_state_dict=True),
}


def build(engine: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
    for module in (model[0], model):
        SHARDS[engine](module)
    # Rows in multiples of torch's vector width: its fused AdamW rounds a shorter tail differently.
    return model, OPTIMIZERS[optimizer](model.parameters(), lr=0.01, weight_decay=0.1)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    model(torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def weights(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    if isinstance(optimizer, HybridDeviceOptimizer):
        optimizer.synchronize()
    return [local_tensor(parameter).detach().clone() for parameter in model.parameters()]


def _interchange(root: str, engine: str) -> list[str]:
    """What does not continue as the optimizer that was not replaced."""
    failed = []
    for saving, form in itertools.product(OPTIMIZERS, FORMS):
        model, optimizer = build(engine, saving)
        step(model, optimizer, 0)
        optimizer.param_groups[0]["lr"] = 0.02  # as a schedule would
        saved_weights = {name: t.detach().clone() for name, t in model.state_dict().items()}
        folder = f"{root}/{saving}-{form}"
        state = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
        if form != "full":
            dcp.save({"optim": state}, checkpoint_id=folder)
            state = {}
        state = copy.deepcopy(state)  # counters are the optimizer's own memory
        step(model, optimizer, 2)
        expected = weights(model, optimizer)

        for loading in OPTIMIZERS.keys() - {saving}:
            other, other_optimizer = build(engine, loading)
            set_model_state_dict(other, saved_weights)
            try:
                _load(folder, form, state, other, other_optimizer)
                step(other, other_optimizer, 2)
            except BaseException as error:  # DCP's own is no Exception
                failed.append(f"{saving} -> {loading}, {form}: {error!r}")
                continue
            is_equal = torch.allclose if "AdamW" in (saving, loading) else torch.equal
            pairs = zip(weights(other, other_optimizer), expected, strict=True)
            if not all(is_equal(*pair) for pair in pairs):
                failed.append(f"{saving} -> {loading}, {form}: other weights")
    return failed


def _load(
    folder: str, form: str, full: Any, model: nn.Module, optimizer: torch.optim.Optimizer
) -> None:
    state = copy.deepcopy(full)  # torch's optimizers step counters that were loaded in place
    if form != "full":
        state = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
        dcp.load({"optim": state}, checkpoint_id=folder)
    set_optimizer_state_dict(model, optimizer, state, options=FORMS[form])


@pytest.mark.parametrize("engine", SHARDS)
def test_checkpoints_of_torchs_adamw_and_of_ours_continue_in_each_other(tmp_path, engine):
    for failed in run_ranks(2, _interchange, str(tmp_path), engine):
        assert failed == []
