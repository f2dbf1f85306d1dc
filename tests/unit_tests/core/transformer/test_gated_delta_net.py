"""GatedDeltaNet, and the parts it is made of."""

from __future__ import annotations

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.drivers import Driver
from megatron.core.fp32_module import Fp32Module
from megatron.core.materialize import materialize
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.torch_optimizer import parameter_groups
from megatron.core.transformer import gated_delta_net
from megatron.core.transformer.delta_rule import gated_delta_rule
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.gated_delta_net import Decay, GatedDeltaNet
from megatron.core.transformer.spec import GatedDeltaNetSpec

SPEC = GatedDeltaNetSpec(2, 6, key_head_dim=8, value_head_dim=12, conv_kernel=4, norm_eps=1e-6)
HIDDEN = 32


def _net(spec: GatedDeltaNetSpec = SPEC, seed: int = 0) -> GatedDeltaNet:
    """With weights large enough for gates and decays to differ."""
    torch.manual_seed(seed)
    net = GatedDeltaNet(spec, HIDDEN, init_std=0.3, output_init_std=0.3)
    nn.init.normal_(net.out_norm.weight, 1.0, 0.2)
    return net


def _transformers_module(net: GatedDeltaNet) -> nn.Module:
    """The transformers library's module with the net's weights."""
    pytest.importorskip("transformers", minversion="5.2")
    qwen = pytest.importorskip("transformers.models.qwen3_5.modeling_qwen3_5")
    spec = net.spec
    config = qwen.Qwen3_5TextConfig(
        hidden_size=HIDDEN,
        num_hidden_layers=1,
        layer_types=["linear_attention"],
        linear_num_key_heads=spec.num_key_heads,
        linear_num_value_heads=spec.num_value_heads,
        linear_key_head_dim=spec.key_head_dim,
        linear_value_head_dim=spec.value_head_dim,
        linear_conv_kernel_dim=spec.conv_kernel,
        rms_norm_eps=spec.norm_eps,
    )
    rows = {name: slice(*net.in_proj.fused.row_range(name)) for name in net.in_proj.fused.names}
    weight = net.in_proj.weight
    module: nn.Module = qwen.Qwen3_5GatedDeltaNet(config, layer_idx=0)
    module.load_state_dict(
        {
            "in_proj_qkv.weight": weight[: rows["value"].stop],
            "in_proj_z.weight": weight[rows["z"]],
            "in_proj_b.weight": weight[rows["beta"]],
            "in_proj_a.weight": weight[rows["alpha"]],
            "conv1d.weight": net.conv1d.weight,
            "A_log": net.decay.A_log,
            "dt_bias": net.decay.dt_bias,
            "norm.weight": net.out_norm.weight,
            "out_proj.weight": net.out_proj.weight,
        }
    )
    return module


@pytest.mark.parametrize(("key_heads", "value_heads"), [(2, 6), (4, 4)])
def test_the_net_computes_what_the_transformers_library_computes(
    key_heads: int, value_heads: int
) -> None:
    net = _net(GatedDeltaNetSpec(key_heads, value_heads, 8, 12, 4, 1e-6))
    theirs = _transformers_module(net)
    hidden = torch.randn(2, 150, HIDDEN, requires_grad=True)
    weights = torch.randn(2, 150, HIDDEN)

    results = []
    for module in (net, theirs):
        output = module(hidden)
        (gradient,) = torch.autograd.grad((output * weights).sum(), hidden, retain_graph=True)
        output.mul(weights).sum().backward()
        results.append((output, gradient))
        hidden.grad = None
    for ours, other in zip(*results, strict=True):
        assert (ours - other).abs().max() < 1e-5 * other.abs().max()

    pairs = [
        (net.decay.A_log, theirs.A_log),
        (net.decay.dt_bias, theirs.dt_bias),
        (net.conv1d.weight, theirs.conv1d.weight),
        (net.out_norm.weight, theirs.norm.weight),
        (net.out_proj.weight, theirs.out_proj.weight),
    ]
    for ours, other in pairs:
        assert (ours.grad - other.grad).abs().max() < 1e-4 * other.grad.abs().max()


def test_decay_follows_its_formula_in_fp32() -> None:
    decay = Decay(4)
    alpha = torch.randn(2, 5, 4).bfloat16()
    expected = -decay.A_log.double().exp() * F.softplus(alpha.double() + decay.dt_bias.double())
    found = decay(alpha)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), expected, rtol=1e-6, atol=0)


def test_decays_start_with_published_rates_and_time_steps_in_fp32() -> None:
    torch.manual_seed(0)
    decay = Decay(2000)
    rates, steps = decay.A_log.exp(), F.softplus(decay.dt_bias)
    assert isinstance(decay, Fp32Module)
    assert rates.min() >= 0.999
    assert rates.max() <= 16.001
    assert rates.mean().item() == pytest.approx(8.5, rel=0.05)
    assert steps.min() >= 0.000999
    assert steps.max() <= 0.1001
    assert steps.log().exp().median().item() == pytest.approx(0.01, rel=0.1)


def test_weights_on_meta_materialize_and_only_matrices_decay() -> None:
    with torch.device("meta"):
        net = GatedDeltaNet(SPEC, HIDDEN, init_std=0.02, output_init_std=0.01)
    materialize(net, "cpu", seed=1)
    assert net(torch.randn(1, 3, HIDDEN)).isfinite().all()
    assert net.in_proj.weight.std().item() == pytest.approx(0.02, rel=0.1)
    assert net.out_proj.weight.std().item() == pytest.approx(0.01, rel=0.1)

    names = {id(parameter): name for name, parameter in net.named_parameters()}
    decayed, kept = parameter_groups(net, OptimizerConfig(weight_decay=0.1))
    assert [names[id(p)] for p in decayed["params"]] == [
        "in_proj.weight",
        "conv1d.weight",
        "out_proj.weight",
    ]
    assert [names[id(p)] for p in kept["params"]] == [
        "decay.A_log",
        "decay.dt_bias",
        "out_norm.weight",
    ]


def test_betas_are_not_rounded_to_the_weights_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    betas: list[Tensor] = []

    def rule(q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, beta: Tensor) -> Tensor:
        betas.append(beta)
        return gated_delta_rule(q, k, v, log_decay, beta)

    monkeypatch.setattr(gated_delta_net, "gated_delta_rule", rule)
    net = _net().bfloat16()
    hidden = torch.randn(2, 40, HIDDEN).bfloat16()
    net(hidden)
    rows = slice(*net.in_proj.fused.row_range("beta"))
    (beta,) = betas
    assert torch.equal(beta, net.in_proj(hidden)[..., rows].float().sigmoid())
    assert not torch.equal(beta, beta.bfloat16().float())


class FakeKernel:
    """Replaces the kernel of fla: the same signature, our arithmetic."""

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        *,
        use_qk_l2norm_in_kernel: bool = False,
        cu_seqlens: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert use_qk_l2norm_in_kernel
        assert q.dtype == k.dtype == v.dtype == beta.dtype != torch.float32
        assert q.shape[2] == k.shape[2] == v.shape[2]
        assert g.dtype == torch.float32
        self.shapes.append(tuple(q.shape))
        if cu_seqlens is None:
            return gated_delta_rule(q, k, v, g, beta), None
        assert len(q) == 1
        lengths = cu_seqlens.diff().tolist()
        parts = zip(*(x.split(lengths, dim=1) for x in (q, k, v, g, beta)), strict=True)
        return torch.cat([gated_delta_rule(*part) for part in parts], dim=1), None


class TritonDriver(Driver):
    """Of a kind of device that Triton compiles for."""

    has_triton = True


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str], None]]:
    """Installs an fla with this source, as if Triton compiled for the CPU."""

    def install(source: str) -> None:
        folder = tmp_path / "fla" / "ops"
        folder.mkdir(parents=True)
        (folder / "gated_delta_rule.py").write_text(source)

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(gated_delta_net, "kernels_of", TritonDriver)
    monkeypatch.setattr(gated_delta_net, "why_triton_fails", lambda: None)
    gated_delta_net._fla_kernel.cache_clear()
    yield install
    gated_delta_net._fla_kernel.cache_clear()
    for name in [name for name in sys.modules if name.split(".")[0] == "fla"]:
        del sys.modules[name]


@pytest.fixture
def kernel(fla: Callable[[str], None]) -> FakeKernel:
    """The kernel of an fla that can be imported."""
    fla("chunk_gated_delta_rule = None")
    fake = FakeKernel()
    importlib.import_module("fla.ops.gated_delta_rule").chunk_gated_delta_rule = fake
    return fake


@pytest.mark.parametrize("documents", [None, Documents((7, 20, 13))])
def test_flash_linear_attention_is_used_where_it_is_installed(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch, documents: Documents | None
) -> None:
    net = _net().bfloat16()
    hidden = torch.randn(1, 40, HIDDEN).bfloat16()
    output = net(hidden, documents=documents)
    assert kernel.shapes == [(1, 40, 6, 8)]
    monkeypatch.setattr(gated_delta_net, "_suits_fla", lambda _: False)
    expected = net(hidden, documents=documents)
    assert len(kernel.shapes) == 1
    # Only beta is rounded for the kernel.
    assert (output - expected).abs().max() < 0.02 * expected.abs().max()


def test_what_its_kernels_do_not_take_is_computed_here(
    kernel: FakeKernel, monkeypatch: pytest.MonkeyPatch
) -> None:
    _net()(torch.randn(1, 5, HIDDEN))  # fp32
    wide = _net(GatedDeltaNetSpec(1, 1, 257, 8, 4, 1e-6)).bfloat16()
    wide(torch.randn(1, 5, HIDDEN).bfloat16())
    monkeypatch.setattr(gated_delta_net, "kernels_of", Driver)  # without Triton
    _net().bfloat16()(torch.randn(1, 5, HIDDEN).bfloat16())
    assert kernel.shapes == []


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("raise RuntimeError('needs another Triton\\n')", r"RuntimeError: needs another Triton\n"),
        ("", "AttributeError: module 'fla.ops.gated_delta_rule' has no"),
        (None, "ModuleNotFoundError: No module named 'fla"),
    ],
)
def test_one_line_says_why_it_is_not_used(
    fla: Callable[[str], None],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    source: str | None,
    reason: str,
) -> None:
    monkeypatch.setattr(logging.getLogger("megatron"), "propagate", True)
    if source is None:
        monkeypatch.setitem(sys.modules, "fla", None)
    else:
        fla(source)
    net = _net().bfloat16()
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            net(torch.randn(1, 5, HIDDEN).bfloat16())
    [message] = caplog.messages
    assert reason in message
