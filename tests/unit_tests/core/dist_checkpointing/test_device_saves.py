"""Saves and loads of tensors on an accelerator, whichever of its streams runs ahead."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.manifest import BLOCK_BYTES
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save import manager as manager_module
from megatron.core.dist_checkpointing.save.data_file import BufferPool
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.training.checkpoint.hf_config import FolderExtras
from megatron.training.checkpoint.hf_weights import HfExport
from megatron_hybrid.checkpoint.audit import Audit
from tests.helpers.ranks import rank_device, run_ranks
from tests.simulated_accelerator.helpers.behaviours import (
    DEFAULT_LAST,
    GPU_WITH_PAUSES,
    LANES_LAST,
    Behaviour,
    all_behaviours,
    these_behaviours,
)
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import GatedStore

MOMENTS = {"fp32": torch.float32, "fp8": torch.float8_e4m3fn}


class Training:
    """A model on the device, with weights of other strides in it, and AdamW."""

    def __init__(self, moments: torch.dtype) -> None:
        torch.manual_seed(0)
        convolution = nn.Conv2d(16, 32, 5).to(memory_format=torch.channels_last)
        self.model = nn.Sequential(nn.Linear(300, 500), convolution, nn.BatchNorm2d(32))
        self.model.to(rank_device())
        self.optimizer = FusedAdam(
            self.model.parameters(), exp_avg_dtype=moments, exp_avg_sq_dtype=moments
        )
        assert not self.model[1].weight.is_contiguous()

    def step(self, number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        for parameter in self.model.parameters():
            gradient = torch.empty_like(parameter, device="cpu")
            parameter.grad = gradient.normal_(generator=generator).to(rank_device())
        self.optimizer.step()

    def contents(self) -> Contents:
        return collect(self.model, self.optimizer)

    def values(self) -> dict[str, torch.Tensor]:
        """Copies of the current values on the host."""
        torch.accelerator.synchronize()
        entries = self.contents().entries
        return {
            entry.key: entry.part_of(entry.values.read()).detach().cpu().contiguous().clone()
            for entry in entries
        }


def wrong_in(root: Path, iteration: int, expected: dict[str, torch.Tensor]) -> list[str]:
    """The keys of a checkpoint with unexpected values."""
    checkpoint = PublishedCheckpoint.open(LocalStore(root), checkpoint_name(iteration))
    assert checkpoint.tensors.keys() == expected.keys()
    wrong = []
    for key, values in expected.items():
        found = torch.empty_like(values)
        checkpoint.read(key, (0,) * values.dim(), found)
        if not torch.equal(found, values):
            wrong.append(key)
    return wrong


STEPS, SAVED_AFTER = (1, 2, 3, 4, 5), (2, 4)


def _saves_what_there_was(moments: torch.dtype, behaviour: Behaviour, root: Path) -> None:
    reference, expected = Training(moments), {}
    for number in STEPS:
        reference.step(number)
        if number in SAVED_AFTER:
            expected[number] = reference.values()

    training = Training(moments)
    with (
        behaviour.applied(),
        CheckpointManager(
            LocalStore(root), Device(behaviour.kind), 0, 1, "abcd", staging_share=0.5
        ) as manager,
    ):
        for number in STEPS:
            training.step(number)
            if number in SAVED_AFTER:
                # Much of the step may not have started yet, and the next one follows at once.
                manager.save(number, training.contents(), {})
        manager.finish()

    for number in SAVED_AFTER:
        assert wrong_in(root, number, expected[number]) == []


@pytest.mark.parametrize("moments", MOMENTS)
@all_behaviours(LANES_LAST, DEFAULT_LAST, GPU_WITH_PAUSES)
def test_a_save_of_states_on_the_device_has_their_values(tmp_path, moments, behaviour):
    run_ranks(
        1, _saves_what_there_was, MOMENTS[moments], behaviour, tmp_path, device=behaviour.kind
    )


def _saves_hf_of_what_there_was(dtype: torch.dtype, behaviour: Behaviour, root: Path) -> None:
    training = Training(torch.float32)
    training.step(1)
    expected = {
        key.removeprefix("model."): values.to(dtype) if values.is_floating_point() else values
        for key, values in training.values().items()
        if key.startswith("model.")
    }
    export = HfExport.of(training.model, dtype, FolderExtras())
    with (
        behaviour.applied(),
        CheckpointManager(
            LocalStore(root), Device(behaviour.kind), 0, 1, "abcd", staging_share=0.5
        ) as manager,
    ):
        manager.save(1, replace(training.contents(), export=export), {})
        training.step(2)
        manager.finish()

    found = load_file(root / checkpoint_name(1) / "hf" / "model.safetensors")
    assert found.keys() == expected.keys()
    assert [key for key, values in expected.items() if not torch.equal(found[key], values)] == []
    audit = Audit(LocalStore(root), checkpoint_name(1), lambda _: None)
    audit.run()
    assert audit.problems == []


@pytest.mark.parametrize("dtype", [torch.bfloat16], ids=str)
@all_behaviours(LANES_LAST, DEFAULT_LAST, GPU_WITH_PAUSES)
def test_hf_of_weights_on_the_device_has_their_values(tmp_path, dtype, behaviour):
    run_ranks(1, _saves_hf_of_what_there_was, dtype, behaviour, tmp_path, device=behaviour.kind)


def _steps_while_the_disk_does_nothing(
    moments: torch.dtype, behaviour: Behaviour, root: Path
) -> None:
    training, store = Training(moments), GatedStore(root)
    training.step(1)
    expected = training.values()
    assert sum(values.nbytes for values in expected.values()) > 4 * BLOCK_BYTES
    with pytest.MonkeyPatch.context() as patch, behaviour.applied():
        # The buffers are too small for the states.
        patch.setattr(
            manager_module,
            "BufferPool",
            lambda *args, **named: BufferPool(*args, 2, BLOCK_BYTES, **named),
        )
        with CheckpointManager(
            store, Device(behaviour.kind), 0, 1, "abcd", staging_share=0.5
        ) as manager:
            manager.save(1, training.contents(), {})
            stepping = threading.Thread(target=training.step, args=(2,))
            stepping.start()
            stepping.join(600)
            assert not stepping.is_alive()
            assert not root.joinpath(checkpoint_name(1)).exists()
            store.gate.set()
            manager.finish()
    assert wrong_in(root, 1, expected) == []


@pytest.mark.parametrize("moments", MOMENTS)
@these_behaviours(DEFAULT_LAST, GPU_WITH_PAUSES)
def test_a_step_waits_until_states_are_in_host_memory_and_for_no_disk(tmp_path, moments, behaviour):
    run_ranks(
        1,
        _steps_while_the_disk_does_nothing,
        MOMENTS[moments],
        behaviour,
        tmp_path / "saved",
        device=behaviour.kind,
    )


def _loads_on_this_threads_stream(behaviour: Behaviour, root: Path) -> None:
    model = nn.Linear(300, 500).to(rank_device())
    saved = model.weight.detach().cpu()
    with CheckpointManager(LocalStore(root), Device(behaviour.kind), 0, 1, "abcd") as manager:
        manager.save(1, collect(model), {})
        manager.finish()
    checkpoint = PublishedCheckpoint.open(LocalStore(root), checkpoint_name(1))

    with torch.no_grad(), behaviour.applied():
        model.weight.zero_()
        torch.accelerator.synchronize()
        stream = torch.Stream(behaviour.kind)
        with stream:
            before = model.weight + 1
            contents = collect(model)
            load_entries(checkpoint, contents, check_contents(checkpoint, contents))
            after = model.weight + 1
        stream.synchronize()

    assert torch.equal(before.cpu(), torch.ones(500, 300)), (
        "issued before the load, whatever it wrote when"
    )
    assert torch.equal(after.cpu(), saved + 1)


@these_behaviours(LANES_LAST, GPU_WITH_PAUSES)
def test_a_load_writes_in_the_order_of_the_stream_on_which_this_thread_works(tmp_path, behaviour):
    run_ranks(1, _loads_on_this_threads_stream, behaviour, tmp_path, device=behaviour.kind)
