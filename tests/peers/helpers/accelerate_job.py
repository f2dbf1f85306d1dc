"""Trains by accelerate's `Accelerator`."""

from __future__ import annotations

from typing import Any

from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from torch import nn

from tests.peers.helpers.peer_rank import (
    ENGINES,
    batch,
    make_optimizer,
    run_training,
    scalar,
    serve,
    tiny_llama,
    use_engine,
)


def forget_accelerators() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def allow_fsdp_on_cpu() -> None:
    """accelerate offers FSDP on accelerators alone; its code for FSDP2 runs on the CPU as well."""
    PartialState(cpu=True)
    PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


def _accelerator(plugin: dict[str, Any] | None, **options: Any) -> Accelerator:
    forget_accelerators()
    if plugin is None:
        return Accelerator(cpu=True, **options)
    allow_fsdp_on_cpu()
    fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", **plugin
    )
    return Accelerator(cpu=True, fsdp_plugin=fsdp_plugin, **options)


class _Training:
    """A model and its optimizer under an accelerator."""

    def __init__(
        self,
        engine: str,
        optimizer: str,
        plugin: dict[str, Any] | None,
        is_tied: bool,
        is_compiled: bool,
        accumulation: int,
    ) -> None:
        use_engine(engine)
        self._accelerator = _accelerator(plugin, gradient_accumulation_steps=accumulation)
        self._num_microbatches = accumulation
        model = tiny_llama(is_tied)
        if is_compiled:
            for layer in model.model.layers:
                layer.compile(backend="aot_eager")
        self._model: nn.Module
        if plugin is None:
            self._prepare_sharded(model, ENGINES[engine], optimizer)
        else:
            built = make_optimizer(optimizer, model.parameters())
            self._model, self._optimizer = self._accelerator.prepare(model, built)

    def _prepare_sharded(self, model: nn.Module, fully_shard: Any, optimizer: str) -> None:
        for layer in model.model.layers:
            fully_shard(layer)
        fully_shard(model)
        built = make_optimizer(optimizer, model.parameters())
        # Otherwise it wraps the model into DDP.
        self._model = self._accelerator.prepare_model(model, evaluation_mode=True)
        self._optimizer = self._accelerator.prepare(built)

    def step(self, number: int) -> list[float]:
        numbers = []
        for microbatch in range(self._num_microbatches):
            with self._accelerator.accumulate(self._model):
                loss = self._model(**batch(self._num_microbatches * number + microbatch)).loss
                self._accelerator.backward(loss)
                numbers.append(scalar(loss))
                if self._accelerator.sync_gradients:
                    parameters = self._model.parameters()
                    numbers.append(scalar(self._accelerator.clip_grad_norm_(parameters, 0.5)))
                self._optimizer.step()
                self._optimizer.zero_grad()
        return numbers

    def save(self, path: str) -> None:
        self._accelerator.save_state(path)

    def load(self, path: str) -> None:
        self._accelerator.load_state(path)


def train(
    engine: str,
    optimizer: str,
    plugin: dict[str, Any] | None = None,
    is_tied: bool = False,
    is_compiled: bool = False,
    accumulation: int = 1,
    resume_on: list[str] | None = None,
) -> list[float]:
    """Losses and norms of each step; see `run_training`."""

    def make(engine: str, optimizer: str) -> _Training:
        return _Training(engine, optimizer, plugin, is_tied, is_compiled, accumulation)

    return run_training(make, engine, optimizer, resume_on)


if __name__ == "__main__":
    serve(train)
