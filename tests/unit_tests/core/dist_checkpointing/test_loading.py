"""Loading: keys, parameter groups, formats of states, frozen weights and buffers."""

from __future__ import annotations

import re
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.load.reader import check_contents, load_entries
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.state.collect import collect
from megatron.core.dist_checkpointing.state.param_groups import PARAM_GROUPS
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.cpu_offloading.hybrid_optimizer import HybridDeviceOptimizer
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.fused_adam import FusedAdam
from megatron.core.optimizer.rules import Adam
from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight
from tests.helpers.checkpoints import install_param_groups
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.models import (
    DEVICE,
    ITERATION,
    Setting,
    Trained,
    build_gpt,
    differences,
    expected_tensors,
    full_tensors,
    manager_of,
    moments,
    next_losses,
    open_checkpoint,
    train_and_save,
)

BF16 = torch.bfloat16


# Names


def _keys(root: str, setting: Setting) -> dict[str, tuple[int, ...]]:
    trained = Trained(setting, seed=0, model=build_gpt(setting, num_layers=1))
    trained.save(root)
    return {key: saved.shape for key, saved in open_checkpoint(root).tensors.items()}


WEIGHTS = {  # of the first layer
    "self_attention.query": (24, 24),
    "self_attention.key": (12, 24),
    "self_attention.value": (12, 24),
    "self_attention.linear_proj": (24, 24),
    "mlp.gate": (10, 24),
    "mlp.up": (10, 24),
    "mlp.linear_fc2": (24, 10),
}


@pytest.mark.parametrize(
    "setting",
    [Setting("no_shard", 1.0, is_fused=False), Setting("optim", 0.5, is_tied=False)],
    ids=str,
)
def test_keys_and_shapes_match_an_unfused_model(tmp_path, setting):
    layers = {f"decoder.layers.0.{name}": shape for name, shape in WEIGHTS.items()}
    weights = {f"{name}.weight": shape for name, shape in layers.items()}
    weights |= {f"{name}.bias": shape[:1] for name, shape in layers.items()}
    expected = {f"model.{name}": shape for name, shape in weights.items()}
    for state in ("exp_avg", "exp_avg_sq"):
        expected |= {f"optimizer.state.{name}.{state}": shape for name, shape in weights.items()}
    expected |= {f"optimizer.state.{name}.step": () for name in weights}
    for keys in run_ranks(2, _keys, str(tmp_path), setting):
        found = {key: keys[key] for key in keys if any(f".{name}." in key for name in WEIGHTS)}
        assert found == expected
        assert not [key for key in keys if "linear_qkv" in key or "linear_fc1" in key]
        assert ("model.output_layer.weight" in keys) != setting.is_tied


# Parameter groups


def with_groups(trained: Trained, groups: list[dict[str, Any]]) -> Trained:
    """The run with an optimizer over these groups."""
    trained.optimizer = DistributedOptimizer(FusedAdam(groups), clip_grad=1.0)
    return trained


def options_by_name(trained: Trained) -> dict[str, dict[str, Any]]:
    names = trained.contents().names
    return {
        name: {key: value for key, value in group.items() if key != "params"}
        for group in trained.optimizer.param_groups
        for parameter in group["params"]
        for name in names[parameter]
    }


def _options_of(name: str) -> dict[str, Any]:
    """Constants that tell matrices, biases and norms apart."""
    rate = 0.01 if "norm" in name else 0.003 if name.endswith("bias") else 0.001
    return {"lr": rate, "weight_decay": 10 * rate, "betas": (0.8, 1 - rate), "eps": rate * 1e-6}


def _three_groups(trained: Trained) -> list[dict[str, Any]]:
    groups: dict[float, dict[str, Any]] = {}
    for name, parameter in trained.model.named_parameters():
        options = _options_of(name)
        groups.setdefault(options["lr"], {"params": [], **options})["params"].append(parameter)
    return list(groups.values())


def _save_three_groups(root: str) -> tuple[dict[str, Any], list[float]]:
    trained = Trained(Setting(), seed=0)
    with_groups(trained, _three_groups(trained))
    for number in range(ITERATION):
        trained.step(number)
    trained.save(root)
    return options_by_name(trained), next_losses(trained)


def _load_other_groups(root: str, setting: Setting) -> tuple[dict[str, Any], list[float]]:
    """Every parameter in a separate group, the last first."""
    trained = Trained(setting, seed=1)
    parameters = list(trained.model.parameters())[::-1]
    with_groups(
        trained, [{"params": [parameter], "lr": 0.5, "eps": 1.0} for parameter in parameters]
    )
    trained.load(root)
    return options_by_name(trained), next_losses(trained)


@pytest.mark.parametrize("setting", [Setting(is_fused=False)], ids=str)
def test_the_options_of_groups_come_to_the_parameters_by_name(tmp_path, setting):
    options, losses = run_ranks(2, _save_three_groups, str(tmp_path))[0]
    assert options == {name: {**Adam().defaults, **_options_of(name)} for name in options}
    assert len({values["lr"] for values in options.values()}) == 3
    for loaded, after in run_ranks(2, _load_other_groups, str(tmp_path), setting):
        assert loaded == options
        assert after == losses if setting.is_fused else after == pytest.approx(losses, rel=1e-5)


def _load_groups_that_mix(root: str) -> tuple[str, str]:
    """The errors for a group whose parameters had different options, and for a parameter without a
    saved group.
    """
    trained = Trained(Setting(), seed=1)
    with_groups(trained, [{"params": list(trained.model.parameters()), "lr": 0.5}])
    saved: Any = open_checkpoint(root).read_plain(PARAM_GROUPS)
    before = deepcopy([{**group, "params": None} for group in trained.optimizer.param_groups])
    messages = []
    for groups in (saved, saved[:1]):
        with pytest.raises(CheckpointError) as caught:
            install_param_groups(trained.optimizer.optimizer, trained.contents().names, groups)
        messages.append(str(caught.value))
        assert [{**group, "params": None} for group in trained.optimizer.param_groups] == before
    return messages[0], messages[1]


def test_groups_that_cannot_be_restored_are_left_as_they_are(tmp_path):
    run_ranks(2, _save_three_groups, str(tmp_path))
    for mixed, missing in run_ranks(2, _load_groups_that_mix, str(tmp_path)):
        assert "alike for the parameters of group 0" in mixed
        assert "0.001" in mixed
        assert "got none for decoder.layers.0.input_layernorm.weight" in missing


def _load_sections_together(root: str) -> str:
    trained = Trained(Setting(), seed=1)
    with_groups(trained, [{"params": [parameter]} for parameter in trained.model.parameters()])
    with pytest.raises(CheckpointError) as caught:
        trained.load(root)
    return str(caught.value)


def _save_counters_apart(root: str) -> None:
    trained = Trained(Setting(is_fused=False), seed=0)
    trained.step(0)
    key = trained.model.decoder.layers[1].self_attention.key.weight
    trained.optimizer.optimizer.state[key]["step"].fill_(7.0)
    trained.save(root)


def test_sections_that_have_taken_different_numbers_of_steps_cannot_be_fused(tmp_path):
    run_ranks(2, _save_counters_apart, str(tmp_path))
    for message in run_ranks(2, _load_sections_together, str(tmp_path)):
        assert (
            "Expected optimizer.state.decoder.layers.1.self_attention.key.weight.step to be 1.0"
            in message
        )
        assert "got 7.0" in message


# Optimizers, and states in other formats


def _load(root: str, setting: Setting) -> tuple[list[str], list[float]]:
    trained = Trained(setting, seed=1, lr=1e-3)
    trained.step(99)
    trained.load(root)
    return differences(full_tensors(trained), expected_tensors(root)), next_losses(trained)


SGD = Setting("optim", 0.5, is_tied=False, compute_dtype=BF16, optimizer=(("optimizer", "sgd"),))
SHORT = SGD._replace(fraction=None, optimizer=moments("bf16", "bf16"))


@pytest.mark.parametrize(
    ("setting", "fraction"),
    [
        (Setting(compute_dtype=BF16, optimizer=moments("fp8", "fp16")), None),
        (Setting("optim_grads", compute_dtype=BF16, optimizer=(("optimizer", "sgd"),)), None),
        (Setting(compute_dtype=BF16, optimizer=(("gpu_optimizer", "torch"),)), None),
        # Another fraction is offloaded.
        (SGD, None),
        (SHORT, 0.5),
    ],
    ids=str,
)
def test_every_optimizer_continues_bit_by_bit(tmp_path, setting, fraction):
    losses = run_ranks(2, train_and_save, str(tmp_path), setting)[0]
    for found, after in run_ranks(2, _load, str(tmp_path), setting._replace(fraction=fraction)):
        assert found == []
        assert after == losses


def test_sections_and_shards_of_states_in_short_formats_keep_their_bits(tmp_path):
    # Every part of a whole tensor has a scale that is no larger, so no value is rounded again.
    optimizer = moments("fp8", "fp16")
    losses = run_ranks(1, train_and_save, str(tmp_path), Setting(optimizer=optimizer))[0]
    setting = Setting(is_fused=False, optimizer=optimizer)
    for found, after in run_ranks(3, _load, str(tmp_path), setting):
        assert found == []
        assert after == pytest.approx(losses, rel=1e-4)


def _load_rounded(root: str, setting: Setting) -> dict[str, torch.Tensor]:
    trained = Trained(setting, seed=1)
    trained.load(root)
    return full_tensors(trained)


def test_parts_with_different_scales_that_are_merged_are_rounded_once(tmp_path):
    optimizer = moments("fp8", "fp16")
    run_ranks(4, train_and_save, str(tmp_path), Setting(is_fused=False, optimizer=optimizer))
    (loaded,) = run_ranks(1, _load_rounded, str(tmp_path), Setting(optimizer=optimizer))
    expected = expected_tensors(str(tmp_path))
    rounded = differences(loaded, expected)
    assert rounded
    for key in rounded:
        layer, name, state = re.fullmatch(
            r"optimizer\.state\.(.*)\.\w+\.(\w+)\.(\w+)", key
        ).groups()
        together = [
            value
            for k, value in expected.items()
            if re.fullmatch(rf".*{layer}\.\w+\.{name}\.{state}", k)
        ]
        largest = max(value.abs().max() for value in together)
        # Half of the last of 4 or 11 significant bits, or of the smallest number with this scale.
        bits, least = {"exp_avg": (4, 2**-18), "exp_avg_sq": (11, 2**-40)}[state]
        error = (loaded[key] - expected[key]).abs()
        assert torch.all(error <= (expected[key].abs() * 2**-bits).clamp_min(largest * least))


# Models without an engine, in this very process


class Plain(nn.Module):
    """A fused weight, a scalar and a buffer."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.fused = FusedLinear(8, FusedWeight((("gate", 3), ("up", 5))), init_std=0.5)
        self.scale = nn.Parameter(torch.tensor(1.25))
        self.to(dtype)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.fused(x)) * self.scale


def _plain_losses(model: Plain, optimizer: torch.optim.Optimizer, numbers: range) -> list[float]:
    losses = []
    for number in numbers:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(number))
        loss = (model(x.to(model.scale.dtype)).float() - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def _fused_adam(**options: Any) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: FusedAdam(model.parameters(), lr=1e-2, **options)


def _hybrid(
    cls: type[torch.optim.Optimizer] | None = None,
) -> Callable[[nn.Module], torch.optim.Optimizer]:
    return lambda model: HybridDeviceOptimizer(
        model.parameters(), 0.5, cls, cls, param_update_in_fp32=True, lr=1e-2
    )


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(_fused_adam(master_weights=True), id="masters"),
        pytest.param(
            _fused_adam(master_weights=True, store_param_remainders=True), id="remainders"
        ),
        pytest.param(
            _fused_adam(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float16),
            id="scaled",
        ),
        pytest.param(_hybrid(), id="hybrid"),
        pytest.param(_hybrid(torch.optim.Adagrad), id="hybrid Adagrad"),
        pytest.param(
            lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(1e-2), fused=True),
            id="AdamW",
        ),
        pytest.param(lambda m: torch.optim.Adafactor([m.scale]), id="Adafactor of a scalar"),
    ],
)
def test_a_plain_model_continues_bit_by_bit_with_any_optimizer(tmp_path, make):
    model = Plain(BF16, seed=0)
    optimizer = make(model)
    _plain_losses(model, optimizer, range(ITERATION))
    with CheckpointManager(open_store(tmp_path), DEVICE, 0, 1, "test") as manager:
        manager.save(ITERATION, collect(model, optimizer), {})
        losses = _plain_losses(model, optimizer, range(ITERATION, 6))
        manager.finish()
    checkpoint = open_checkpoint(str(tmp_path))
    assert {"model.gate.weight", "model.up.weight", "model.scale"} < set(checkpoint.tensors)
    for num_steps_before in (0, 1):
        other = Plain(BF16, seed=1)
        optimizer = make(other)
        _plain_losses(other, optimizer, range(50, 50 + num_steps_before))
        contents = collect(other, optimizer)
        load_entries(checkpoint, contents, check_contents(checkpoint, contents))
        install_param_groups(optimizer, contents.names, checkpoint.read_plain(PARAM_GROUPS))
        assert _plain_losses(other, optimizer, range(ITERATION, 6)) == losses


# Frozen weights, and buffers


def _freeze(model: GPTModel) -> None:
    for part in (
        model.embedding,
        model.decoder.layers[0].mlp,
        model.decoder.layers[1].self_attention,
    ):
        part.requires_grad_(False)


def _frozen_model(setting: Setting) -> GPTModel:
    model = build_gpt(setting)
    _freeze(model)
    return model


def _save_frozen(root: str, setting: Setting) -> list[float]:
    return train_and_save(root, setting, _frozen_model(setting))


def _load_frozen(root: str, setting: Setting) -> tuple[list[str], list[float], list[str]]:
    trained = Trained(setting, seed=1, model=_frozen_model(setting))
    trained.load(root)
    found = differences(full_tensors(trained), expected_tensors(root))
    after = next_losses(trained)

    # A run without frozen weights, which has trained all of them before.
    thawed = Trained(setting, seed=1)
    thawed.step(99)
    checkpoint, contents = open_checkpoint(root), thawed.contents()
    load_entries(checkpoint, contents, check_contents(checkpoint, contents))
    tensors = full_tensors(thawed)
    expected = {key: value.to(tensors[key].dtype) for key, value in expected_tensors(root).items()}
    for key in tensors.keys() - expected.keys():
        expected[key] = torch.zeros_like(tensors[key])  # a state that starts fresh
    return found, after, differences(tensors, expected)


@pytest.mark.parametrize(
    ("saving", "loading"),
    [(Setting("no_shard", 1.0, compute_dtype=BF16), Setting("no_shard", compute_dtype=BF16))],
    ids=str,
)
def test_frozen_weights_are_saved_without_states(tmp_path, saving, loading):
    losses = run_ranks(2, _save_frozen, str(tmp_path), saving)[0]
    keys = open_checkpoint(str(tmp_path)).tensors
    assert "model.embedding.word_embeddings.weight" in keys
    assert "model.decoder.layers.0.mlp.up.weight" in keys
    assert not [
        key
        for key in keys
        if key.startswith("optimizer.state.") and ("embedding" in key or "0.mlp" in key)
    ]
    for found, after, thawed in run_ranks(2, _load_frozen, str(tmp_path), loading):
        assert found == thawed == []
        assert after == losses


def _model_with_buffers(setting: Setting, value: float) -> GPTModel:
    model = build_gpt(setting)
    for number, layer in enumerate(model.decoder.layers):
        layer.register_buffer("scores", torch.full((3, 5), value + number))
        layer.register_buffer("scratch", torch.full((2,), value), persistent=False)
    model.register_buffer("num_tokens", torch.tensor(int(value)))
    return model


def _save_buffers(root: str, setting: Setting) -> None:
    trained = Trained(setting, seed=0, model=_model_with_buffers(setting, 7.0))
    with manager_of(root, trained) as manager:
        manager.save(ITERATION, trained.contents(), {})
        # A forward may write to them at any time.
        for buffer in trained.model.buffers():
            buffer.zero_()
        manager.finish()


def _load_buffers(root: str, setting: Setting) -> dict[str, Any]:
    trained = Trained(setting, seed=1, model=_model_with_buffers(setting, -1.0))
    trained.load(root)
    return {name: buffer.unique().tolist() for name, buffer in trained.model.named_buffers()}


def test_buffers_are_saved_as_they_are_when_a_save_starts(tmp_path):
    run_ranks(2, _save_buffers, str(tmp_path), Setting())
    for world_size in (1, 2):
        for buffers in run_ranks(world_size, _load_buffers, str(tmp_path), Setting("optim", 1.0)):
            assert buffers == {
                "num_tokens": [7],
                "decoder.layers.0.scores": [7.0],
                "decoder.layers.1.scores": [8.0],
                "decoder.layers.0.scratch": [-1.0],
                "decoder.layers.1.scratch": [-1.0],
            }
