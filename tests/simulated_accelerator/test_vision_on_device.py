"""A model that reads images, on the simulated accelerator: the CPU numbers, one wait a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.behaviours import LANES_LAST, Behaviour, all_behaviours

pytestmark = pytest.mark.sim

STEPS = 3


def _course(
    kind: str, is_offloaded: bool, is_frozen: bool, count_waits: Callable[[], int] = int
) -> tuple[list[float], list[Any], int]:
    """The losses, the weights, and by how much `count_waits()` grew in the last step."""
    import torch
    import torch.distributed as dist

    from megatron.core.device import Device
    from megatron.core.distributed.config import DataParallelConfig
    from megatron.core.mesh import build_mesh
    from megatron.core.models.multimodal.vision_language_model import Images
    from megatron.core.optimizer.config import OptimizerConfig
    from megatron.core.optimizer.lr_schedule import LRScheduleConfig
    from megatron.core.parts import freeze
    from megatron.core.transformer.documents import Documents
    from megatron.training.engines import EngineConfig, MegatronEngine
    from tests.unit_tests.core.models.multimodal.helpers.their_images import GRIDS, image_batch
    from tests.unit_tests.core.models.multimodal.helpers.vision_models import build

    rank = dist.get_rank()
    parallel = DataParallelConfig(main_grads_dtype="bf16")
    config = EngineConfig(
        OptimizerConfig(
            optimizer_cpu_offload=is_offloaded,
            overlap_cpu_optimizer_d2h_h2d=is_offloaded,
            lr_multipliers=("vision=0.5",),
        ),
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        parallel,
        train_iters=STEPS,
    )
    device = Device.for_rank(kind, rank, dist.get_world_size())
    engine = MegatronEngine(config, device, build_mesh(kind, dist.get_world_size()))

    def make() -> Any:
        model = build()
        freeze(model, ["vision"] if is_frozen else [], "--freeze")
        return model

    def forward_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        losses: torch.Tensor = model(
            batch["tokens"],
            batch["labels"],
            images=Images(batch["patches"], batch["grids"]),
            positions=batch["positions"],
            documents=Documents(batch["lengths"]),
        )
        return losses.mean()

    engine.initialize(make)
    losses, waits = [], 0
    own = image_batch(GRIDS[rank : rank + 1])
    length = own.tokens.shape[1]
    batch = {
        "tokens": own.tokens,
        "labels": own.tokens.roll(-1, 1),
        "positions": own.positions,
        "patches": own.images.patches,
        "grids": own.images.grids,
        # One place behind the images begins another document.
        "lengths": (length - 1, 1),
    }
    if kind == "sim":
        # As the loader gives them: a copy of pageable memory blocks.
        batch = {
            name: value.pin_memory() if torch.is_tensor(value) else value
            for name, value in batch.items()
        }
    for _ in range(STEPS):
        before = count_waits()
        losses.append(engine.train_batch([batch], forward_step).loss)
        waits = count_waits() - before
    engine.state.optimizer.synchronize()
    weights = [
        one.detach().to_local().cpu().tolist() if hasattr(one, "to_local") else one.cpu().tolist()
        for one in engine.model.parameters()
    ]
    return losses, weights, waits


def _on_device(behaviour: Behaviour, is_frozen: bool) -> list[Any]:
    import tests.simulated_accelerator.device as sim

    def waits_of_main_thread() -> int:
        return sim.syncs_by_thread().get("MainThread", 0)

    with behaviour.applied():
        return [
            _course("sim", is_offloaded, is_frozen, waits_of_main_thread)
            for is_offloaded in (False, True)
        ]


@pytest.mark.parametrize("is_frozen", [False, True])
@all_behaviours(LANES_LAST)
def test_a_vision_language_model_trains_as_on_the_cpu_wherever_its_states_lie(
    behaviour: Behaviour, is_frozen: bool
) -> None:
    expected, _, _ = run_ranks(2, _course, "cpu", False, is_frozen)[0]
    assert len(set(expected)) == STEPS
    for on_device, offloaded in run_ranks(2, _on_device, behaviour, is_frozen, device="sim"):
        assert offloaded[:2] == on_device[:2], "to the bit"
        assert on_device[0] == pytest.approx(expected, rel=1e-5)
        assert (on_device[2], offloaded[2]) == (1, 1), "the host waits once a step"
