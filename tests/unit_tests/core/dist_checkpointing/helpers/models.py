"""Small GPTs and optimizers in every setting that a checkpoint must not depend on, with their full
tensors.

    # On all ranks together:
    trained = Trained(Setting("hsdp", fraction=0.5, is_fused=False), seed=0)
    losses = [trained.step(number) for number in range(3)]
    trained.save(root)
    expected = full_tensors(trained)                                           # by canonical key

`full_tensors` gathers a run's tensors with the engine's collectives, and names them by a table in
this file. It does not use the arithmetic of checkpoints.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from megatron.core.device import Device
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.entries import Contents
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import Store, open_store
from megatron.core.distributed import megatron_fsdp
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.dtensors import local_tensor
from megatron.core.materialize import seeded_reset
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import (
    build_optimizer,
    plan_offload,
)
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.scaled_states import is_scaled
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import Linear
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.spec import AttentionSpec, DenseSpec
from tests.helpers.checkpoints import install_param_groups

HSDP, HFSDP = "hsdp", "hfsdp"  # on four ranks, 2 x 2
ITERATION = 2  # that is saved
DELAY = 0.1  # seconds by which an operation is delayed, to detect code that does not wait for it
VOCAB = 61  # rows that no number of ranks divides
NUM_SEQUENCES = 12  # of a step, so that 1, 2, 3 and 4 ranks have equally many
SEQUENCE_LENGTH = 8
DEVICE = Device("cpu")

# The sections of each fused layer in a checkpoint, in the order of the rows.
SECTIONS = {"linear_qkv": ("query", "key", "value"), "linear_fc1": ("gate", "up")}


def moments(exp_avg: str, exp_avg_sq: str) -> tuple[tuple[str, Any], ...]:
    """Fields of OptimizerConfig for the dtypes of Adam's states."""
    return (
        ("exp_avg_dtype", exp_avg),
        ("exp_avg_sq_dtype", exp_avg_sq),
    )


class Setting(NamedTuple):
    """Settings that a checkpoint must not depend on, except `is_tied` and the optimizer."""

    strategy: str = "optim_grads_params"
    fraction: float | None = None  # that is offloaded; None: an optimizer without offloading
    is_fused: bool = True
    is_tied: bool = True
    compute_dtype: torch.dtype = torch.float32
    optimizer: tuple[tuple[str, Any], ...] = ()  # further fields of OptimizerConfig
    expert_size: int | None = None  # of a model with experts; None: it has none

    def __str__(self) -> str:
        parts = [self.strategy, f"offload={self.fraction}", "fused" if self.is_fused else "unfused"]
        parts += [
            "tied" if self.is_tied else "untied",
            str(self.compute_dtype).removeprefix("torch."),
        ]
        if self.expert_size is not None:
            parts.append(f"ep{self.expert_size}")
        return "-".join([*parts, *(f"{name}={value}" for name, value in self.optimizer)])


@dataclass(frozen=True)
class _Apart:
    """Layers instead of a fused one."""

    layers: tuple[Linear, ...]

    def __call__(self, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(layer(hidden) for layer in self.layers)

    def split(self, outputs: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        return outputs


class UnfusedAttention(SelfAttention):
    """Has layers `query`, `key` and `value` next to `linear_proj`."""

    def __init__(self, spec: AttentionSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size, init_std=0.02, output_init_std=0.02)
        sections = self.linear_qkv.fused.sections
        del self.linear_qkv
        layers = tuple(Linear(hidden_size, rows, spec.has_qkv_bias) for _, rows in sections)
        self.query, self.key, self.value = layers
        self.linear_qkv = _Apart(layers)


class UnfusedMLP(MLP):
    """Has layers `gate` and `up` next to `linear_fc2`."""

    def __init__(self, spec: DenseSpec, hidden_size: int) -> None:
        super().__init__(spec, hidden_size, init_std=0.02, output_init_std=0.02)
        del self.linear_fc1
        self.gate = Linear(hidden_size, spec.size, spec.has_bias)
        self.up = Linear(hidden_size, spec.size, spec.has_bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.linear_fc2(F.silu(self.gate(hidden)) * self.up(hidden))


def build_gpt(setting: Setting, *, num_layers: int = 2, vocab_size: int = VOCAB) -> GPTModel:
    """A model on meta, whose sections are cut by three or four ranks."""
    config = TransformerConfig(
        num_layers=num_layers,
        hidden_size=24,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        ffn_hidden_size=10,
        swiglu=True,
        qk_layernorm=True,
        untie_embeddings_and_output_weights=not setting.is_tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # Each token is sent to all experts, so that the traffic does not depend on values.
        num_experts=None if setting.expert_size is None else 4,
        moe_router_topk=2 if setting.expert_size is None else 4,
    )
    with torch.device("meta"):
        model = GPTModel(config, vocab_size)
        if not setting.is_fused:
            for layer in model.decoder.layers:
                layer.self_attention = UnfusedAttention(layer.spec.mixer, config.hidden_size)
                layer.mlp = UnfusedMLP(layer.spec.feed_forward, config.hidden_size)
    return model


def data_parallel(strategy: str, expert_size: int | None = None) -> DataParallelConfig:
    size = 1 if expert_size is None else expert_size
    if strategy in SHARDING_STRATEGIES:
        return DataParallelConfig(
            data_parallel_sharding_strategy=strategy, expert_model_parallel_size=size
        )
    outer = {HSDP: "no_shard", HFSDP: "optim"}[strategy]
    return DataParallelConfig(
        num_distributed_optimizer_instances=2,
        outer_dp_sharding_strategy=outer,
        expert_model_parallel_size=size,
    )


def optimizer_config(setting: Setting) -> OptimizerConfig:
    offload: dict[str, Any] = {}
    if setting.fraction is not None:
        offload = {
            "optimizer_cpu_offload": True,
            "optimizer_offload_fraction": setting.fraction,
            "overlap_cpu_optimizer_d2h_h2d": True,
            "overlap_optimizer_with_forward": True,
        }
    return OptimizerConfig(**offload, **dict(setting.optimizer))


class Trained:
    """A sharded model and its optimizer, on every rank of the default group.

    Attributes:
        model: a GPT, unless another was given.
        optimizer: a DistributedOptimizer.
    """

    def __init__(
        self, setting: Setting, seed: int, *, lr: float = 1e-2, model: nn.Module | None = None
    ) -> None:
        """
        Args:
            seed: of the weights.
            model: on meta; default: `build_gpt(setting)`.
        """
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()
        self.model = build_gpt(setting) if model is None else model
        config = optimizer_config(setting)
        plan = plan_offload(self.model, config)
        megatron_fsdp.shard_model(
            self.model,
            build_mesh("cpu", self.world_size),
            DEVICE,
            data_parallel(setting.strategy, setting.expert_size),
            compute_dtype=setting.compute_dtype,
            reset_parameters=seeded_reset(self.model, torch.device("cpu"), seed),
            offloaded=plan.names_on_host if plan else (),
        )
        self.optimizer = build_optimizer(self.model, config, lr, self.world_size)

    def step(self, number: int) -> float:
        """Trains on a global batch, divided among the ranks. Returns its mean loss."""
        generator = torch.Generator().manual_seed(number)
        tokens = torch.randint(0, VOCAB, (NUM_SEQUENCES, SEQUENCE_LENGTH + 1), generator=generator)
        own = tokens.chunk(self.world_size)[self.rank]
        loss = self.model(own[:, :-1], own[:, 1:]).mean()
        loss.backward()
        self.optimizer.step(float(self.optimizer.grad_norm()))
        self.optimizer.zero_grad()
        total = loss.detach().double()
        dist.all_reduce(total)
        return float(total) / self.world_size

    def delay_update(self) -> None:
        """Delays the update of the next step, if it overlaps with later work."""
        if isinstance(self.optimizer.optimizer, HybridDeviceOptimizer):
            self.optimizer.optimizer._sides.host_side.lanes.host.enqueue(lambda: time.sleep(DELAY))

    def contents(self, **options: Any) -> Contents:
        return collect(
            self.model,
            self.optimizer.optimizer,
            rank=self.rank,
            world_size=self.world_size,
            **options,
        )

    def save(self, root: str, **options: Any) -> None:
        """Publishes a checkpoint."""
        with manager_of(root, self) as manager:
            manager.save(ITERATION, self.contents(**options), {"iteration": ITERATION})
            manager.finish()
        # Rank 0 ends when it has published, the others when they have seen it.
        dist.barrier()

    def load(self, root: str, skip: Sequence[str] = ()) -> int:
        """Loads the checkpoint, except keys like `skip`. Returns the bytes read on this rank."""
        checkpoint = open_checkpoint(root)
        contents = self.contents()
        num_bytes = load_entries(checkpoint, contents, check_contents(checkpoint, contents, skip))
        install_param_groups(
            self.optimizer.optimizer, contents.names, checkpoint.read_plain(PARAM_GROUPS)
        )
        return num_bytes


def manager_of(root: str | Store, trained: Trained, token: str = "test") -> CheckpointManager:
    """A manager that is constructed without communication."""
    store = open_store(root) if isinstance(root, str) else root
    return CheckpointManager(
        store, DEVICE, trained.rank, trained.world_size, token, timeout_seconds=600.0
    )


def open_checkpoint(root: str) -> PublishedCheckpoint:
    return PublishedCheckpoint.open(open_store(root), checkpoint_name(ITERATION))


def train_and_save(root: str, setting: Setting, model: nn.Module | None = None) -> list[float]:
    """Trains, saves a checkpoint, and stores its expected tensors. Returns the next losses."""
    trained = Trained(setting, seed=0, model=model)
    for number in range(ITERATION):
        trained.step(number)
    trained.save(root)
    expected = full_tensors(trained)
    if trained.rank == 0:
        torch.save(expected, f"{root}/expected.pt")
    return next_losses(trained)


def next_losses(trained: Trained) -> list[float]:
    """The losses of the steps after the checkpoint."""
    return [trained.step(number) for number in range(ITERATION, ITERATION + 2)]


def expected_tensors(root: str) -> dict[str, torch.Tensor]:
    """The expected tensors of the checkpoint of `train_and_save`."""
    return torch.load(f"{root}/expected.pt", weights_only=True)


# The tensors of a run


def full_tensors(trained: Trained) -> dict[str, torch.Tensor]:
    """Every tensor of a run except buffers, whole and on every rank, by its key in checkpoints.

    Values of states in a format with a scale are in fp32. All ranks call it together.
    """
    optimizer = trained.optimizer.optimizer
    values: dict[str, dict[nn.Parameter, torch.Tensor]] = {"": {}}
    found: dict[str, torch.Tensor] = {}
    fqns = {parameter: fqn for fqn, parameter in trained.model.named_parameters()}
    trained.optimizer.synchronize()
    for parameter, fqn in fqns.items():
        values[""][parameter] = local_tensor(parameter).detach()
        for name, state in optimizer.state.get(parameter, {}).items():
            if state.shape != parameter.shape:
                found |= {
                    f"optimizer.state.{own}.{name}": state.clone()
                    for own, _ in canonical(fqn, parameter.shape[0])
                }
                continue
            if isinstance(optimizer, RuleOptimizer) and is_scaled(state.dtype):
                state = optimizer.get_unscaled_state(parameter, name)
            values.setdefault(name, {})[parameter] = local_tensor(state).detach()
    for name, parts in values.items():
        prefix, suffix = ("optimizer.state.", f".{name}") if name else ("model.", "")
        for parameter, whole in gathered(parts):
            sections = canonical(fqns[parameter], parameter.shape[0])
            for (own, _), rows in zip(
                sections, whole.split([num for _, num in sections]), strict=True
            ):
                found[f"{prefix}{own}{suffix}"] = rows.clone()
    return found


def canonical(fqn: str, num_rows: int) -> list[tuple[str, int]]:
    """The names of a parameter of the GPT in a checkpoint, and the rows of each."""
    *path, layer, name = fqn.split(".")
    sections = SECTIONS.get(layer)
    if sections is None:
        return [(fqn, num_rows)]
    # Two query heads for each key and value head.
    shares = (2, 1, 1) if len(sections) == 3 else (1, 1)
    return [
        (".".join([*path, section, name]), num_rows * share // sum(shares))
        for section, share in zip(sections, shares, strict=True)
    ]


def gathered(
    parts: dict[nn.Parameter, torch.Tensor],
) -> Iterator[tuple[nn.Parameter, torch.Tensor]]:
    """Gathers whole tensors from the ranks' parts, which are sharded like the parameter."""
    groups: dict[FsdpParameterGroup | None, list[nn.Parameter]] = {}
    for parameter in parts:
        groups.setdefault(group_of(parameter), []).append(parameter)
    for group, parameters in groups.items():
        if group is None:
            for parameter in parameters:
                assert not isinstance(parameter, DTensor)
                yield parameter, parts[parameter]
            continue
        local = parts[parameters[0]]
        buffer = DBuffer(group.mesh, group.main_weight.placements, group.layout, local.dtype, "cpu")
        for parameter in parameters:
            buffer.get_local_tensor(group.index_of(parameter)).copy_(parts[parameter])
        whole = buffer.redistribute([Replicate()] * group.mesh.ndim)
        for parameter in parameters:
            yield parameter, whole.get_local_tensor(group.index_of(parameter))


def local_values(trained: Trained) -> dict[str, torch.Tensor]:
    """Copies of this rank's tensors, including buffers."""
    trained.optimizer.synchronize()
    found = {name: buffer.clone() for name, buffer in trained.model.named_buffers()}
    for name, parameter in trained.model.named_parameters():
        states = trained.optimizer.optimizer.state.get(parameter, {})
        found |= {
            f"{name}.{state}": local_tensor(value).detach().clone()
            for state, value in states.items()
        }
        found[name] = local_tensor(parameter).detach().clone()
    return found


def differences(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """The keys that only one has, and the keys of tensors that are not equal bit by bit."""
    keys = sorted(got.keys() ^ expected.keys())
    return keys + [key for key in expected if key in got and not is_equal(got[key], expected[key])]


def is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Bit by bit."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(
        *(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (one, other))
    )
