"""Compiled layers: the same losses, one graph a piece, and no new graphs for new documents."""

from __future__ import annotations

import importlib.util
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters

from megatron.core.compiled_layers import check_compiler, compile_layers
from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from tests.helpers.ranks import run_ranks

VOCAB, BATCH, SEQ = 64, 2, 32
LLAMA = {
    "ffn_hidden_size": 32,
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "recomputed, dropout": {
        **LLAMA,
        "recompute_granularity": "full",
        "attention_dropout": 0.1,
        "hidden_dropout": 0.1,
    },
}
# A compilation takes seconds.
WIDE: dict[str, dict[str, Any]] = {
    "delta nets": {**LLAMA, "linear_attention_freq": "2", "attention_output_gate": True},
    "selective": {"recompute_granularity": "selective", "qk_layernorm": True},
    "experts": {**LLAMA, "num_experts": 4, "moe_router_topk": 2},
    "latents": {**LLAMA, "multi_latent_attention": True},
    "windows, norms behind": {
        **LLAMA,
        "window_size": (8, 0),
        "window_attn_skip_freq": "2",
        "post_norm": True,
    },
}
ALL = [*MODELS, *(pytest.param(name, marks=pytest.mark.wide) for name in WIDE)]


@pytest.fixture(autouse=True)
def _anew() -> Iterator[None]:
    """Without the graphs of other tests."""
    torch._dynamo.reset()
    counters.clear()
    with _folder_without_blanks():
        yield
    torch._dynamo.reset()


@contextmanager
def _folder_without_blanks() -> Iterator[None]:
    """For the compiler's files, whatever TMPDIR is."""
    with mock.patch.object(tempfile, "tempdir", "/tmp"):
        yield


def build(**options: Any) -> GPTModel:
    torch.manual_seed(0)
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **options}
    return GPTModel(
        TransformerConfig(num_layers=3, hidden_size=16, num_attention_heads=2, **options), VOCAB
    )


def loss_of(model: nn.Module, seed: int = 1, documents: Documents | None = None) -> Tensor:
    torch.manual_seed(seed)
    tokens = torch.randint(VOCAB, (BATCH, SEQ))
    losses: Tensor = model(tokens, tokens.roll(-1, 1), documents=documents)
    return losses.mean()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("name", ALL)
def test_losses_agree_and_documents_make_no_new_graphs(name: str) -> None:
    plain, compiled = (build(**{**MODELS, **WIDE}[name]) for _ in range(2))
    names = [name for name, _ in compiled.named_parameters()]
    assert compile_layers(compiled) == 3

    graphs = []
    batches = [
        Documents((20, 12, 32)),
        Documents((1, 31, 16, 16), (0, 16)),
        Documents((32, 32)),
        Documents((7, 25, 31, 1), (25, 1)),
    ]
    for step, documents in enumerate(batches):
        losses = [loss_of(model, step, documents) for model in (plain, compiled)]
        for loss in losses:
            loss.backward()
        with torch.no_grad():
            for model in (plain.eval(), compiled.eval()):
                losses.append(loss_of(model, step, documents))
                model.train()
        assert losses[1].item() == pytest.approx(losses[0].item(), rel=1e-5)
        assert losses[3].item() == pytest.approx(losses[2].item(), rel=1e-5)
        graphs.append(num_graphs())

    assert graphs[0] > 0
    assert len(set(graphs)) == 1
    assert not counters["graph_break"]
    assert [name for name, _ in compiled.named_parameters()] == names
    for own, other in zip(compiled.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own.grad, other.grad, rtol=1e-4, atol=1e-6)


def test_a_compiled_run_has_the_losses_of_another_and_its_activations_may_move() -> None:
    losses = run_ranks(1, _trained_elsewhere)[0]
    plain, compiled, moved = losses
    assert compiled == pytest.approx(plain, rel=1e-5)
    assert moved == compiled, "to the bit"
    assert len(set(plain)) == 3


def _forward_step(model: nn.Module, batch: dict[str, Any]) -> Tensor:
    return loss_of(model, int(batch["seed"]))


def _trained_elsewhere() -> list[list[float]]:
    with _folder_without_blanks():
        return _trained()


def _trained() -> list[list[float]]:
    """The losses of an engine's steps: as ever, compiled, and with activations in host memory."""
    moving = {
        "activation_offload": True,
        "activation_offload_gib": 0.01,
        "activation_offload_min_kib": 0.25,
    }
    found = []
    for execution in (
        ExecutionConfig(),
        ExecutionConfig(compile_layers=True),
        ExecutionConfig(compile_layers=True, **moving),
    ):
        config = EngineConfig(
            OptimizerConfig(optimizer_cpu_offload=True),
            LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
            DataParallelConfig(),
            train_iters=3,
            execution=execution,
        )
        engine = MegatronEngine(config, Device("cpu"), build_mesh("cpu", 1))
        engine.initialize(lambda: build(**MODELS["recomputed, dropout"]))
        batches = [{"seed": torch.tensor([number])} for number in range(3)]
        found.append([engine.train_batch([batch], _forward_step).loss for batch in batches])
        assert (engine.activations is not None) == execution.activation_offload
        if engine.activations is not None:
            assert engine.activations.peak_nbytes > 0
    return found


def test_a_machine_without_a_compiler_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(ConfigError, match=r"a C\+\+ compiler, .* no (g|clang)\+\+ in"):
        compile_layers(build())
    check_compiler(["a kind with kernels of its own"])
    if importlib.util.find_spec("triton"):
        with pytest.raises(ConfigError, match=r"--compile-layers: .* no gcc or clang"):
            check_compiler(["cuda"])


def test_cache_directories_with_spaces_are_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "/nowhere/a b")
    with pytest.raises(ConfigError, match=r"TORCHINDUCTOR_CACHE_DIR is '/nowhere/a b'"):
        compile_layers(build())
    monkeypatch.setattr(tempfile, "tempdir", "/nowhere/a b")
    with pytest.raises(ConfigError, match=r"TMPDIR is '/nowhere/a b'"):
        compile_layers(build())


@pytest.mark.parametrize("name", ["self_attention", "mlp.linear_fc1"])
def test_hooks_within_a_layer_are_rejected(name: str) -> None:
    model = build()
    module = model.decoder.layers[1].get_submodule(name)
    module.register_forward_pre_hook(lambda *_: None)
    with pytest.raises(ConfigError, match=f"got hooks of {type(module).__name__} within one"):
        compile_layers(model)
    assert all(layer.compiled is None for layer in model.decoder.layers)


def test_hooks_within_a_mixture_of_experts_stay() -> None:
    model = build(**LLAMA, num_experts=4, moe_router_topk=2)
    model.decoder.layers[1].mlp.experts.register_forward_pre_hook(lambda *_: None)
    assert compile_layers(model) == 3
