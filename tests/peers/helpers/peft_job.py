"""Trains PEFT's LoRA adapters over a sharded model."""

from __future__ import annotations

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate

from tests.peers.helpers.peer_rank import (
    ENGINES,
    batch,
    common_directory,
    make_optimizer,
    scalar,
    serve,
    tiny_llama,
)
from tests.peers.helpers.trainer_job import add_adapters

NUM_STEPS = 3


def _sharded(engine: str, is_bf16: bool, is_compiled: bool) -> nn.Module:
    model = tiny_llama()
    model = add_adapters(model.bfloat16() if is_bf16 else model)
    fully_shard = ENGINES[engine]
    for layer in model.base_model.model.model.layers:
        if is_compiled:
            layer.compile(backend="aot_eager")
        fully_shard(layer, mp_policy=MixedPrecisionPolicy())
    return fully_shard(model, mp_policy=MixedPrecisionPolicy())


def _load_adapters(target: nn.Module, source: nn.Module, way: str) -> None:
    adapters = get_peft_model_state_dict(source)
    if way == "shards":
        set_peft_model_state_dict(target, adapters)
        return

    if way == "whole tensors":
        state = {name: shard for name, shard in source.state_dict().items() if "lora_" in name}
        whole = {name: shard.full_tensor() for name, shard in state.items()}
        # PEFT cuts them itself, as torch.chunk, which must not pass for the rows of the engine.
        try:
            set_peft_model_state_dict(target, {n: s.full_tensor() for n, s in adapters.items()})
        except NotImplementedError as error:
            if "load_state_dict" not in str(error):
                raise
        else:
            raise AssertionError("PEFT has loaded rows that it has cut itself")
        target.load_state_dict(whole, strict=False)
        return

    whole = {name: shard.full_tensor() for name, shard in adapters.items()}
    if way == "replicas":
        mesh = next(iter(adapters.values())).device_mesh
        replicas = {n: DTensor.from_local(value, mesh, [Replicate()]) for n, value in whole.items()}
        set_peft_model_state_dict(target, replicas)
        return

    directory = common_directory()
    if dist.get_rank() == 0:
        source.save_pretrained(directory, state_dict=whole)
    dist.barrier()
    target.load_adapter(directory, "loaded")
    target.set_adapter("loaded")


def train(
    engine: str,
    optimizer: str,
    is_bf16: bool = False,
    load: str | None = None,
    has_merged: bool = False,
    is_compiled: bool = False,
) -> list[float]:
    """Losses and norms of each step, and the loss after them.

    With `load`, that of another model with the trained adapters.
    """
    torch._dynamo.reset()
    model = _sharded(engine, is_bf16, is_compiled)
    built = make_optimizer(optimizer, [p for p in model.parameters() if p.requires_grad])
    numbers = []
    for number in range(NUM_STEPS):
        loss = model(**batch(number)).loss
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        built.step()
        built.zero_grad()
        numbers += [scalar(loss), scalar(norm)]

    if load is not None:
        if hasattr(built, "synchronize"):
            built.synchronize()
        target = _sharded(engine, is_bf16, is_compiled)
        _load_adapters(target, model, load)
        model = target
    if has_merged:
        model.merge_adapter()
    with torch.no_grad():
        return [*numbers, scalar(model(**batch(NUM_STEPS)).loss)]


if __name__ == "__main__":
    serve(train)
