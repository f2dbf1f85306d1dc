"""`--deterministic-mode`: every kind of model trains under it, without operations that PyTorch
rejects on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import Images
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.transformer import delta_rule_segment
from megatron.core.transformer.config import TransformerConfig
from megatron.training import pretrain as pretrain_module
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.models.multimodal.helpers import vision_models
from tests.unit_tests.core.models.multimodal.helpers.their_images import GRIDS, image_batch
from tests.unit_tests.training.helpers.fake_runs import config_of

VOCAB, SEQ = 96, 40
EXPERTS = {"num_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 16}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_head_dim": 8,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 8,
}
DELTA_NETS = {
    "linear_attention_freq": "[1,0]",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense, with dropout": {"attention_dropout": 0.1, "hidden_dropout": 0.1},
    "windows and sinks": {"window_size": (15, 0), "softmax_type": "learnable"},
    "a mixture": {**EXPERTS, "moe_router_enable_expert_bias": True},
    "latent attention": LATENT,
    "delta nets": DELTA_NETS,
    "recomputed": {"recompute_granularity": "full"},
    "images": {},
}

# Operations that PyTorch rejects on a GPU; cumulative sums and the like only of floats.
REFUSED = {
    *("bincount", "histc", "kthvalue", "median", "put", "put_", "resize_"),
    *("_ctc_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "_embedding_bag_backward"),
    *("max_unpool2d", "max_unpool3d", "avg_pool3d_backward", "adaptive_max_pool2d_backward"),
    *("_adaptive_avg_pool2d_backward", "_adaptive_avg_pool3d_backward"),
    *("fractional_max_pool2d_backward", "fractional_max_pool3d_backward"),
    *("reflection_pad1d_backward", "reflection_pad2d_backward", "reflection_pad3d_backward"),
    *("upsample_linear1d_backward", "upsample_bilinear2d_backward", "upsample_bicubic2d_backward"),
    *("upsample_trilinear3d_backward", "grid_sampler_2d_backward", "grid_sampler_3d_backward"),
}
REFUSED_OF_FLOATS = {"cumsum", "cumsum_", "cumprod", "logcumsumexp", "scatter_reduce"}


class Refused(TorchDispatchMode):
    """Collects the names of operations that PyTorch would reject on a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, first = func.overloadpacket.__name__, args[0] if args else None
        is_float = isinstance(first, torch.Tensor) and first.is_floating_point()
        if name in REFUSED or (name in REFUSED_OF_FLOATS and is_float):
            self.found.add(name)
        return func(*args, **(kwargs or {}))


def _model(family: str) -> nn.Module:
    if family == "images":
        return vision_models.build()
    options = {"attention_dropout": 0.0, "hidden_dropout": 0.0, **FAMILIES[family]}
    return GPTModel(TransformerConfig(2, 32, 4, swiglu=True, **options), VOCAB)


def _batch(family: str) -> dict[str, Any]:
    if family == "images":
        own = image_batch(GRIDS[:1])
        images = {"patches": own.images.patches, "grids": own.images.grids}
        return {"tokens": own.tokens, "positions": own.positions, **images}
    generator = torch.Generator().manual_seed(5)
    return {"tokens": torch.randint(VOCAB, (2, SEQ), generator=generator)}


def _forward_step(model: nn.Module, batch: dict[str, Any]) -> torch.Tensor:
    options = {}
    if "patches" in batch:
        images = Images(batch["patches"], batch["grids"])
        options = {"images": images, "positions": batch["positions"]}
    loss = model(batch["tokens"], batch["tokens"].roll(-1, 1), **options)
    return loss.mean()


def _losses(family: str) -> list[float]:
    config = EngineConfig(
        OptimizerConfig(),
        LRScheduleConfig(lr=1e-2, lr_decay_style="constant"),
        DataParallelConfig(),
        train_iters=2,
        execution=ExecutionConfig(),
    )
    engine = build_engine(config, Device("cpu"), build_mesh("cpu", 1))
    engine.initialize(lambda: _model(family))
    torch.manual_seed(1)
    return [engine.train_batch([_batch(family)], _forward_step).loss for _ in range(2)]


def _both_ways(family: str) -> tuple[list[float], list[float], set[str]]:
    as_usual = _losses(family)
    with Device("cpu").deterministic(), Refused() as refused:
        return as_usual, _losses(family), refused.found


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_without_operations_that_are_rejected_and_to_the_cpus_bits(family):
    as_usual, losses, refused = run_ranks(1, _both_ways, family)[0]
    assert losses == as_usual
    # On the CPU the delta rule keeps its running sums; see below.
    assert refused == ({"cumsum"} if family == "delta nets" else set())


def _segments(device: str) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(2)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    query, key, value = normal(3, 2, 64, 8), normal(3, 2, 64, 8) / 3, normal(3, 2, 64, 12)
    log_decay, beta = -normal(3, 2, 64, 1).exp(), normal(3, 2, 64, 1).sigmoid()
    segment = delta_rule_segment.prepare_segment(query, key, value, log_decay, beta)
    state = normal(2, 8, 12)
    scan = delta_rule_segment.scan_segment(segment, state)
    return delta_rule_segment.segment_gradients(segment, scan, value, state)


def test_the_delta_rule_has_no_running_sums_on_other_devices():
    with Device("cpu").deterministic(), Refused() as refused:
        _segments("meta")
        assert refused.found == set()
    with Refused() as refused:
        _segments("meta")
    assert refused.found == {"cumsum"}, "elsewhere they are quicker"


class Away(torch.Tensor):
    """A tensor that seems to be on another device."""

    device = SimpleNamespace(type="away")  # type: ignore[assignment]


def test_its_running_sums_by_a_product_match_the_cpu():
    x = torch.randn(3, 2, 64, 1, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    with Device("cpu").deterministic():
        found = delta_rule_segment._running_sums(x.as_subclass(Away))
    torch.testing.assert_close(found.as_subclass(torch.Tensor), x.cumsum(2))


class StoppedError(Exception):
    """Ends `pretrain` where the process group would be made."""


@pytest.mark.parametrize(("flags", "is_on"), [((), False), (("--deterministic-mode",), True)])
def test_the_flag_holds_before_the_ranks_connect_and_until_the_run_ends(
    monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...], is_on: bool
) -> None:
    seen: list[Any] = []

    def look(*_: Any, **__: Any) -> None:
        seen.append(
            (
                torch.are_deterministic_algorithms_enabled(),
                torch.is_deterministic_algorithms_warn_only_enabled(),
            )
        )
        raise StoppedError

    monkeypatch.setattr(pretrain_module, "process_group", look)
    nothing: Callable[..., Any] = lambda *_: None  # noqa: E731
    with pytest.raises(StoppedError):
        pretrain_module.pretrain(
            config_of(*flags),
            model_provider=nothing,
            datasets_provider=nothing,
            forward_step=nothing,
            flops_per_sequence=1.0,
        )
    assert seen == [(is_on, False)]
    assert not torch.are_deterministic_algorithms_enabled()
