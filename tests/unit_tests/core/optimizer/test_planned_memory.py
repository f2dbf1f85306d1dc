"""`plan_memory` predicts the memory of a run to the byte, before weights are allocated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers.memory import peak_bytes
from megatron.core import products
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.layer_execution import use_low_precision
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import matrix_pass, rule_optimizer
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.distrib_optimizer import plan_offload
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.optimizer.planned_memory import PlannedMemory, plan_memory
from megatron.core.optimizer.state_memory import StateBytes
from megatron.core.parts import freeze
from megatron.core.transformer.config import TransformerConfig
from megatron.training import engines
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from megatron.training.step_memory import state_settings
from tests.helpers.ranks import run_ranks

VOCAB = 61
TP2 = {"tensor_model_parallel_size": 2}

SIZES: dict[str, Any] = {
    "num_layers": 3,
    "hidden_size": 20,
    "num_attention_heads": 2,
    "ffn_hidden_size": 28,
    "normalization": "RMSNorm",
    "swiglu": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
}
DENSE = TransformerConfig(**SIZES)
MIXTURE = TransformerConfig(
    **SIZES,
    num_experts=4,
    moe_ffn_hidden_size=7,
    moe_layer_freq="[0,1,1]",
    moe_router_topk=2,
    moe_router_dtype="fp32",
    moe_shared_expert_intermediate_size=9,
    untie_embeddings_and_output_weights=True,
)
EVEN_MIXTURE = replace(MIXTURE, moe_shared_expert_intermediate_size=10)
HYBRID = TransformerConfig(
    **SIZES,
    linear_attention_freq="[1,0,1]",
    linear_key_head_dim=4,
    linear_value_head_dim=6,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
)
LATENT = TransformerConfig(
    **SIZES,
    position_embedding_type="rope",
    multi_latent_attention=True,
    q_lora_rank=6,
    kv_lora_rank=8,
    qk_head_dim=6,
    qk_pos_emb_head_dim=4,
    v_head_dim=6,
)
BF16_MOMENTS = {
    "exp_avg_dtype": "bf16",
    "exp_avg_sq_dtype": "bf16",
}


@dataclass(frozen=True)
class Case:
    """A run: its model, sharding and optimizer."""

    model: TransformerConfig = DENSE
    parallel: dict[str, Any] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    compute_dtype: str = "bf16"
    freeze: tuple[str, ...] = ()
    recipe: str | None = None

    def on_host(self, fraction: float, **options: Any) -> Case:
        """The same run with a fraction of the optimizer in host memory."""
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
        parallel = self.parallel
        if not parallel.get("use_torch_fsdp2"):
            parallel = {"main_grads_dtype": self.compute_dtype, **parallel}
        return replace(self, parallel=parallel, optimizer={**offload, **options})

    def engine_config(self) -> EngineConfig:
        return EngineConfig(
            OptimizerConfig(**self.optimizer),
            LRScheduleConfig(lr=0.1, lr_decay_style="constant"),
            DataParallelConfig(**self.parallel),
            train_iters=1,
            compute_dtype=self.compute_dtype,
            low_precision=self._low_precision,
        )

    @property
    def _low_precision(self) -> LowPrecisionConfig:
        if self.recipe is None:
            return LowPrecisionConfig()
        if self.recipe == "nvfp4":
            return LowPrecisionConfig(fp4_format="e2m1")
        return LowPrecisionConfig(fp8_format="e4m3", fp8_recipe=self.recipe)

    def build(self) -> nn.Module:
        # Without tensor parallelism, a vocabulary that no number of ranks divides.
        vocab_size = VOCAB + 3 if TP2.items() <= self.parallel.items() else VOCAB
        model = GPTModel(self.model, vocab_size)
        freeze(model, self.freeze, "--freeze")
        parallel = DataParallelConfig(**self.parallel)
        use_low_precision(model, self._low_precision, gathers_codes=parallel.gathers_codes)
        return model


class Seen(NamedTuple):
    """Planned, requested and allocated memory of one rank."""

    planned: PlannedMemory
    asked: int
    found: dict[str, StateBytes]


def _seen(case: Case) -> Seen:
    config, asked = case.engine_config(), list[int]()
    original = engines.check_memory_on_all_ranks

    def recorded(needs: Any, *others: Any) -> None:
        asked.append(sum(need.nbytes for need in needs))
        original(needs, *others)

    with torch.device("meta"):
        model = case.build()
    by_module = bool(config.parallel.use_megatron_fsdp)
    plan = plan_offload(model, config.optimizer, by_module=by_module)
    world_size, rank = dist.get_world_size(), dist.get_rank()
    settings = state_settings(config, world_size, is_accelerator=False)
    planned = plan_memory(model, settings, plan, rank)

    engines.check_memory_on_all_ranks = recorded
    try:
        engine = build_engine(config, Device("cpu"), build_mesh("cpu", world_size))
        engine.initialize(case.build)
    finally:
        engines.check_memory_on_all_ranks = original
    found = engine.state.optimizer.state_memory(engine.model)
    if config.optimizer.gpu_optimizer == "torch":
        # PyTorch's optimizers allocate their states in the first step.
        tokens = torch.arange(12).view(2, 6) + rank
        batch = {"tokens": tokens, "labels": tokens}
        engine.train_batch([batch], lambda model, batch: model(**batch).mean())
        found = engine.state.optimizer.state_memory(engine.model)
    return Seen(planned, sum(asked), found)


ZERO1 = {"data_parallel_sharding_strategy": "optim"}
ZERO2 = {"data_parallel_sharding_strategy": "optim_grads"}
NO_SHARD = {"data_parallel_sharding_strategy": "no_shard"}
HSDP = {"num_distributed_optimizer_instances": 2}
HFSDP = {**HSDP, "outer_dp_sharding_strategy": "optim"}
EP2 = {"expert_model_parallel_size": 2}
FSDP2 = {"use_torch_fsdp2": True}
CODES = {"fp8_param_gather": True}

CHEAP = {
    "dense, half on the host": Case().on_host(0.5),
    "experts divided, all on the host": Case(MIXTURE, EP2).on_host(1.0),
    "gated delta nets, bf16 moments": Case(HYBRID).on_host(0.5, **BF16_MOMENTS),
    "frozen embedding, fp32 gradients": Case(
        parallel={"main_grads_dtype": "fp32"}, freeze=("embedding",)
    ).on_host(1.0),
    "layers divided, half on the host": Case(HYBRID, TP2).on_host(0.5),
    "layers and experts divided": Case(EVEN_MIXTURE, {**TP2, **EP2}),
    "ZeRO-1": Case(MIXTURE, ZERO1),
    "Muon, experts divided": Case(MIXTURE, EP2, {"optimizer": "muon"}),
    "Muon, experts divided, half on the host": Case(MIXTURE, EP2).on_host(0.5, optimizer="muon"),
    "Muon, FSDP2, on the host": Case(MIXTURE, FSDP2).on_host(0.7, optimizer="muon"),
    "dense, half on the host, updated by the device": Case().on_host(
        0.5, overlap_cpu_optimizer_d2h_h2d=True, optimizer_update_on_device=1.0
    ),
    "dense, half on the host, some updated early": Case().on_host(
        0.5, overlap_cpu_optimizer_d2h_h2d=True, optimizer_early_update_gib=3e-5
    ),
    "codes, experts divided, half on the host": Case(
        MIXTURE, {**EP2, **CODES}, freeze=("decoder.layers.0",), recipe="blockwise"
    ).on_host(0.5),
    "codes, delayed scaling": Case(MIXTURE, {**EP2, **CODES}, recipe="delayed"),
    "fp4 codes, on the host": Case(
        EVEN_MIXTURE, {**EP2, "fp4_param_gather": True}, recipe="nvfp4"
    ).on_host(1.0),
}
WIDE = {
    "dense": Case(),
    "dense, on the device": Case().on_host(0.0),
    "dense, all on the host": Case().on_host(1.0),
    "dense, fp32": Case(compute_dtype="fp32"),
    "dense, fp32, on the host": Case(compute_dtype="fp32").on_host(0.5),
    "experts divided": Case(MIXTURE, EP2),
    "experts first": Case(MIXTURE, EP2).on_host(0.3, optimizer_offload_experts_first=True),
    "experts, ZeRO-1 on the host": Case(MIXTURE, {**ZERO1, **EP2}).on_host(0.5),
    "experts divided, not sharded": Case(MIXTURE, {**NO_SHARD, **EP2}).on_host(1.0),
    "layers divided": Case(LATENT, TP2),
    "layers divided, not sharded": Case(DENSE, {**TP2, **NO_SHARD}).on_host(0.5),
    "layers divided, ZeRO-1": Case(DENSE, {**TP2, **ZERO1}).on_host(1.0),
    "gated delta nets": Case(HYBRID),
    "latent attention": Case(LATENT).on_host(0.7),
    "frozen layers": Case(freeze=("decoder.layers.0", "decoder.layers.2")).on_host(0.5),
    "frozen, on the device": Case(freeze=("decoder",)),
    "ZeRO-1 on the host": Case(parallel=ZERO1).on_host(0.5),
    "ZeRO-1, fp32": Case(parallel=ZERO1, compute_dtype="fp32").on_host(0.5),
    "ZeRO-2": Case(parallel=ZERO2),
    "ZeRO-2 on the host": Case(parallel=ZERO2).on_host(1.0),
    "not sharded": Case(parallel=NO_SHARD).on_host(0.5),
    "bf16 main weights": Case().on_host(0.5, main_params_dtype="bf16"),
    "fp8 moments": Case(
        optimizer={
            "exp_avg_dtype": "fp8",
            "exp_avg_sq_dtype": "fp16",
        }
    ),
    "unpinned weights": Case().on_host(0.5, pin_cpu_params=False),
    "momentum": Case(optimizer={"optimizer": "sgd"}),
    "momentum on the host": Case().on_host(0.5, optimizer="sgd"),
    "Lion": Case(HYBRID).on_host(0.5, optimizer="lion", exp_avg_dtype="bf16"),
    "Muon": Case(HYBRID, optimizer={"optimizer": "muon", "exp_avg_dtype": "bf16"}),
    "Muon, frozen": Case(LATENT, ZERO2, {"optimizer": "muon"}, freeze=("decoder.layers.1.mlp",)),
    "Muon, FSDP2": Case(MIXTURE, FSDP2, {"optimizer": "muon"}),
    "Muon, HFSDP": Case(optimizer={"optimizer": "muon"}, parallel=HFSDP),
    "Muon, bf16 moments, on the host": Case(HYBRID).on_host(1.0, **BF16_MOMENTS, optimizer="muon"),
    "Muon, frozen, on the host": Case(
        LATENT, {**ZERO2, "main_grads_dtype": "fp32"}, freeze=("decoder.layers.1.mlp",)
    ).on_host(0.6, optimizer="muon"),
    "Muon, not sharded, on the host": Case(parallel=NO_SHARD).on_host(0.5, optimizer="muon"),
    "Muon, HFSDP, on the host": Case(parallel=HFSDP).on_host(1.0, optimizer="muon"),
    "no momentum": Case(optimizer={"optimizer": "sgd", "sgd_momentum": 0.0}),
    "PyTorch's AdamW": Case(optimizer={"gpu_optimizer": "torch"}),
    "FSDP2": Case(parallel=FSDP2),
    "FSDP2 on the host": Case(parallel=FSDP2).on_host(0.5),
    "FSDP2, experts": Case(MIXTURE, FSDP2).on_host(1.0),
    "FSDP2, frozen": Case(parallel=FSDP2, freeze=("embedding",)).on_host(0.5),
    "HSDP": Case(parallel=HSDP).on_host(0.5),
    "HFSDP": Case(parallel=HFSDP).on_host(1.0),
    "HSDP with experts": Case(MIXTURE, HSDP).on_host(0.5),
    "codes": Case(parallel=CODES, recipe="blockwise"),
    "codes, ZeRO-1": Case(parallel={**ZERO1, **CODES}, recipe="mxfp8").on_host(1.0),
    "codes, HFSDP": Case(parallel={**HFSDP, **CODES}, recipe="rowwise").on_host(0.5),
    "codes, not sharded": Case(parallel={**NO_SHARD, **CODES}, recipe="tensorwise"),
}


def _check(case: Case, world_size: int) -> None:
    for seen in run_ranks(world_size, _seen, case):
        assert seen.planned.at_rest == seen.found
        assert seen.planned.device_nbytes > 0
        # The preflight check requests exactly the host memory that the run allocates.
        assert seen.asked == sum(need.nbytes for need in seen.planned.host_needs)
        assert seen.asked == sum(row.host for row in seen.found.values())


@pytest.mark.parametrize("case", CHEAP.values(), ids=CHEAP)
def test_the_plan_matches_the_memory_of_a_run_to_the_byte(case):
    _check(case, 2)


@pytest.mark.wide
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("case", [*CHEAP.values(), *WIDE.values()], ids=[*CHEAP, *WIDE])
def test_the_plan_matches_the_memory_on_any_number_of_ranks(case, world_size):
    needs_even = any(each.items() <= case.parallel.items() for each in (EP2, TP2, HSDP))
    if needs_even and world_size != 2:
        world_size = 4
    _check(case, world_size)


@pytest.mark.wide
@pytest.mark.parametrize("fraction", [None, 0.5, 1.0])
def test_the_plan_matches_the_memory_of_an_unsharded_model(fraction):
    case = Case(parallel={"use_megatron_fsdp": False}, compute_dtype="fp32")
    if fraction is not None:
        offload = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": fraction}
        case = replace(case, optimizer=offload)
    _check(case, 1)


def _weights_before_they_are_codes(case: Case) -> tuple[int, int]:
    """Planned and allocated bytes of bf16 weights that the device updated and has not quantized."""
    config, world_size = case.engine_config(), dist.get_world_size()
    with torch.device("meta"):
        model = case.build()
    settings = state_settings(config, world_size, is_accelerator=False)
    plan = plan_offload(model, config.optimizer, by_module=True)
    planned = plan_memory(model, settings, plan, dist.get_rank())

    engine = build_engine(config, Device("cpu"), build_mesh("cpu", world_size))
    engine.initialize(case.build)
    tokens = torch.arange(12).view(2, 6)
    batch = {"tokens": tokens, "labels": tokens}
    engine.train_batch([batch], lambda model, batch: model(**batch).mean())
    groups = {id(group): group for own in engine.model.parameters() if (group := group_of(own))}
    buffers = [group._rounded for group in groups.values() if group._rounded is not None]
    return planned.rounded_nbytes, sum(buffer.local_buffer.nbytes for buffer in buffers)


@pytest.mark.parametrize("share", [0.5, 1.0])
def test_the_plan_includes_weights_that_the_device_updated_until_they_are_quantized(
    share: float,
) -> None:
    case = Case(MIXTURE, CODES, recipe="blockwise").on_host(
        1.0, overlap_cpu_optimizer_d2h_h2d=True, optimizer_update_on_device=share
    )
    for planned, found in run_ranks(2, _weights_before_they_are_codes, case):
        assert planned == found > 0


WIDER = TransformerConfig(
    **{**SIZES, "num_layers": 5, "hidden_size": 64, "ffn_hidden_size": 96}, add_bias_linear=False
)
WIDER_MIXTURE = replace(
    WIDER, num_experts=4, moe_ffn_hidden_size=32, moe_layer_freq="[0,1,1,1,1]", moe_router_topk=2
)


class Exchanged:
    """A finished collective without communication."""

    def wait(self) -> None:
        pass


def _step_buffers(case: Case) -> tuple[int, int]:
    """Returns the planned bytes of Muon's buffers, and their measured peak in a step."""
    config, world_size = case.engine_config(), dist.get_world_size()
    with torch.device("meta"):
        model = case.build()
    plan = plan_offload(model, config.optimizer, by_module=bool(config.parallel.use_megatron_fsdp))
    settings = state_settings(config, world_size, is_accelerator=False)
    planned = plan_memory(model, settings, plan, dist.get_rank()).matrices

    engine = build_engine(config, Device("cpu"), build_mesh("cpu", world_size))
    engine.initialize(case.build)
    tokens = torch.arange(12).view(2, 6)
    engine.model(tokens=tokens, labels=tokens).mean().backward()
    optimizer = engine.state.optimizer.optimizer
    optimizer.step()
    with pytest.MonkeyPatch.context() as patch:
        # Exclude from the peak: messages, which gloo's threads free, scratch memory
        # of elementwise updates, and operands that some CPUs convert before they multiply.
        patch.setattr(dist, "all_to_all_single", lambda *_, **__: Exchanged())
        patch.setattr(matrix_pass, "carry_out", lambda *_: None)
        patch.setattr(rule_optimizer, "carry_out", lambda *_: None)
        patch.setattr(products, "_SLOW_DTYPES", frozenset())
        return planned.in_step, peak_bytes(optimizer.step)


STEPPED = {
    "dense": Case(WIDER, optimizer={"optimizer": "muon"}),
    "experts, on the host": Case(WIDER_MIXTURE).on_host(1.0, optimizer="muon"),
    "experts divided, half on the host": Case(WIDER_MIXTURE, EP2).on_host(0.5, optimizer="muon"),
    "FSDP2": Case(WIDER, FSDP2, {"optimizer": "muon"}),
    "not sharded": Case(WIDER, NO_SHARD, {"optimizer": "muon"}),
    "HFSDP": Case(WIDER_MIXTURE, HFSDP, {"optimizer": "muon"}),
}


@pytest.mark.parametrize(
    ("case", "world_size"),
    [
        ("dense", 2),
        ("experts, on the host", 1),
        ("experts divided, half on the host", 4),
        *(
            pytest.param(case, world_size, marks=pytest.mark.wide)
            for case in STEPPED
            for world_size in (1, 2, 3, 4)
        ),
    ],
)
def test_the_plan_includes_the_buffers_of_a_muon_step(case: str, world_size: int) -> None:
    """The plan is the largest rank's; it is an upper bound if ranks differ or both sides step."""
    divides = {"experts divided, half on the host": 2, "HFSDP": 2}.get(case, 1)
    if world_size % divides:
        pytest.skip("these ranks cannot divide the model")
    found = run_ranks(world_size, _step_buffers, STEPPED[case])
    (planned,) = {planned for planned, _ in found}
    measured = max(measured for _, measured in found)
    slack = 32 << 10  # scratch of elementwise updates of the other weights
    assert measured <= planned + slack
    # The sides step one after the other.
    least = 0.5 if "half" in case else 0.7 if world_size > 1 else 1.0
    assert measured >= least * planned
