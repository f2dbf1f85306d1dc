"""Checkpoints of FSDP2 programs, loaded by a table: the next steps equal the steps of FSDP2."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
)
from torch.distributed.tensor import DTensor

from megatron.core.device import Device
from megatron.core.dist_checkpointing.dcp.torch_dcp import TorchDcpCheckpoint
from megatron.core.dist_checkpointing.errors import CheckpointDamagedError, CheckpointError
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.dcp_import import load_dcp
from megatron.training.config import EngineConfig
from megatron.training.engines import ModuleEngine, build_engine
from tests.helpers.engine_contents import contents_of, differing
from tests.helpers.ranks import run_ranks
from tests.helpers.titan_llama import (
    ADAM_EPS,
    BETAS,
    EPS,
    LR,
    THETA,
    Llama,
    Sizes,
    own,
    trained_llama,
    windows_of,
)

SIZES = Sizes()
TITAN = str(Path(__file__).parents[4] / "examples" / "torchtitan_llama3.yaml")
ADAM = {"weight_decay": 0.0, "adam_beta1": BETAS[0], "adam_beta2": BETAS[1], "adam_eps": ADAM_EPS}
ENGINES = {
    "megatron": (OptimizerConfig(**ADAM, clip_grad=0.0), DataParallelConfig()),
    "offloaded": (
        OptimizerConfig(**ADAM, clip_grad=0.0, optimizer_cpu_offload=True),
        DataParallelConfig(),
    ),
    "fsdp2": (OptimizerConfig(**ADAM, clip_grad=0.0), DataParallelConfig(use_torch_fsdp2=True)),
}


def model_config(*, tied: bool = False) -> TransformerConfig:
    return TransformerConfig(
        num_layers=SIZES.num_layers,
        hidden_size=SIZES.dim,
        num_attention_heads=SIZES.num_heads,
        group_query_attention=True,
        num_query_groups=SIZES.num_kv_heads,
        ffn_hidden_size=SIZES.hidden,
        normalization="RMSNorm",
        norm_epsilon=EPS,
        swiglu=True,
        add_bias_linear=False,
        rotary_base=THETA,
        untie_embeddings_and_output_weights=not tied,
        hidden_dropout=0.0,
        attention_dropout=0.0,
    )


def make(kind: str, *, tied: bool = False) -> ModuleEngine:
    optimizer, parallel = ENGINES[kind]
    schedule = LRScheduleConfig(lr=LR, lr_decay_style="constant")
    config = EngineConfig(optimizer, schedule, parallel, train_iters=8)
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", dist.get_world_size()))
    engine.initialize(lambda: GPTModel(model_config(tied=tied), SIZES.vocabulary))
    return engine


def forward_step(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(batch["tokens"], batch["labels"]).mean()


def step(engine: ModuleEngine, number: int) -> float:
    windows = own(windows_of(number, SIZES))
    batch = {"tokens": windows[:, :-1].contiguous(), "labels": windows[:, 1:].contiguous()}
    return engine.train_batch([batch], forward_step).loss


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def ours_as_theirs(engine: ModuleEngine) -> dict[str, torch.Tensor]:
    """Our weights under torchtitan's names, in its order of rows; written apart from the table."""
    engine.state.optimizer.synchronize()
    weights = {name: whole(p) for name, p in engine.model.named_parameters()}
    found = {
        "tok_embeddings.weight": weights["embedding.word_embeddings.weight"],
        "norm.weight": weights["decoder.final_layernorm.weight"],
    }
    found["lm_head.weight"] = weights.get("output_layer.weight", found["tok_embeddings.weight"])
    kv = SIZES.num_kv_heads * SIZES.head
    for n in range(SIZES.num_layers):
        layer, theirs = f"decoder.layers.{n}.", f"layers.{n}."
        fused = weights[f"{layer}self_attention.linear_qkv.weight"]
        q, k, v = fused.split([SIZES.dim, kv, kv])
        gate, up = weights[f"{layer}mlp.linear_fc1.weight"].split(SIZES.hidden)
        found |= {
            f"{theirs}attention.qkv_linear.wq.weight": neighbours(q),
            f"{theirs}attention.qkv_linear.wk.weight": neighbours(k),
            f"{theirs}attention.qkv_linear.wv.weight": v,
            f"{theirs}attention.wo.weight": weights[f"{layer}self_attention.linear_proj.weight"],
            f"{theirs}attention_norm.weight": weights[f"{layer}input_layernorm.weight"],
            f"{theirs}ffn_norm.weight": weights[f"{layer}pre_mlp_layernorm.weight"],
            f"{theirs}feed_forward.w1.weight": gate,
            f"{theirs}feed_forward.w3.weight": up,
            f"{theirs}feed_forward.w2.weight": weights[f"{layer}mlp.linear_fc2.weight"],
        }
    return found


def neighbours(rows: torch.Tensor) -> torch.Tensor:
    """Heads whose halves are turned together, as heads of pairs."""
    return rows.view(-1, 2, SIZES.head // 2, SIZES.dim).transpose(1, 2).reshape(rows.shape)


def _save(folder: str, fused: bool, tied: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Three steps, a checkpoint, two more steps: their losses, and the weights after them."""
    trained = trained_llama(
        SIZES, [own(windows_of(n, SIZES)) for n in range(3)], fused=fused, tied=tied
    )
    trained.save(folder)
    losses = [trained.step(own(windows_of(number, SIZES))) for number in (3, 4)]
    return losses, {name: whole(value) for name, value in trained.model.state_dict().items()}


def _train_on(
    folder: str, kind: str, tied: bool, table: str = TITAN
) -> tuple[list[float], dict[str, torch.Tensor], int]:
    engine = make(kind, tied=tied)
    load_dcp(folder, table, model_config(tied=tied), engine.state)
    losses = [step(engine, number) for number in (3, 4)]
    return losses, ours_as_theirs(engine), engine.step_info().iteration


def expect_equal(
    one: tuple[list[float], dict[str, torch.Tensor]],
    other: tuple[list[float], dict[str, torch.Tensor]],
) -> None:
    assert one[0] == pytest.approx(other[0], abs=1e-6)
    assert one[1].keys() == other[1].keys()
    for name, weight in one[1].items():
        assert (weight - other[1][name]).abs().max() <= 1e-6, name


@pytest.mark.parametrize(
    ("saving", "loading", "kind", "fused", "tied"),
    [
        (2, 1, "megatron", True, False),
        (1, 2, "fsdp2", False, False),
        (2, 3, "offloaded", True, False),
        (2, 2, "offloaded", False, True),
    ],
)
def test_a_checkpoint_of_torchtitan_continues_as_under_fsdp2(
    tmp_path, saving, loading, kind, fused, tied
):
    folder = str(tmp_path / "step-3")
    theirs = run_ranks(saving, _save, folder, fused, tied)[0]
    losses, weights, iteration = run_ranks(loading, _train_on, folder, kind, tied)[0]
    expect_equal((losses, weights), theirs)
    assert iteration == 2  # the run's counter, which started at 0


def _refusals(folder: str, table: str, tied: bool = False, **change: Any) -> tuple[str, list[str]]:
    """Returns the error of loading a changed checkpoint, and the names of changed tensors here."""
    batches = [own(windows_of(number, SIZES)) for number in range(3)]
    trained = trained_llama(SIZES, batches)
    state, _ = flatten_state_dict(trained.state())
    state = {key: value for key, value in state.items() if key not in change}
    state |= {key: value for key, value in change.items() if value is not None}
    dcp.save(state, checkpoint_id=folder)

    engine = make("megatron", tied=tied)
    before = contents_of(engine)
    with pytest.raises(CheckpointError) as caught:
        load_dcp(folder, table, model_config(tied=tied), engine.state)
    return str(caught.value), differing(before, contents_of(engine))


def test_all_differences_are_one_error_before_anything_is_changed(tmp_path):
    change = {
        "layers.0.attention.wo.weight": None,
        "layers.1.ffn_norm.weight": torch.zeros(5),
        "layers.2.ffn_norm.weight": torch.zeros(16),
        "optimizer.state.norm.weight.exp_avg_sq": None,
        "ema.norm.weight": torch.zeros(16),
    }
    run = functools.partial(_refusals, str(tmp_path / "saved"), TITAN, **change)
    for message, touched in run_ranks(2, run):
        assert touched == []
        for clause in (
            f"in {tmp_path / 'saved'} (read by {TITAN})",
            "it lacks optimizer.state.decoder.final_layernorm.weight.exp_avg_sq, "
            "model.decoder.layers.0.self_attention.linear_proj.weight",
            "it has unexpected keys model.decoder.layers.2.pre_mlp_layernorm.weight, "
            "their ema.norm.weight",
            "model.decoder.layers.1.pre_mlp_layernorm.weight has shape (5,) where the model has",
        ):
            assert clause in message


@pytest.mark.parametrize(
    ("change", "tied", "clause"),
    [
        (
            {
                f"{prefix}{name}.weight{suffix}": torch.zeros(30, 16)
                for name in ("tok_embeddings", "lm_head")
                for prefix, suffix in (
                    ("", ""),
                    ("optimizer.state.", ".exp_avg"),
                    ("optimizer.state.", ".exp_avg_sq"),
                )
            },
            False,
            "vocabulary has 30 rows and this model's 31",
        ),
        (
            {"optimizer.state.norm.weight.step": torch.tensor(-1.0)},
            False,
            "optimizer.state.decoder.final_layernorm.weight.step",
        ),
        ({}, True, "Expected model.output_layer.weight to equal model.embedding."),
        ({"norm.weight": torch.zeros(16, dtype=torch.int64)}, False, "is torch.int64 where the"),
    ],
    ids=["vocabulary", "counter", "tied", "integers"],
)
def test_a_checkpoint_that_cannot_be_loaded_is_an_error(tmp_path, change, tied, clause):
    run = functools.partial(_refusals, str(tmp_path / "saved"), TITAN, tied=tied, **change)
    ((message, touched),) = run_ranks(1, run)
    assert clause in message
    assert touched == []


class Evil:
    """Creates a file when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (self.path, "w")


def _load_another_form(folder: str, form: str) -> tuple[dict[str, bool], set[float], int]:
    """Returns which tensors of a checkpoint in another form are equal, and the counters."""
    batches = [own(windows_of(number, SIZES)) for number in range(3)]
    trained = trained_llama(SIZES, batches, fused=False)
    weights, states = get_state_dict(trained.model, trained.optimizer)
    expected = {name: whole(value) for name, value in trained.model.state_dict().items()}
    if form == "nested":
        state = {"app": {"model": weights, "optim": states}, "evil": Evil(f"{folder}_ran")}
    elif form == "flat":
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        flat = get_optimizer_state_dict(trained.model, trained.optimizer, options=options)
        state = {"model": weights, "optimizer": flat}
    elif form == "weights alone":
        state = {"model": weights}
    else:
        state = {"model": {name: value.bfloat16() for name, value in weights.items()}}
        expected = {name: value.bfloat16().float() for name, value in expected.items()}
    dcp.save(state, checkpoint_id=folder)

    engine = make("megatron")
    load_dcp(folder, f"{folder}.yaml", model_config(), engine.state)
    found = ours_as_theirs(engine)
    held = contents_of(engine).states
    return (
        {name: torch.equal(found[name], value) for name, value in expected.items()},
        {value.item() for name, value in held.items() if name.endswith(".step")},
        sum(bool(value.any()) for name, value in held.items() if name.endswith(".exp_avg")),
    )


@pytest.mark.parametrize("form", ["nested", "flat", "weights alone", "bf16"])
def test_each_form_of_pytorchs_helpers_is_loaded_without_executing_code(tmp_path, form):
    folder = tmp_path / "saved"
    usual = [line for line in Path(TITAN).read_text().splitlines() if "{name}" not in line]
    Path(f"{folder}.yaml").write_text("\n".join(usual))
    for equal, steps, num_moments in run_ranks(2, _load_another_form, str(folder), form):
        assert all(equal.values())
        assert len(equal) == 21
        has_moments = form in ("nested", "flat")
        assert steps == ({3.0} if has_moments else {0.0})
        assert bool(num_moments) == has_moments
    assert not Path(f"{folder}_ran").exists()


def _load_damaged(folder: str) -> str:
    engine = make("megatron")
    with pytest.raises(CheckpointDamagedError) as caught:
        load_dcp(folder, TITAN, model_config(), engine.state)
    return str(caught.value)


def test_a_flipped_bit_is_an_error_on_all_ranks_that_names_the_file(tmp_path):
    folder = tmp_path / "step-3"
    run_ranks(2, _save, str(folder), True, False)
    second_half = torch.empty(12, SIZES.dim)
    checkpoint = TorchDcpCheckpoint.open(LocalStore(tmp_path), folder.name)
    checkpoint.read("layers.1.feed_forward.w1.weight", (12, 0), second_half)
    path = folder / "__1_0.distcp"
    content = bytearray(path.read_bytes())
    content[content.index(second_half.numpy().tobytes()) + 5] ^= 1
    path.write_bytes(content)
    for message in run_ranks(2, _load_damaged, str(folder)):
        assert "__1_0.distcp" in message


def test_ranks_read_only_the_chunks_of_their_rows(tmp_path):
    folder = str(tmp_path / "step-3")
    run_ranks(2, _save, folder, False, False)

    def count() -> tuple[int, int]:
        read, largest = 0, 0
        real = TorchDcpCheckpoint._chunk

        def counting(*args: Any) -> torch.Tensor:
            nonlocal read, largest
            chunk = real(*args)
            read, largest = read + chunk.nbytes, max(largest, chunk.nbytes)
            return chunk

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(TorchDcpCheckpoint, "_chunk", counting)
            load_dcp(folder, TITAN, model_config(), make("megatron").state)
        return read, largest

    total = sum(3 * weight.numel() * 4 for weight in Llama(SIZES).parameters())
    for read, _ in run_ranks(2, count):
        # Our rows are cut elsewhere than FSDP2's.
        assert read < 0.8 * total
    assert run_ranks(1, count)[0][0] < 1.2 * total
