"""Trains by Lightning Fabric."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from lightning_fabric.strategies import ModelParallelStrategy
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from tests.peers.helpers.peer_rank import (
    ENGINES,
    VOCABULARY,
    batch,
    common_directory,
    make_optimizer,
    run_training,
    scalar,
    serve,
)

WIDTH = 32


class _Scale(nn.Module):
    """A factor in a buffer that no checkpoint has, as a rotary embedding's frequencies."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("factor", torch.empty(WIDTH), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        self.factor.fill_(2.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.factor


class _Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.scale = _Scale()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, WIDTH)) for _ in range(3)
        )
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.scale(self.embedding(input_ids))
        for layer in self.layers:
            x = x + layer(x)
        logits = self.head(x).flatten(0, 1).float()
        return nn.functional.cross_entropy(logits, labels.flatten())


def _weights_file() -> Path:
    path = Path(common_directory()) / "weights.pt"
    torch.manual_seed(0)
    if dist.get_rank() == 0:
        torch.save(_Model().state_dict(), path)
    dist.barrier()
    return path


class _Training:
    """A model and its optimizer under a fabric."""

    def __init__(
        self,
        engine: str,
        optimizer: str,
        strategy: str,
        precision: str,
        is_on_meta: bool,
        is_compiled: bool,
        accumulation: int,
    ) -> None:
        self._num_microbatches = accumulation

        def parallelize(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
            options = {"mesh": mesh["data_parallel"], "mp_policy": MixedPrecisionPolicy()}
            for layer in model.layers:
                if is_compiled:
                    layer.compile(backend="aot_eager")
                ENGINES[engine](layer, **options)
            ENGINES[engine](model, **options)
            return model

        chosen: Any = strategy
        if strategy != "ddp":
            chosen = ModelParallelStrategy(
                parallelize,
                data_parallel_size=2,
                tensor_parallel_size=1,
                save_distributed_checkpoint=strategy == "sharded",
            )
        self._fabric = Fabric(accelerator="cpu", devices=2, strategy=chosen, precision=precision)
        self._fabric.launch()

        torch.manual_seed(0)
        if strategy == "ddp":
            # The optimizer first: `setup` casts the model.
            model = _Model()
            built = make_optimizer(optimizer, model.parameters())
            self._model, self._optimizer = self._fabric.setup(model, built)
        else:
            with self._fabric.init_module(empty_init=is_on_meta):
                model = _Model()
            self._model = self._fabric.setup_module(model)
            if is_on_meta:
                self._fabric.load_raw(_weights_file(), self._model)
            built = make_optimizer(optimizer, self._model.parameters())
            self._optimizer = self._fabric.setup_optimizers(built)

    def step(self, number: int) -> list[float]:
        numbers = []
        for microbatch in range(self._num_microbatches):
            is_last = microbatch == self._num_microbatches - 1
            with self._fabric.no_backward_sync(self._model, enabled=not is_last):
                loss = self._model(**batch(self._num_microbatches * number + microbatch))
                self._fabric.backward(loss)
            numbers.append(scalar(loss))
        norm = self._fabric.clip_gradients(self._model, self._optimizer, max_norm=0.5)
        self._optimizer.step()
        self._optimizer.zero_grad()
        return [*numbers, scalar(norm)]

    def save(self, path: str) -> None:
        self._fabric.save(path, {"model": self._model, "optimizer": self._optimizer})

    def load(self, path: str) -> None:
        self._fabric.load(path, {"model": self._model, "optimizer": self._optimizer})


def train(
    engine: str,
    optimizer: str,
    strategy: str = "sharded",
    precision: str = "32-true",
    is_on_meta: bool = False,
    is_compiled: bool = False,
    accumulation: int = 1,
    resume_on: list[str] | None = None,
) -> list[float]:
    """Losses and norms of each step; see `run_training`."""

    def make(engine: str, optimizer: str) -> _Training:
        return _Training(
            engine, optimizer, strategy, precision, is_on_meta, is_compiled, accumulation
        )

    return run_training(make, engine, optimizer, resume_on)


if __name__ == "__main__":
    serve(train)
