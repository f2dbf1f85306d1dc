"""Documents in a row, learned in part, on the simulated accelerator: the CPU's numbers, one wait a
step, and the same bits wherever states and activations lie. The simulator has no convolution, so no
delta nets are among the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.behaviours import LANES_LAST, Behaviour, all_behaviours

pytestmark = pytest.mark.sim

STEPS = 3
VOCABULARY, BATCH, SEQ = 64, 2, 16
LENGTHS = ((5, 11, 16), (1, 7, 8, 10, 6), (16, 16))  # of each step
ON_DEVICE, ON_HOST, ACTIVATIONS = "on the device", "on the host", "activations, too"


def _course(
    kind: str, where: str, count_waits: Callable[[], int] = int
) -> tuple[list[float], list[Any], int]:
    """The losses, the weights, and by how much `count_waits()` grew in the last step."""
    import torch
    import torch.distributed as dist

    from megatron.core.device import Device
    from megatron.core.distributed.config import DataParallelConfig
    from megatron.core.layer_execution import ExecutionConfig
    from megatron.core.mesh import build_mesh
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.optimizer.config import OptimizerConfig
    from megatron.core.optimizer.lr_schedule import LRScheduleConfig
    from megatron.core.transformer.config import TransformerConfig
    from megatron.core.transformer.documents import Documents
    from megatron.training.engines import EngineConfig, MegatronEngine

    is_offloaded = where != ON_DEVICE
    execution = ExecutionConfig()
    if where == ACTIVATIONS:
        execution = ExecutionConfig(
            activation_offload=True, activation_offload_gib=1e-3, activation_offload_min_kib=0.25
        )
    config = EngineConfig(
        OptimizerConfig(
            optimizer_cpu_offload=is_offloaded, overlap_cpu_optimizer_d2h_h2d=is_offloaded
        ),
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        DataParallelConfig(main_grads_dtype="bf16"),
        train_iters=STEPS,
        execution=execution,
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = MegatronEngine(
        config, Device.for_rank(kind, rank, world_size), build_mesh(kind, world_size)
    )
    model_config = TransformerConfig(
        num_layers=4,
        hidden_size=32,
        num_attention_heads=2,
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    engine.initialize(lambda: GPTModel(model_config, VOCABULARY))

    def forward_step(model: Any, batch: dict[str, Any]) -> torch.Tensor:
        loss: torch.Tensor = model(
            batch["tokens"],
            batch["labels"],
            documents=Documents(batch["lengths"]),
            loss_weights=batch["weights"],
        ).loss
        return loss

    generator = torch.Generator().manual_seed(rank)
    losses, waits = [], 0
    for step in range(STEPS):
        tokens = torch.randint(VOCABULARY, (BATCH, SEQ), generator=generator)
        # Every third token is learned.
        weights = (torch.arange(BATCH * SEQ) % 3 == 0).float().view(BATCH, SEQ)
        batch = {"tokens": tokens, "labels": tokens.roll(-1, 1), "weights": weights / weights.sum()}
        if kind == "sim":
            # As the loader gives them: a copy of pageable memory blocks.
            batch = {name: value.pin_memory() for name, value in batch.items()}
        before = count_waits()
        losses.append(engine.train_batch([{**batch, "lengths": LENGTHS[step]}], forward_step).loss)
        waits = count_waits() - before

    engine.state.optimizer.synchronize()
    if where == ACTIVATIONS:
        assert engine.activations is not None
        assert engine.activations.peak_nbytes > 0
    own = [one.detach().to_local().cpu().tolist() for one in engine.model.parameters()]
    return losses, own, waits


def _on_device(behaviour: Behaviour) -> list[Any]:
    import tests.simulated_accelerator.device as sim

    def waits_of_main_thread() -> int:
        return sim.syncs_by_thread().get("MainThread", 0)

    with behaviour.applied():
        return [
            _course("sim", where, waits_of_main_thread)
            for where in (ON_DEVICE, ON_HOST, ACTIVATIONS)
        ]


@all_behaviours(LANES_LAST)
def test_documents_train_as_on_the_cpu_wherever_states_and_activations_lie(
    behaviour: Behaviour,
) -> None:
    expected, _, _ = run_ranks(2, _course, "cpu", ON_DEVICE)[0]
    assert len(set(expected)) == STEPS
    for courses in run_ranks(2, _on_device, behaviour, device="sim"):
        on_device, *others = courses
        assert all(other[:2] == on_device[:2] for other in others), "to the bit"
        assert on_device[0] == pytest.approx(expected, rel=1e-5)
        assert [waits for _, _, waits in courses] == [1, 1, 1], "the host waits once a step"
