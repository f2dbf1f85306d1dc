"""PyTorch FSDP2 with CPUOffloadPolicy, fused AdamW on the CPU, and DCP's asynchronous save, as its
documentation shows. Does not import this project's package.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from benchmarks.peers.gpt import build_gpt, decay_groups
from benchmarks.peers.trainer import MOMENTS, Training


class TrainState(Stateful):
    """Model and optimizer, as DCP's tutorial wraps them."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._model = model
        self._optimizer = optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._model,
            self._optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optimizer"],
        )


class Fsdp2Trainer:
    """Implements `Trainer`."""

    settings: Mapping[str, Any] = MappingProxyType(
        {
            "engine": "fully_shard of each layer and of the root, CPUOffloadPolicy, "
            "reshard_after_forward but for the root",
            "optimizer": "torch.optim.AdamW, fused",
            "gradients": "reduced in bf16, kept in fp32",
            "checkpoint": "dcp.async_save in a thread, staged in a thread, with cached plans",
        }
    )

    def __init__(self, training: Training) -> None:
        self._clip_grad = training.clip_grad
        self._model = build_gpt(training.shape, training.seed)
        policy: dict[str, Any] = {
            "mesh": init_device_mesh("cpu", (dist.get_world_size(),)),
            "mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16),
            "offload_policy": CPUOffloadPolicy(pin_memory=False),
        }
        for layer in self._model.layers:
            fully_shard(layer, **policy)
        fully_shard(self._model, **policy)
        self._optimizer = torch.optim.AdamW(
            decay_groups(self._model, training.weight_decay),
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            fused=True,
        )
        self._state = TrainState(self._model, self._optimizer)
        # Saves communicate while training continues, which needs a separate group.
        self._save_group = dist.new_group(backend="gloo")
        # Kept, so that it copies into the same memory each time, during forward and backward.
        self._stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=True,
                use_non_blocking_copy=False,
            )
        )
        self._saving: AsyncSaveResponse | None = None

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._model(tokens, labels)
        loss.backward()
        nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_grad)
        if self._saving is not None:
            self._saving.staging_completion.result()  # it copies the states that the step updates
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss.detach()

    def finish_steps(self) -> None:
        """No work is pending: its step is not overlapped."""

    def begin_save(self, root: Path, step: int) -> None:
        response = dcp.async_save(
            {"train": self._state},
            checkpoint_id=root / f"step_{step}",
            planner=dcp.DefaultSavePlanner(enable_plan_caching=True),
            process_group=self._save_group,
            async_stager=self._stager,
        )
        assert isinstance(response, AsyncSaveResponse), "as of every stager that is asynchronous"
        self._saving = response

    def finish_save(self) -> None:
        assert self._saving is not None, "a save was started"
        self._saving.upload_completion.result()
        self._saving = None

    def load(self, root: Path, step: int) -> None:
        dcp.load({"train": self._state}, checkpoint_id=root / f"step_{step}")

    def whole_state(self, *, with_moments: bool) -> dict[str, Tensor]:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self._model, self._optimizer, options=options)
        whole = dict(model)
        for name, state in optimizer.get("state", {}).items():
            for kind in MOMENTS if with_moments else ():
                whole[f"{name}.{kind}"] = state[kind]
        return whole

    def close(self) -> None:
        self._stager.close()


def build(training: Training) -> Fsdp2Trainer:
    """This rank's trainer."""
    return Fsdp2Trainer(training)
