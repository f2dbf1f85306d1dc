"""`--optimizer-offload-fraction auto` on devices with little memory: the same losses at every
fraction, less memory in use, and a run that resumes at another fraction.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import Device, reserve_of
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import BatchSizes, EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from megatron.training.step_memory import at_fraction, fractions_of, memory_of
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.engines import batches, forward_step

pytestmark = pytest.mark.sim

MODEL = TransformerConfig(
    4, 64, 2, swiglu=True, normalization="RMSNorm", attention_dropout=0.0, hidden_dropout=0.0
)
CONFIG = EngineConfig(
    OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        optimizer_offload_fraction="auto",
    ),
    LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
    DataParallelConfig(main_grads_dtype="bf16"),
    train_iters=99,
    compute_dtype="bf16",
    batch=BatchSizes(2, 16, 8),
)


class Course(NamedTuple):
    fraction: float
    losses: list[float]
    peak: int


def _model() -> GPTModel:
    return GPTModel(MODEL, 64)


def _limits(world_size: int) -> list[int]:
    """The least bytes of each rank's device that can be planned, for each fraction."""
    with torch.device("meta"):
        model = _model()
    return [
        memory_of(model, at_fraction(CONFIG, fraction), world_size, "sim").device_nbytes
        for fraction in fractions_of(model, CONFIG)
    ]


def _engine(limits: list[int]) -> ModuleEngine:
    """An engine on devices where these bytes can be planned, by rank."""
    import tests.simulated_accelerator.device as sim

    device = Device.for_rank("sim", dist.get_rank(), dist.get_world_size())
    mesh = build_mesh("sim", dist.get_world_size())
    with sim.configured(memory_bytes=limits[dist.get_rank()] + reserve_of(0)):
        engine = build_engine(CONFIG, device, mesh, num_local_ranks=dist.get_world_size())
        engine.initialize(_model)
    return engine


def _train(engine: ModuleEngine, steps: range) -> Course:
    torch.sim.reset_peak_memory_stats()  # type: ignore[attr-defined]
    losses = [engine.train_batch(batches(step, "sim"), forward_step).loss for step in steps]
    engine.state.optimizer.synchronize()
    fraction = engine.config.optimizer.offload_fraction
    return Course(fraction, losses, engine.device.peak_memory_bytes())


def _course(limits: list[int]) -> Course:
    return _train(_engine(limits), range(3))


def _chosen(limits: list[int]) -> float:
    return _engine(limits).config.optimizer.offload_fraction


def _resumed(folder: str, before: list[int], after: list[int]) -> tuple[Course, Course]:
    """Steps at one fraction, then, in another engine from a checkpoint, at another one."""
    engine = _engine(before)
    first = _train(engine, range(2))
    engine.save(SaveLoadMeta(folder, with_optim=True))
    del engine
    resumed = _engine(after)
    resumed.load(SaveLoadMeta(folder, with_optim=True))
    return first, _train(resumed, range(2, 3))


def test_less_memory_is_a_larger_fraction_and_the_same_losses() -> None:
    limits = _limits(2)
    found = [run_ranks(2, _course, [limit, limit], device="sim") for limit in limits[::2]]
    for one, other in found:
        assert (one.fraction, one.losses) == (other.fraction, other.losses)
    courses = [one for one, _ in found]
    fractions = [course.fraction for course in courses]
    assert fractions == sorted(set(fractions))
    assert fractions[0] == 0.0
    assert [course.losses for course in courses] == [courses[0].losses] * len(courses)
    peaks = [course.peak for course in courses]
    assert peaks == sorted(peaks, reverse=True)
    assert len(set(peaks)) == len(peaks), "what is planned to go is gone"


def test_the_fullest_device_decides_for_all_ranks() -> None:
    limits = _limits(2)
    for own in ([limits[0], limits[3]], [limits[3], limits[0]]):
        found = run_ranks(2, _chosen, own, device="sim")
        assert found == run_ranks(2, _chosen, [limits[3]] * 2, device="sim")
        assert found[0] == found[1] > 0


def test_a_run_resumes_at_the_fraction_of_the_memory_that_is_there(tmp_path: Path) -> None:
    limits = _limits(2)
    ((first, second), _) = run_ranks(
        2, _resumed, str(tmp_path / "one"), [limits[1]] * 2, [limits[-1]] * 2, device="sim"
    )
    (whole, _) = run_ranks(2, _course, [limits[0]] * 2, device="sim")
    assert 0 < first.fraction < second.fraction == 1.0
    assert first.losses + second.losses == whole.losses
