"""Small models in every configuration of the engine, for the stages of one and of two ranks."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from megatron.core.distributed.config import DataParallelConfig
from megatron.core.layer_execution import ExecutionConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.engines import EngineConfig, ModuleEngine, build_engine
from megatron.training.model_loss import mean_of_all
from megatron.training.step import Batch
from tools.gpu_check.accelerator import Accelerator

_VOCABULARY = 128
_SEED = 7
_LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Configuration:
    """One way to run the engine.

    Attributes:
        family: configurations of one family give the same bits; empty: this one is alone.
        num_syncs: that a step of it may take; None: as many as it likes.
        reuses_memory: whether it takes no new memory from the device after a few steps.
    """

    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: DataParallelConfig = field(default_factory=DataParallelConfig)
    compute_dtype: str = "bf16"
    model: dict[str, Any] = field(default_factory=dict)
    execution: ExecutionConfig = ExecutionConfig()
    family: str = ""
    num_syncs: int | None = 1
    reuses_memory: bool = True

    @property
    def least_ranks(self) -> int:
        return self.parallel.num_distributed_optimizer_instances


def _offloaded(
    fraction: float, *, overlaps_forward: bool = False, **options: Any
) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer_cpu_offload=True,
        overlap_cpu_optimizer_d2h_h2d=True,
        optimizer_offload_fraction=fraction,
        overlap_optimizer_with_forward=overlaps_forward,
        **options,
    )


def _strategy(name: str, grads: str = "fp32") -> DataParallelConfig:
    return DataParallelConfig(data_parallel_sharding_strategy=name, main_grads_dtype=grads)


def _hybrid(outer: str = "no_shard", grads: str = "fp32") -> DataParallelConfig:
    return DataParallelConfig(
        num_distributed_optimizer_instances=2,
        outer_dp_sharding_strategy=outer,
        main_grads_dtype=grads,
    )


# Half of the bytes that cross the link.
_BF16_GRADS = DataParallelConfig(main_grads_dtype="bf16")
_LOW_PRECISION = OptimizerConfig(exp_avg_dtype="fp16", exp_avg_sq_dtype="fp16")
_FSDP2 = DataParallelConfig(use_torch_fsdp2=True)

# The dtype of main gradients changes bits, so there are families for fp32 and for bf16 ones: each
# with states on the device and in host memory, which must make no difference.
_ACTIVATIONS = ExecutionConfig(
    activation_offload=True, activation_offload_gib=0.25, activation_offload_min_kib=0.5
)

CONFIGURATIONS: dict[str, Configuration] = {
    "zero3": Configuration(family="device"),
    "zero3_keep": Configuration(
        parallel=DataParallelConfig(megatron_fsdp_reshard_after_forward=False), family="device"
    ),
    "zero2": Configuration(parallel=_strategy("optim_grads"), family="device"),
    "zero1": Configuration(parallel=_strategy("optim"), family="device"),
    "no_shard": Configuration(parallel=_strategy("no_shard"), family="device"),
    "hsdp": Configuration(parallel=_hybrid(), family="device"),
    "hfsdp": Configuration(parallel=_hybrid("optim"), family="device"),
    "recompute": Configuration(model={"recompute_granularity": "full"}, family="device"),
    "selective": Configuration(model={"recompute_granularity": "selective"}, family="device"),
    "activations": Configuration(execution=_ACTIVATIONS, family="device"),
    "activations_recompute": Configuration(
        model={"recompute_granularity": "full"}, execution=_ACTIVATIONS, family="device"
    ),
    "zero3_fp32": Configuration(compute_dtype="fp32", family="fp32"),
    "zero1_fp32": Configuration(parallel=_strategy("optim"), compute_dtype="fp32", family="fp32"),
    "offload_fp32_grads": Configuration(_offloaded(0.5), family="device"),
    "zero3_bf16_grads": Configuration(parallel=_BF16_GRADS, family="offload"),
    "offload_all": Configuration(_offloaded(1.0), parallel=_BF16_GRADS, family="offload"),
    "offload_half": Configuration(_offloaded(0.5), parallel=_BF16_GRADS, family="offload"),
    "offload_forward": Configuration(
        _offloaded(1.0, overlaps_forward=True), parallel=_BF16_GRADS, family="offload"
    ),
    "offload_forward_half": Configuration(
        _offloaded(0.5, overlaps_forward=True), parallel=_BF16_GRADS, family="offload"
    ),
    "offload_forward_activations": Configuration(
        _offloaded(1.0, overlaps_forward=True),
        parallel=_BF16_GRADS,
        execution=_ACTIVATIONS,
        family="offload",
    ),
    "offload_zero1": Configuration(
        _offloaded(0.5, overlaps_forward=True),
        parallel=_strategy("optim", "bf16"),
        family="offload",
    ),
    "zero1_bf16_grads": Configuration(parallel=_strategy("optim", "bf16"), family="offload"),
    "offload_hsdp": Configuration(
        _offloaded(1.0, overlaps_forward=True), parallel=_hybrid(grads="bf16"), family="offload"
    ),
    "hsdp_bf16_grads": Configuration(parallel=_hybrid(grads="bf16"), family="offload"),
    # In order, the thread that trains waits for every copy.
    "offload_inline": Configuration(
        OptimizerConfig(optimizer_cpu_offload=True),
        parallel=_BF16_GRADS,
        family="offload",
        num_syncs=None,
    ),
    # Copies to pageable memory are waited for where they are issued.
    "offload_unpinned": Configuration(
        _offloaded(1.0, pin_cpu_grads=False, pin_cpu_params=False),
        parallel=_BF16_GRADS,
        family="offload",
        num_syncs=None,
    ),
    "fsdp2": Configuration(parallel=_FSDP2, num_syncs=None, reuses_memory=False),
    "offload_fsdp2": Configuration(
        _offloaded(0.5), parallel=_FSDP2, num_syncs=None, reuses_memory=False
    ),
    "fp16_moments": Configuration(_LOW_PRECISION),
    "fp16": Configuration(OptimizerConfig(initial_loss_scale=2.0**12), compute_dtype="fp16"),
}


class Step(NamedTuple):
    """What one step was seen to do."""

    loss: str  # exact, in hexadecimal
    grad_norm: str
    syncs: tuple[str, ...]  # where the main thread waited for the device
    new_segments: int


class Trained(NamedTuple):
    """What a configuration came to."""

    steps: list[Step]
    weights: str  # the digest of all weights of this rank

    @property
    def bits(self) -> list[str]:
        """What must be the same in every run: each step's loss and norm, and the final weights."""
        return [*(f"{step.loss} {step.grad_norm}" for step in self.steps), self.weights]


class Sizes(NamedTuple):
    """The sizes of a model and its batches: tiny on the simulated accelerator, small on a GPU."""

    num_layers: int = 4
    hidden: int = 256
    heads: int = 4
    sequence: int = 128
    micro_batch: int = 2
    num_microbatches: int = 3
    num_steps: int = 6


# Every collective of ranks that share a GPU waits for the device to turn from one process to the
# other.
TWO_RANKS_SIZES = Sizes(num_layers=2, num_microbatches=2, num_steps=5)
SIMULATED_SIZES = Sizes(
    num_layers=2, hidden=32, heads=2, sequence=8, num_microbatches=2, num_steps=5
)
NUM_FIRST_STEPS = 3  # in which memory may be taken from the device


def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The mean loss of a microbatch."""
    labels = batch["labels"]
    loss: torch.Tensor = model(batch["tokens"], labels, loss_weights=mean_of_all(labels)).loss
    return loss


def build(
    accelerator: Accelerator,
    configuration: Configuration,
    sizes: Sizes,
    num_ranks: int,
    **options: Any,
) -> ModuleEngine:
    """An engine with a model of these sizes and the same weights in every configuration."""
    model = TransformerConfig(
        num_layers=sizes.num_layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        swiglu=True,
        normalization="RMSNorm",
        **configuration.model,
    )
    config = EngineConfig(
        configuration.optimizer,
        LRScheduleConfig(lr=_LEARNING_RATE, lr_decay_style="constant"),
        configuration.parallel,
        train_iters=99,
        compute_dtype=configuration.compute_dtype,
        execution=configuration.execution,
        **options,
    )
    mesh = build_mesh(accelerator.device.kind, num_ranks)
    engine = build_engine(config, accelerator.device, mesh, num_local_ranks=num_ranks)
    torch.manual_seed(_SEED)
    engine.initialize(lambda: GPTModel(model, _VOCABULARY))
    return engine


def batches(sizes: Sizes, rank: int) -> Iterator[list[Batch]]:
    """A rank's global batches, in pinned memory, without end."""
    generator = torch.Generator().manual_seed(rank)
    shape = (sizes.micro_batch * sizes.num_microbatches, sizes.sequence + 1)
    while True:
        text = torch.randint(_VOCABULARY, shape, generator=generator)
        yield [
            {
                "tokens": part[:, :-1].contiguous().pin_memory(),
                "labels": part[:, 1:].contiguous().pin_memory(),
            }
            for part in text.split(sizes.micro_batch)
        ]


def train(
    accelerator: Accelerator,
    configuration: Configuration,
    sizes: Sizes,
    *,
    rank: int = 0,
    num_ranks: int = 1,
    pauses: AbstractContextManager[None] | None = None,
) -> Trained:
    """Trains for a few steps, with an evaluation in between, and looks at each step."""
    engine = build(accelerator, configuration, sizes, num_ranks)
    source = batches(sizes, rank)
    steps = []
    with pauses or nullcontext():
        for number in range(sizes.num_steps):
            batch = next(source)
            before = accelerator.num_segments()
            with accelerator.counting_syncs() as syncs:
                result = engine.train_batch(batch, forward_step)
            new = accelerator.num_segments() - before
            steps.append(Step(result.loss.hex(), result.grad_norm.hex(), tuple(syncs), new))
            if number == 0:
                # It takes memory of its own, so it comes early among the steps that may.
                engine.eval_batch(batch, forward_step)
        engine.state.optimizer.synchronize()
        accelerator.synchronize()
    return Trained(steps, digest(engine.model))


def digest(model: nn.Module) -> str:
    """A digest of the bits of this rank's weights."""
    found = hashlib.sha256()
    for name, parameter in sorted(model.named_parameters()):
        local = parameter.detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        found.update(name.encode())
        found.update(local.reshape(-1).cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()
