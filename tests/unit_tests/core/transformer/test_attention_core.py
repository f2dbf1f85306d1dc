"""The core of attention, against the formula over all pairs of positions."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import megatron.core.transformer.attention_core as core
from megatron.core.drivers import CudaDriver, Driver
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.attention_core import attend
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.spec import AttentionSpec, Sinks

BASE = AttentionSpec(num_heads=4, num_key_value_heads=2, head_dim=8, scale=0.3)
WINDOW = replace(BASE, window=5)
SINKS = replace(BASE, sinks=Sinks.LEARNED)
WINDOW_AND_SINKS = replace(WINDOW, sinks=Sinks.LEARNED)
SOFTCAP = replace(WINDOW_AND_SINKS, softcap=2.0)


def _inputs(spec: AttentionSpec, seq_length: int, batch: int = 2, seed: int = 0) -> list[Tensor]:
    """Queries, keys, values and, where they are learned, sinks."""
    generator = torch.Generator().manual_seed(seed)
    heads = (spec.num_heads, spec.num_key_value_heads, spec.num_key_value_heads)
    inputs = [
        torch.randn(batch, num, seq_length, spec.head_dim, generator=generator) * 1.5
        for num in heads
    ]
    if spec.sinks is Sinks.LEARNED:
        inputs.append(torch.randn(spec.num_heads, generator=generator))
    return [part.requires_grad_() for part in inputs]


def _formula(
    query: Tensor, key: Tensor, value: Tensor, spec: AttentionSpec, sinks: Tensor | None = None
) -> Tensor:
    """Attention by its definition, in fp64."""
    repeats = spec.num_heads // spec.num_key_value_heads
    query, key, value = (part.double() for part in (query, key, value))
    key, value = (part.repeat_interleave(repeats, dim=1) for part in (key, value))
    scores = torch.einsum("bhqd,bhkd->bhqk", query, key) * spec.scale
    if spec.softcap is not None:
        scores = spec.softcap * torch.tanh(scores / spec.softcap)

    seq_length = query.shape[2]
    hidden = torch.ones(seq_length, seq_length).triu(1).bool()
    if spec.window is not None:
        hidden |= torch.ones(seq_length, seq_length).tril(-spec.window).bool()
    scores = scores.masked_fill(hidden, -math.inf)

    if spec.sinks is not Sinks.NONE:
        logits = torch.zeros(spec.num_heads) if sinks is None else sinks
        column = logits.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, column), dim=-1)
    return torch.einsum("bhqk,bhkd->bhqd", scores.softmax(-1)[..., :seq_length], value)


def _attend(inputs: list[Tensor], spec: AttentionSpec, dropout: float = 0.0) -> Tensor:
    query, key, value, *sinks = inputs
    return attend(query, key, value, spec, sinks[0] if sinks else None, dropout)


def _assert_equals_the_formula(inputs: list[Tensor], spec: AttentionSpec) -> None:
    """Output and gradients."""
    query, key, value, *sinks = inputs
    expected = _formula(query, key, value, spec, *sinks)
    output = _attend(inputs, spec)
    assert output.dtype == query.dtype
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(1))
    got = torch.autograd.grad((output * weights).sum(), inputs)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    for one, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5 * float(other.abs().max() + 1))


specs = st.builds(
    lambda groups, repeats, window, sinks, softcap: AttentionSpec(
        num_heads=groups * repeats,
        num_key_value_heads=groups,
        head_dim=8,
        scale=0.3,
        window=window,
        sinks=sinks,
        softcap=softcap,
    ),
    groups=st.integers(1, 3),
    repeats=st.integers(1, 3),
    window=st.none() | st.integers(1, 40),
    sinks=st.sampled_from(Sinks),
    softcap=st.none() | st.sampled_from([1.0, 30.0]),
)


@settings(deadline=None, max_examples=80)
@given(
    spec=specs,
    seq_length=st.integers(1, 70),
    rows=st.integers(1, 20),
    has_grouped_kernel=st.booleans(),
    seed=st.integers(0, 2**31),
)
def test_output_and_gradients_match_the_formula(
    spec: AttentionSpec, seq_length: int, rows: int, has_grouped_kernel: bool, seed: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "_FEWEST_ROWS", rows)
        patch.setattr(core, "_SCORE_ROWS", rows)
        patch.setattr(core, "_has_grouped_kernel", lambda *_: has_grouped_kernel)
        _assert_equals_the_formula(_inputs(spec, seq_length, seed=seed), spec)


@pytest.mark.parametrize("window", [None, 1, 63, 200, 512, 599, 600, 601])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_blocks_of_full_size_give_the_formula(window: int | None, softcap: float | None) -> None:
    spec = replace(SINKS, window=window, softcap=softcap)
    _assert_equals_the_formula(_inputs(spec, 600, batch=1), spec)


@pytest.mark.parametrize("spec", [BASE, SINKS, SOFTCAP])
@pytest.mark.parametrize("window", [None, 7, 200, 699])
@pytest.mark.parametrize("num_queries", [1, 300, 600])
def test_queries_of_the_last_positions_give_the_last_rows_of_the_formula(
    spec: AttentionSpec, window: int | None, num_queries: int
) -> None:
    spec = replace(spec, window=window)
    inputs = _inputs(spec, 700, batch=1)
    query, key, value, *sinks = inputs
    expected = _formula(query, key, value, spec, *sinks)[:, :, -num_queries:]
    output = _attend([query[:, :, -num_queries:], *inputs[1:]], spec)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)

    weights = torch.randn(expected.shape, dtype=torch.float64)
    wanted = torch.autograd.grad((expected * weights).sum(), inputs)
    found = torch.autograd.grad((output * weights).sum(), inputs)
    for ours, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("spec", [BASE, WINDOW, SINKS, WINDOW_AND_SINKS, SOFTCAP])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bits_give_the_formula_rounded(spec: AttentionSpec, dtype: torch.dtype) -> None:
    narrow = [part.detach().to(dtype) for part in _inputs(spec, 150)]
    output = _attend(narrow, spec)
    assert output.dtype == dtype
    query, key, value, *sinks = narrow
    expected = _formula(query, key, value, spec, *sinks)
    tolerance = 3 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), expected, rtol=tolerance, atol=tolerance)


def _errors_by_sink(
    sinks: list[float], dtype: torch.dtype, scale: float, softcap: float | None
) -> Tensor:
    """The largest difference to the formula of each head, whose scores are near one."""
    spec = replace(SINKS, scale=scale, softcap=softcap)
    query, key, value = (part.detach() for part in _inputs(spec, 20)[:3])
    inputs = [(query * 0.3 / scale).to(dtype), key.to(dtype), value.to(dtype), torch.tensor(sinks)]
    for part in inputs:
        part.requires_grad_()
    expected = _formula(*inputs[:3], spec, inputs[3])
    output = _attend(inputs, spec)
    output.float().sum().backward()
    assert all(part.grad.isfinite().all() for part in inputs)
    return (output - expected).abs().amax((0, 2, 3))


@pytest.mark.parametrize("softcap", [None, 30.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_sink_may_be_absent_or_large_in_every_dtype(
    dtype: torch.dtype, softcap: float | None
) -> None:
    bound = 16 * torch.finfo(dtype).eps
    for sinks in ([-math.inf, -3e38, -6000.0, 1.0], [3e38, 6000.0, 60.0, -60.0]):
        for scale in (1 / 16, 0.3, 2.0):
            assert _errors_by_sink(sinks, dtype, scale, softcap).max() < bound


def test_capped_scores_are_fp32_under_autocast() -> None:
    query, key = (part.detach() for part in _inputs(SOFTCAP, 20)[:2])
    expected = core._scores(query, key, SOFTCAP.scale)
    with torch.autocast("cpu", torch.bfloat16):
        assert (query @ query.mT).dtype == torch.bfloat16
        assert torch.equal(core._scores(query, key, SOFTCAP.scale), expected)


@pytest.mark.parametrize("spec", [BASE, WINDOW, SINKS, WINDOW_AND_SINKS, SOFTCAP])
@pytest.mark.parametrize("position", [0, 3, 70, 149])
def test_a_position_reaches_itself_and_those_after_it_within_the_window(
    spec: AttentionSpec, position: int
) -> None:
    query, key, value, *sinks = (part.detach() for part in _inputs(spec, 150))
    before = _attend([query, key, value, *sinks], spec)
    key, value = key.clone(), value.clone()
    key[:, :, position] += 1.0
    value[:, :, position] -= 1.0
    changed = (_attend([query, key, value, *sinks], spec) != before).any(-1)

    last = 150 if spec.window is None else position + spec.window
    expected = torch.zeros(150).bool()
    expected[position:last] = True
    assert torch.equal(changed, expected.expand_as(changed))


@pytest.mark.parametrize("spec", [WINDOW, SINKS, WINDOW_AND_SINKS, SOFTCAP])
def test_dropout_zeroes_weights_and_keeps_their_mean(spec: AttentionSpec) -> None:
    torch.manual_seed(0)
    inputs = [part.detach().repeat_interleave(500, dim=0) for part in _inputs(spec, 20, 1)[:3]]
    inputs[2] = torch.ones_like(inputs[2])
    sinks = [torch.randn(4)] if spec.sinks is Sinks.LEARNED else []
    kept = _attend([*inputs, *sinks], spec)
    dropped = _attend([*inputs, *sinks], spec, dropout=0.5)
    assert (dropped[:, :, 0] == 0).any(), "the only weight of position 0, in some of the batch"
    torch.testing.assert_close(dropped.mean(0), kept.mean(0), rtol=0, atol=0.2)


class LargestTensor(TorchDispatchMode):
    """Remembers the number of elements of the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for part in tree_leaves(result):
            if isinstance(part, Tensor):
                self.numel = max(self.numel, part.numel())
        return result


@pytest.mark.parametrize(
    ("spec", "rows"),
    [
        (SINKS, 0),
        (replace(WINDOW_AND_SINKS, window=64), 0),
        (replace(BASE, softcap=5.0), core._SCORE_ROWS),
        (replace(SOFTCAP, window=64), 0),
    ],
)
def test_no_tensor_holds_the_scores_of_all_pairs_of_positions(
    spec: AttentionSpec, rows: int
) -> None:
    spec, seq_length = replace(spec, num_heads=1, num_key_value_heads=1), 2048
    inputs = _inputs(spec, seq_length, batch=1)
    with LargestTensor() as largest:
        _attend(inputs, spec).sum().backward()
    assert largest.numel <= max(rows * seq_length, 64 * seq_length) < seq_length**2 / 4

    with LargestTensor() as largest:
        _formula(*inputs[:3], spec, *inputs[3:])
    assert largest.numel >= seq_length**2, "the formula holds them"


class FusedCalls(TorchFunctionMode):
    """Remembers the number of key heads of each call of the fused attention, and whether queries
    are grouped in it; and the channels of a query and of a value.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, bool]] = []
        self.widths: list[tuple[int, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.seen.append((args[1].shape[1], kwargs["enable_gqa"]))
            self.widths.append((args[0].shape[-1], args[2].shape[-1]))
        return func(*args, **(kwargs or {}))


class OldDriver(Driver):
    """Of an accelerator for which there is no FlashAttention."""

    def flash_head_dim(self, index: int) -> int:  # noqa: ARG002
        return 0


@pytest.mark.parametrize(
    ("device", "dtype", "causal", "masked"),
    [
        ("meta", torch.float32, (4, False), (4, False)),
        ("meta", torch.bfloat16, (2, True), (4, False)),
        ("meta", torch.float16, (2, True), (4, False)),
        ("cpu", torch.float32, (2, True), (2, True)),
        ("cpu", torch.bfloat16, (2, True), (2, True)),
    ],
)
def test_keys_are_repeated_only_where_no_fused_kernel_takes_grouped_queries(
    device: str, dtype: torch.dtype, causal: tuple[int, bool], masked: tuple[int, bool]
) -> None:
    """Meta tensors replace an accelerator's: only their device is different here."""
    inputs = [part.detach().to(device=device, dtype=dtype) for part in _inputs(WINDOW, 9)]
    with FusedCalls() as calls:
        _attend(inputs, BASE)
        _attend(inputs, WINDOW)
    assert calls.seen == [causal, causal, masked]


def _is_grouped(spec: AttentionSpec) -> bool:
    """Whether queries are, in a call on an accelerator."""
    inputs = [part.detach().to("meta", torch.bfloat16) for part in _inputs(spec, 3, batch=1)]
    with FusedCalls() as calls:
        _attend(inputs, spec)
    [(_, is_grouped)] = calls.seen
    return is_grouped


def test_keys_of_heads_too_large_for_flash_attention_are_repeated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert _is_grouped(replace(BASE, head_dim=256))
    assert not _is_grouped(replace(BASE, head_dim=264))
    assert _is_grouped(replace(SINKS, head_dim=248))
    assert not _is_grouped(replace(SINKS, head_dim=256)), "the sink's channels count"

    monkeypatch.setattr(core, "kernels_of", OldDriver)
    assert not _is_grouped(BASE)


@pytest.mark.parametrize(
    ("device", "dtype", "widths"),
    [
        ("meta", torch.float32, (8, 5)),
        ("meta", torch.bfloat16, (8, 8)),
        ("cpu", torch.float32, (8, 8)),
        ("cpu", torch.bfloat16, (8, 8)),
    ],
)
def test_values_are_widened_only_for_kernels_that_want_one_width(
    device: str, dtype: torch.dtype, widths: tuple[int, int]
) -> None:
    inputs = [part.detach().to(device=device, dtype=dtype) for part in _inputs(BASE, 9)]
    inputs[2] = inputs[2][..., :5]
    with FusedCalls() as calls:
        assert _attend(inputs, BASE).shape[-1] == 5
    assert calls.widths == [widths]


@pytest.mark.parametrize("scale", [3e-4, 1e3])
def test_a_sink_keeps_its_logit_regardless_of_the_scale(scale: float) -> None:
    """Divided by the small one, the logits would be beyond the range of fp16."""
    errors = _errors_by_sink([-20.0, 0.5, 2.0, 25.0], torch.float16, scale, None)
    assert errors.max() < 8 * torch.finfo(torch.float16).eps


class CudaOnCpu(CudaDriver):
    """NVIDIA's driver, asked about tensors on the CPU."""

    def __init__(self, _: torch.device) -> None:
        super().__init__()

    def flash_head_dim(self, index: int) -> int:  # noqa: ARG002
        return 256


@pytest.mark.parametrize("granularity", [None, "selective"])
def test_documents_use_no_kernel_that_is_built_for_each_shape_in_recomputation_neither(
    monkeypatch: pytest.MonkeyPatch, granularity: str | None
) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(
        BASE, 32, init_std=0.3, output_init_std=0.3, recompute_granularity=granularity
    )
    hidden, runs = torch.randn(1, 12, 32), 1 if granularity is None else 2
    documents = Documents((5, 4, 3))
    expected = attention(hidden, documents=documents)

    fused, may_use_cudnn = core.F.scaled_dot_product_attention, []

    def watched(*args: Any, **options: Any) -> Tensor:
        may_use_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
        return fused(*args, **options)

    monkeypatch.setattr(core, "kernels_of", CudaOnCpu)
    monkeypatch.setattr(core.F, "scaled_dot_product_attention", watched)  # in backward too
    output = attention(hidden, documents=documents)
    output.sum().backward()
    assert may_use_cudnn == [False] * 3 * runs
    assert torch.equal(output, expected)

    may_use_cudnn.clear()
    attention(hidden).sum().backward()
    assert may_use_cudnn == [True] * runs, "rows have one shape, and may use any kernel"


def test_values_keep_their_width_where_a_kernel_takes_two(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSeek's heads: 192 channels in queries and keys, 128 in values."""
    spec = replace(BASE, num_key_value_heads=4, head_dim=192)
    inputs = [part.detach() for part in _inputs(spec, 9)]
    inputs[2] = inputs[2][..., :128]
    with FusedCalls() as calls:
        expected = _attend(inputs, spec)
    assert calls.widths == [(192, 192)]

    class TakesTwoWidths(CudaOnCpu):
        def takes_two_widths(self, *asked: Any) -> bool:
            *heads, dropout, is_causal = asked
            assert [head.shape[-1] for head in heads] == [192, 192, 128]
            assert (dropout, is_causal) == (0.0, True)
            return True

    monkeypatch.setattr(core, "kernels_of", TakesTwoWidths)
    with FusedCalls() as calls:
        found = _attend(inputs, spec)
    assert calls.widths == [(192, 128)]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("documents", [None, Documents((300, 212))])
def test_on_a_gpu_values_in_their_own_width_give_what_padded_ones_do(
    documents: Documents | None,
) -> None:
    spec = replace(BASE, num_key_value_heads=4, head_dim=192, scale=192**-0.5)
    heads = [part.detach().to("cuda", torch.bfloat16) for part in _inputs(spec, 512, batch=1)]
    results = []
    for width in (128, 192):
        query, key, value = (part.clone().requires_grad_() for part in heads)
        narrow = torch.nn.functional.pad(value[..., :128], (0, width - 128))
        output = attend(query, key, narrow, spec, documents=documents)[..., :128]
        output.sum().backward()
        results.append([output.detach(), query.grad, key.grad, value.grad])
    for found, expected in zip(*results, strict=True):
        difference = (found.float() - expected.float()).abs().max()
        assert difference <= 0.02 * expected.float().abs().max(), "sums of bf16 in two orders"
