"""Our engine: ZeRO-3, all optimizer states in host memory, everything overlapped, and checkpoints
that are written while training continues.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from benchmarks.peers.gpt import build_gpt
from benchmarks.peers.trainer import MOMENTS, Training
from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import MegatronEngine


class OurTrainer:
    """Implements `Trainer`."""

    settings: Mapping[str, Any] = MappingProxyType(
        {
            "engine": "MegatronEngine, optim_grads_params",
            "optimizer": "optimizer_cpu_offload, overlap_cpu_optimizer_d2h_h2d, "
            "overlap_optimizer_with_forward",
            "gradients": "reduced in bf16, kept in fp32",
            "checkpoint": "fsdp_dtensor, in the background",
        }
    )

    def __init__(self, training: Training) -> None:
        num_local_ranks = int(os.environ["LOCAL_WORLD_SIZE"])
        self._device = Device.for_rank("cpu", int(os.environ["LOCAL_RANK"]), num_local_ranks)
        self._manager: CheckpointManager | None = None
        self._engine = MegatronEngine(
            _config(training),
            self._device,
            build_mesh("cpu", dist.get_world_size()),
            num_local_ranks=num_local_ranks,
        )
        self._engine.initialize(build_gpt(training.shape, training.seed))

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        microbatch = {"tokens": tokens, "labels": labels}
        return torch.tensor(self._engine.train_batch([microbatch], _loss).loss)

    def finish_steps(self) -> None:
        self._engine.state.optimizer.synchronize()

    def begin_save(self, root: Path, step: int) -> None:
        if self._manager is None:
            self._manager = CheckpointManager.start(
                str(root), self._device, dist.get_rank(), dist.get_world_size()
            )
        state = self._engine.state
        contents = state.contents(self._device, with_optim=True)
        self._manager.save(step, contents, state.info().to_plain())

    def finish_save(self) -> None:
        assert self._manager is not None, "a save was started"
        self._manager.finish()

    def load(self, root: Path, step: int) -> None:
        path = root / checkpoint_name(step)
        self._engine.load(SaveLoadMeta(str(path), with_optim=True))

    def whole_state(self, *, with_moments: bool) -> dict[str, Tensor]:
        optimizer = self._engine.state.optimizer
        optimizer.synchronize()
        whole = {}
        for name, parameter in self._engine.model.named_parameters():
            whole[name] = _whole(parameter)
            for kind in MOMENTS if with_moments else ():
                whole[f"{name}.{kind}"] = _whole(optimizer.optimizer.state[parameter][kind])
        return whole

    def close(self) -> None:
        if self._manager is not None:
            self._manager.close()


def build(training: Training) -> OurTrainer:
    """This rank's trainer."""
    return OurTrainer(training)


def _config(training: Training) -> EngineConfig:
    return EngineConfig(
        OptimizerConfig(
            weight_decay=training.weight_decay,
            adam_beta1=training.betas[0],
            adam_beta2=training.betas[1],
            adam_eps=training.eps,
            clip_grad=training.clip_grad,
            optimizer_cpu_offload=True,
            overlap_cpu_optimizer_d2h_h2d=True,
            overlap_optimizer_with_forward=True,
        ),
        LRScheduleConfig(lr=training.lr, lr_decay_style="constant"),
        DataParallelConfig(),
        train_iters=1 << 20,
        compute_dtype="bf16",
    )


def _loss(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    loss: Tensor = model(batch["tokens"], batch["labels"])
    return loss


def _whole(tensor: Tensor) -> Tensor:
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()
