"""Loading writes into the states' memory, without a second copy of them."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.dtensors import local_tensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.live_bytes import Live, peak_growth
from tests.unit_tests.core.dist_checkpointing.helpers.models import Setting, Trained, moments

_M_MMAP_THRESHOLD = -3  # of mallopt; see malloc.h


@contextmanager
def nothing_kept_for_later() -> Iterator[None]:
    """Returns freed memory to the system at once, so that the resident size is the used size."""
    ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 64 << 10)
    try:
        yield
    finally:
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, 32 << 20)  # to which it may grow by itself


class Peaks(NamedTuple):
    """Bytes, on one rank."""

    state: int
    bucket: int  # a layer's weights and moments
    loading: int
    copying: int  # of a load that reads everything before it puts it into place


def _wide_gpt() -> GPTModel:
    config = TransformerConfig(
        num_layers=4,
        hidden_size=384,
        num_attention_heads=4,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )
    with torch.device("meta"):
        return GPTModel(config, 512)


def _load_measured(root: str, setting: Setting) -> Peaks:
    trained = Trained(setting, seed=0, model=_wide_gpt())
    trained.step(0)
    trained.save(root)
    held = dict(trained.model.named_parameters())
    states = trained.optimizer.optimizer.state
    state = sum(
        local_tensor(tensor).nbytes for p in held.values() for tensor in (p, *states[p].values())
    )
    bucket = (
        3 * 4 * sum(local_tensor(p).numel() for name, p in held.items() if ".layers.0." in name)
    )
    with nothing_kept_for_later():
        loading = peak_growth(lambda: trained.load(root))
        tensors = [t for p in held.values() for t in (p, *states[p].values())]
        copying = peak_growth(lambda: [local_tensor(tensor).clone() for tensor in tensors])
    dist.barrier()
    return Peaks(state, bucket, loading, copying)


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    "setting",
    [Setting(), Setting("no_shard", 0.5, compute_dtype=torch.bfloat16)],
    ids=str,
)
def test_loading_takes_no_more_memory_than_a_bucket(tmp_path, setting):
    for peaks in run_ranks(2, _load_measured, str(tmp_path), setting):
        assert peaks.state > 2 * peaks.bucket > 20e6
        assert peaks.loading <= peaks.bucket
        assert peaks.copying > 1.2 * peaks.bucket, "a copy of everything would be seen"


def _load_scaled(root: str, setting: Setting) -> tuple[int, int, int]:
    """Bytes: the peak, the largest tensor in fp32, a layer's weights and moments as stored."""
    trained = Trained(setting, seed=0, model=_wide_gpt())
    trained.step(0)
    trained.save(root)
    states = trained.optimizer.optimizer.state
    layer = [p for name, p in trained.model.named_parameters() if ".layers.0." in name]
    with Live() as live:
        trained.load(root)
    dist.barrier()
    bucket = sum(local_tensor(tensor).nbytes for p in layer for tensor in (p, *states[p].values()))
    return live.peak, max(4 * local_tensor(p).numel() for p in layer), bucket


def test_states_with_a_scale_are_loaded_one_at_a_time(tmp_path):
    # Counted by tensors, since the allocator keeps some of the freed memory.
    setting = Setting(optimizer=moments("fp8", "fp16"))
    for peak, largest, bucket in run_ranks(2, _load_scaled, str(tmp_path), setting):
        assert largest < peak <= bucket
