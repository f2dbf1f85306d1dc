"""Packed documents, also in sequences that ranks divide, and a model that reads images, on the
simulated accelerator: the numbers of the CPU, one wait a step, and the same bits wherever states
and activations are. The simulator has no convolution, so no delta nets are among the layers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import A2A, ALL_GATHER, DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import Images
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.parts import freeze
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.behaviours import LANES_LAST, Behaviour, all_behaviours
from tests.unit_tests.core.models.multimodal.helpers import vision_models
from tests.unit_tests.core.models.multimodal.helpers.their_images import GRIDS, image_batch

pytestmark = pytest.mark.sim

STEPS = 2
VOCABULARY, BATCH, SEQ = 64, 2, 16
LENGTHS = ((5, 11, 16), (1, 7, 8, 10, 6))  # of the documents of each step
FROZEN = "images, frozen"
ON_DEVICE, ON_HOST, ACTIVATIONS = "on the device", "on the host", "activations, too"

Batch = dict[str, Any]


class Case(NamedTuple):
    """A model, its batch of a step on this rank, its forward pass, how many ranks divide each
    sequence, and what these ranks exchange.
    """

    build: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    forward_step: Callable[[nn.Module, Batch], torch.Tensor]
    context_size: int = 1
    comm_type: str = A2A

    @property
    def has_images(self) -> bool:
        return self.batch is _images_batch


def _documents_model() -> nn.Module:
    dropout = {"attention_dropout": 0.0, "hidden_dropout": 0.0}
    return GPTModel(TransformerConfig(4, 32, 2, **dropout), VOCABULARY)


def _documents_batch(step: int, rank: int | None = None) -> Batch:
    rank = dist.get_rank() if rank is None else rank
    generator = torch.Generator().manual_seed(10 * step + rank)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ), generator=generator)
    # Every third token is learned.
    weights = (torch.arange(BATCH * SEQ) % 3 == 0).float().view(BATCH, SEQ)
    return {
        "tokens": tokens,
        "labels": tokens.roll(-1, 1),
        "weights": weights / weights.sum(),
        "lengths": LENGTHS[step],
    }


def _documents_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    documents = Documents(batch["lengths"])
    return model(
        batch["tokens"], batch["labels"], documents=documents, loss_weights=batch["weights"]
    ).loss


def _frozen_vision_model() -> nn.Module:
    model = vision_models.build()
    freeze(model, ["vision"], "--freeze")
    return model


def _images_batch(_: int) -> Batch:
    rank = dist.get_rank()
    own = image_batch(GRIDS[rank : rank + 1])
    return {
        "tokens": own.tokens,
        "labels": own.tokens.roll(-1, 1),
        "positions": own.positions,
        "patches": own.images.patches,
        "grids": own.images.grids,
        # The token after the images starts another document.
        "lengths": (own.tokens.shape[1] - 1, 1),
    }


def _images_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(
        batch["tokens"],
        batch["labels"],
        images=Images(batch["patches"], batch["grids"]),
        positions=batch["positions"],
        documents=Documents(batch["lengths"]),
    ).mean()


_DIVIDED = Case(
    _documents_model, partial(_documents_batch, rank=0), _documents_step, context_size=2
)
CASES = {
    "documents": Case(_documents_model, _documents_batch, _documents_step),
    "documents, divided": _DIVIDED,
    "documents, divided and gathered": _DIVIDED._replace(comm_type=ALL_GATHER),
    "images": Case(vision_models.build, _images_batch, _images_step),
    FROZEN: Case(_frozen_vision_model, _images_batch, _images_step),
}


def _course(
    name: str, kind: str, where: str, count_waits: Callable[[], int] = int
) -> tuple[list[float], list[Any], int]:
    """The losses, the weights, and by how much `count_waits()` grew in the last step."""
    case, is_offloaded = CASES[name], where != ON_DEVICE
    execution = ExecutionConfig()
    if where == ACTIVATIONS:
        execution = ExecutionConfig(
            activation_offload=True, activation_offload_gib=1e-3, activation_offload_min_kib=0.25
        )
    config = EngineConfig(
        OptimizerConfig(
            optimizer_cpu_offload=is_offloaded,
            overlap_cpu_optimizer_d2h_h2d=is_offloaded,
            lr_multipliers=("vision=0.5",) if case.has_images else (),
        ),
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        # By default accelerators would add fp32 gradients up before they are rounded.
        DataParallelConfig(
            main_grads_dtype="bf16",
            megatron_fsdp_grad_comm_dtype="bf16",
            context_parallel_size=case.context_size,
            cp_comm_type=case.comm_type,
        ),
        train_iters=STEPS,
        execution=execution,
    )
    rank, world_size = dist.get_rank(), dist.get_world_size()
    engine = MegatronEngine(
        config, Device.for_rank(kind, rank, world_size), build_mesh(kind, world_size)
    )
    engine.initialize(case.build)

    losses, waits = [], 0
    for step in range(STEPS):
        batch = case.batch(step)
        if kind == "sim":
            # Like the loader's batches: a copy of pageable memory would block.
            batch = {
                key: value.pin_memory() if torch.is_tensor(value) else value
                for key, value in batch.items()
            }
        before = count_waits()
        losses.append(engine.train_batch([batch], case.forward_step).loss)
        waits = count_waits() - before

    engine.state.optimizer.synchronize()
    if where == ACTIVATIONS:
        assert engine.activations is not None
        assert engine.activations.peak_nbytes > 0
    parameters = [parameter.detach() for parameter in engine.model.parameters()]
    own = [p.to_local() if hasattr(p, "to_local") else p for p in parameters]
    return losses, [each.cpu().tolist() for each in own], waits


def _on_device(name: str, behaviour: Behaviour) -> list[Any]:
    import tests.simulated_accelerator.device as sim

    def waits_of_main_thread() -> int:
        return sim.syncs_by_thread().get("MainThread", 0)

    places = [ON_DEVICE, ON_HOST, *([] if CASES[name].has_images else [ACTIVATIONS])]
    with behaviour.applied():
        return [_course(name, "sim", where, waits_of_main_thread) for where in places]


@pytest.mark.parametrize(
    "name",
    [
        "documents",
        "documents, divided",
        "documents, divided and gathered",
        "images",
        pytest.param("images, frozen", marks=pytest.mark.wide),
    ],
)
@all_behaviours(LANES_LAST)
def test_a_model_trains_as_on_the_cpu_wherever_its_states_are(
    behaviour: Behaviour, name: str
) -> None:
    expected, _, _ = run_ranks(2, _course, name, "cpu", ON_DEVICE)[0]
    assert len(set(expected)) == STEPS
    for courses in run_ranks(2, _on_device, name, behaviour, device="sim"):
        on_device, *others = courses
        assert all(other[:2] == on_device[:2] for other in others), "to the bit"
        assert on_device[0] == pytest.approx(expected, rel=1e-5)
        assert {waits for _, _, waits in courses} == {1}, "the host waits once a step"
