"""Models of several kinds of layers train, save and load as others do.

Gated delta nets, gated attention and SwiGLU fuse weights in three ways, and a delta net's decay
stays fp32 in a model of bf16: two parameter groups in one layer, one of them tiny.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron.core.device import Device
from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.config import EngineConfig
from megatron.training.engine import SaveLoadMeta
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.engine_contents import Contents, contents_of, differing
from tests.helpers.ranks import on_ranks, random_delays, run_ranks

VOCAB, SEQ = 96, 40
# Every kind of mixer, each with what it may have besides.
CONFIG = TransformerConfig(
    num_layers=4,
    hidden_size=32,
    num_attention_heads=4,
    kv_channels=16,
    group_query_attention=True,
    num_query_groups=2,
    ffn_hidden_size=48,
    linear_attention_freq="[1,0,1,0]",
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=12,
    attention_output_gate=True,
    window_size=(15, 0),
    window_attn_skip_freq="[0,1,0,0]",
    softmax_type="learnable",
    rotary_percent=0.25,
    qk_layernorm=True,
    normalization="RMSNorm",
    layernorm_zero_centered_gamma=True,
    post_norm=True,
    swiglu=True,
    add_bias_linear=False,
    attention_dropout=0.0,
    hidden_dropout=0.0,
)


def _engine(strategy: str = "optim_grads_params", fraction: float = 0.0) -> ModuleEngine:
    """An engine in bf16 with the model above; offloaded, with every overlap, by `fraction`."""
    optimizer = OptimizerConfig(clip_grad=0.5)
    if fraction:
        optimizer = OptimizerConfig(
            clip_grad=0.5,
            optimizer_cpu_offload=True,
            optimizer_offload_fraction=fraction,
            overlap_cpu_optimizer_d2h_h2d=True,
            overlap_optimizer_with_forward=True,
        )
    config = EngineConfig(
        optimizer,
        LRScheduleConfig(lr=1e-3, lr_decay_style="constant"),
        DataParallelConfig(data_parallel_sharding_strategy=strategy, main_grads_dtype="bf16"),
        99,
        "bf16",
        7,
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(lambda: GPTModel(CONFIG, VOCAB))
    return engine


def _train(engine: ModuleEngine, steps: range) -> list[float]:
    def forward_step(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        losses: torch.Tensor = model(batch["tokens"][:, :-1], batch["tokens"][:, 1:].contiguous())
        return losses.mean()

    found = []
    for step in steps:
        generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
        tokens = torch.randint(VOCAB, (2, 2, SEQ + 1), generator=generator)
        result = engine.train_batch([{"tokens": batch} for batch in tokens], forward_step)
        found.append(result.loss)
    return found


@on_ranks(2)
def test_offloaded_training_is_bit_equal_to_training_on_the_device() -> None:
    on_device = _engine()
    before = contents_of(on_device)
    losses = _train(on_device, range(2))
    after = contents_of(on_device)
    assert len(differing(before, after)) >= len(after.weights), "everything has changed"

    with random_delays(seed=3):
        offloaded = _engine(fraction=0.4)
        assert _train(offloaded, range(2)) == losses
    assert differing(contents_of(offloaded), after) == []


def _save(folder: str) -> Contents:
    engine = _engine(fraction=1.0)
    _train(engine, range(1))
    engine.save(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return contents_of(engine)


def _loaded(folder: str, strategy: str, fraction: float) -> Contents:
    engine = _engine(strategy, fraction)
    engine.load(SaveLoadMeta(f"{folder}/saved", "dcp", with_optim=True))
    return contents_of(engine)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Contents]:
    """A checkpoint that two offloaded ranks have saved, and what it holds."""
    folder = str(tmp_path_factory.mktemp("hybrid"))
    first, _ = run_ranks(2, _save, folder)
    return folder, first


@pytest.mark.parametrize(
    ("world_size", "strategy", "fraction"),
    [(1, "optim_grads_params", 0.0), (3, "optim", 0.5)],
)
def test_a_checkpoint_of_two_ranks_loads_on_other_numbers_of_ranks_bit_for_bit(
    saved: tuple[str, Contents], world_size: int, strategy: str, fraction: float
) -> None:
    folder, expected = saved
    for contents in run_ranks(world_size, _loaded, folder, strategy, fraction):
        assert differing(contents, expected) == []


def test_every_section_has_a_separate_name_in_the_checkpoint(
    saved: tuple[str, Contents],
) -> None:
    checkpoint = open_checkpoint(open_store(str(Path(saved[0]))), "saved")
    shapes = {key: saved.shape for key, saved in checkpoint.tensors.items()}
    delta_net = {"query": 16, "key": 16, "value": 48, "z": 48, "beta": 4, "alpha": 4}
    attention = {"query": 64, "gate": 64, "key": 32, "value": 32}
    for layer, sections in ((0, delta_net), (1, attention), (2, delta_net), (3, attention)):
        for name, rows in sections.items():
            own = f"decoder.layers.{layer}.self_attention.{name}.weight"
            keys = [f"model.{own}"]
            keys += [f"optimizer.state.{own}.{kind}" for kind in ("exp_avg", "exp_avg_sq")]
            assert [shapes[key] for key in keys] == [(rows, 32)] * 3
        for name in ("gate", "up"):
            assert shapes[f"model.decoder.layers.{layer}.mlp.{name}.weight"] == (48, 32)

    assert not [key for key in shapes if "in_proj" in key or "linear_qkv" in key or "fc1" in key]
    assert shapes["model.decoder.layers.0.self_attention.decay.A_log"] == (4,)
    assert shapes["model.decoder.layers.1.self_attention.sinks"] == (4,)
