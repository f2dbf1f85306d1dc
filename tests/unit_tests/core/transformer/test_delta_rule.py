"""The chunked gated delta rule is the recurrence in its formula."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatron.core.distributed.config import ALL_GATHER
from megatron.core.distributed.context import PositionExchange
from megatron.core.transformer import delta_rule
from megatron.core.transformer.delta_rule import gated_delta_rule
from megatron.core.transformer.sequence_slice import SequenceSlice
from tests.helpers.ranks import on_ranks

NAMES = ("output", "query", "key", "value", "log_decay", "beta")


def _recurrence(
    query: Tensor, key: Tensor, value: Tensor, log_decay: Tensor, beta: Tensor
) -> Tensor:
    """Position by position, in the dtype of its inputs."""
    repeats = value.shape[2] // key.shape[2]
    query, key = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(repeats, dim=2)
        for x in (query, key)
    )
    state = value.new_zeros(*value.shape[::2], key.shape[3], value.shape[3])
    outputs = []
    for t in range(value.shape[1]):
        state = state * log_decay[:, t].exp()[..., None, None]
        answer = torch.einsum("bhkv,bhk->bhv", state, key[:, t])
        correction = beta[:, t].unsqueeze(-1) * (value[:, t] - answer)
        state = state + torch.einsum("bhk,bhv->bhkv", key[:, t], correction)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, query[:, t]) * key.shape[3] ** -0.5)
    return torch.stack(outputs, 1)


def _inputs(
    seed: int, length: int, heads: tuple[int, int] = (2, 4), dims: tuple[int, int] = (8, 12)
) -> list[Tensor]:
    """Random inputs for two sequences. Some positions forget everything and some keep all, some do
    not write and some write all; others are in between.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(2, length, *shape, generator=generator)

    (key_heads, value_heads), (key_dim, value_dim) = heads, dims
    # Their scale reaches from 1e-4 to 1e3, whose exp is zero.
    log_decay = -(10 ** (normal(value_heads).sigmoid() * 14 - 8).clamp(1e-4, 1e3))
    beta = (normal(value_heads) * 10).sigmoid()
    # Some keys are like others, so that the triangular system has large entries.
    key = normal(key_heads, key_dim) + 2 * normal(key_heads, 1).sign()
    return [normal(key_heads, key_dim), key, normal(value_heads, value_dim), log_decay, beta]


def _with_gradients(
    rule: Callable[..., Tensor], inputs: Sequence[Tensor], dtype: torch.dtype, weights: Tensor
) -> list[Tensor]:
    """The rule's output, and the gradients of sum(output * weights), in fp64."""
    leaves = [x.to(dtype).requires_grad_() for x in inputs]
    output = rule(*leaves)
    assert output.dtype == dtype
    gradients = torch.autograd.grad(output, leaves, weights.to(dtype))
    assert [gradient.dtype for gradient in gradients] == [dtype] * 5
    return [x.detach().double() for x in (output, *gradients)]


def _errors(inputs: Sequence[Tensor], dtype: torch.dtype, **options: int) -> dict[str, float]:
    """The largest error of each result, relative to the result's largest element."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(inputs[2].shape, generator=generator).to(dtype)
    inputs = [x.to(dtype) for x in inputs]
    found = _with_gradients(lambda *x: gated_delta_rule(*x, **options), inputs, dtype, weights)
    expected = _with_gradients(_recurrence, inputs, torch.float64, weights)
    return {
        name: ((a - b).abs().max() / b.abs().max().clamp_min(1e-30)).item()
        for name, a, b in zip(NAMES, found, expected, strict=True)
    }


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1000),
    length=st.integers(1, 150),
    chunk_size=st.sampled_from([1, 5, 16, 64]),
    heads=st.sampled_from([(1, 1), (1, 3), (2, 4)]),
    segment_numel=st.sampled_from([1, 6000, 1 << 19]),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
@example(0, 1, 64, (2, 4), 1 << 19, torch.float32)
@example(0, 64, 64, (2, 4), 1 << 19, torch.float32)
@example(0, 150, 16, (2, 4), 6000, torch.float64)
def test_chunks_match_the_recurrence_in_forward_and_backward(
    seed: int,
    length: int,
    chunk_size: int,
    heads: tuple[int, int],
    segment_numel: int,
    dtype: torch.dtype,
) -> None:
    with mock.patch.object(delta_rule, "segment_numel", return_value=segment_numel):
        errors = _errors(_inputs(seed, length, heads), dtype, chunk_size=chunk_size)
    bound = 1e-5 if dtype == torch.float32 else 1e-12
    assert max(errors.values()) < bound, errors


@pytest.mark.parametrize("numel", [1, 6000])
@on_ranks(3)
def test_slices_match_whole_sequences_in_forward_and_backward(numel: int) -> None:
    rank, inputs = dist.get_rank(), _inputs(2, 150)
    # The state reaches over all slices, but for two heads that forget it in the second one.
    inputs[3].clamp_(min=-0.02)
    inputs[3][:, 70, 2:] = -torch.inf
    weights = torch.randn(inputs[2].shape, generator=torch.Generator().manual_seed(4)).double()
    expected = _with_gradients(gated_delta_rule, inputs, torch.float64, weights)

    part = SequenceSlice(rank, 3, Tensor.clone)
    exchange = PositionExchange(part, dist.group.WORLD, ALL_GATHER)
    rule = partial(gated_delta_rule, chunk_size=7, exchange=exchange)
    own, (own_weights, *wanted) = (
        [whole.chunk(3, dim=1)[rank] for whole in tensors]
        for tensors in (inputs, [weights, *expected])
    )
    with mock.patch.object(delta_rule, "segment_numel", return_value=numel):
        found = _with_gradients(rule, own, torch.float64, own_weights)
    for name, a, b in zip(NAMES, found, wanted, strict=True):
        assert (a - b).abs().max() < 1e-12 * b.abs().max(), name


@pytest.mark.gpu
@pytest.mark.parametrize("numel", [6000, 1 << 24])
def test_a_gpu_matches_the_cpu(monkeypatch: pytest.MonkeyPatch, numel: int) -> None:
    inputs, weights = _inputs(0, 300), torch.ones(2, 300, 4, 12)
    expected = _with_gradients(gated_delta_rule, inputs, torch.float64, weights)
    monkeypatch.setattr(delta_rule, "segment_numel", lambda _: numel)
    moved = [part.cuda() for part in inputs]
    found = _with_gradients(gated_delta_rule, moved, torch.float32, weights.cuda())
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert (a.cpu() - b).abs().max() <= 1e-5 * b.abs().max(), name


@pytest.mark.parametrize("log_decay", [0.0, -1e-6, -80.0, -1e30, -torch.inf])
@pytest.mark.parametrize("beta", [0.0, 1e-6, 1.0])
def test_every_gate_may_be_at_its_end(log_decay: float, beta: float) -> None:
    inputs = _inputs(1, 70)
    inputs[3][:, ::2] = log_decay
    inputs[4][:, 1:] = beta
    # -inf is no number to the reference: its gradient there would be 0 * inf.
    reference = [*inputs[:3], inputs[3].clamp_min(-1e30), inputs[4]]
    found = _with_gradients(gated_delta_rule, inputs, torch.float32, torch.ones(2, 70, 4, 12))
    expected = _with_gradients(_recurrence, reference, torch.float64, torch.ones(2, 70, 4, 12))
    for name, a, b in zip(NAMES, found, expected, strict=True):
        assert (a - b).abs().max() <= 1e-5 * b.abs().max(), name


def test_equal_keys_that_overwrite_each_other_are_no_harder_than_others() -> None:
    """The system's entries are as large as they can be."""
    query, key, value, log_decay, beta = _inputs(2, 128)
    inputs = [query, key[:, :1].expand_as(key), value, log_decay * 0, torch.full_like(beta, 0.98)]
    errors = _errors(inputs, torch.float32)
    # Overwritten values need not decay: the gradient of decays is a small difference of large
    # numbers, and the recurrence has an error of 5e-5 too when it is computed in fp32.
    assert errors.pop("log_decay") < 1e-3
    assert max(errors.values()) < 1e-5


def test_decays_behind_a_position_that_forgets_everything_keep_their_precision() -> None:
    """Sums of log decays in fp32 would lose them: after -1e4 its steps are 1e-3."""
    inputs = _inputs(3, 64)
    inputs[3] = torch.full_like(inputs[3], -1e-3)
    inputs[3][:, :32] = -300.0
    assert max(_errors(inputs, torch.float32).values()) < 1e-5


@pytest.mark.parametrize(("dtype", "bound"), [(torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)])
def test_inputs_of_16_bits_add_one_rounding(dtype: torch.dtype, bound: float) -> None:
    for seed in range(2):
        errors = _errors(_inputs(seed, 130, dims=(32, 32)), dtype)
        # Not without an error either, or the reference would be rounded too.
        assert bound / 16 < max(errors.values()) < bound, errors


def test_autocast_changes_no_bit_forward_or_backward() -> None:
    inputs = [x.requires_grad_() for x in _inputs(5, 70)]
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            output = gated_delta_rule(*inputs)
            results.append([output, *torch.autograd.grad(output.sum(), inputs)])
    for a, b in zip(*results, strict=True):
        assert torch.equal(a, b)


def _saved_for_backward(length: int, **shape: tuple[int, int]) -> list[Tensor]:
    """What forward keeps besides its inputs."""
    inputs = [x.bfloat16().requires_grad_() for x in _inputs(0, length, **shape)]
    saved: list[Tensor] = []

    def pack(x: Tensor) -> Tensor:
        saved.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        gated_delta_rule(*inputs)
    own = {x.data_ptr() for x in inputs}
    return [x for x in saved if x.data_ptr() not in own]


def test_only_the_state_before_each_segment_is_kept_for_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chunk_numel = 8 * (64 * (8 + 12) + 8 * 12)
    monkeypatch.setattr(delta_rule, "segment_numel", lambda _: 2 * chunk_numel)
    for length, num_segments in ((64, 1), (128, 1), (129, 2), (512, 4), (1024, 8)):
        (states,) = _saved_for_backward(length)
        assert states.shape == (num_segments, 8, 8, 12)


class Operations(TorchDispatchMode):
    """Counts the operations that launch kernels, and remembers the largest result's bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.count = self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not func.is_view:
            self.count += 1
            parts = (part for part in tree_leaves(result) if isinstance(part, Tensor))
            self.nbytes = max(self.nbytes, *(part.nbytes for part in parts), 0)
        return result


def _operations(monkeypatch: pytest.MonkeyPatch, device_kind: str) -> tuple[Operations, Operations]:
    """Forward's and backward's for 4,096 positions of Qwen3-Next, in the segments of a device of
    this kind. Meta tensors replace the device's.
    """
    numel = delta_rule.segment_numel(device_kind)
    with monkeypatch.context() as patch, Operations() as forward:
        patch.setattr(delta_rule, "segment_numel", lambda _: numel)
        shapes = ((16, 128), (16, 128), (32, 128), (32,), (32,))
        inputs = [
            torch.empty(1, 4096, *shape, device="meta", dtype=torch.bfloat16, requires_grad=True)
            for shape in shapes
        ]
        output = gated_delta_rule(*inputs)
        gradient = torch.empty_like(output)
        with Operations() as backward:
            output.backward(gradient)
    return forward, backward


def test_an_accelerator_takes_a_fifth_of_the_operations_of_a_cpu(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_cpu, on_device = (_operations(monkeypatch, kind) for kind in ("cpu", "cuda"))
    for few, many in zip(on_device, on_cpu, strict=True):
        assert few.count < many.count / 5


def test_backward_copies_no_more_states_than_a_segment_has(monkeypatch: pytest.MonkeyPatch) -> None:
    _, backward = _operations(monkeypatch, "cpu")
    gradient = 4096 * 32 * 128 * 2
    assert backward.nbytes == gradient < delta_rule.state_nbytes(4096, 32, 128, 128, "cpu")


@pytest.mark.parametrize("device_kind", ["cpu", "cuda"])
def test_the_planned_states_match_the_states_of_the_device(
    monkeypatch: pytest.MonkeyPatch, device_kind: str
) -> None:
    numel = delta_rule.segment_numel(device_kind)
    monkeypatch.setattr(delta_rule, "segment_numel", lambda _: numel)
    (states,) = _saved_for_backward(2048, heads=(4, 64), dims=(32, 64))
    monkeypatch.undo()
    assert states.nbytes == delta_rule.state_nbytes(2048, 2 * 64, 32, 64, device_kind)


def test_empty_inputs_give_empty_outputs() -> None:
    for shape in ((0, 5), (2, 0)):
        query, key, value = (torch.randn(*shape, 2, 4, requires_grad=True) for _ in range(3))
        gates = torch.zeros(*shape, 2)
        output = gated_delta_rule(query, key, value, gates, gates)
        output.sum().backward()
        assert output.shape == query.grad.shape == (*shape, 2, 4)


def test_inputs_that_do_not_fit_are_rejected() -> None:
    query, key, value, log_decay, beta = _inputs(0, 4)
    with pytest.raises(ValueError, match=r"got .*\(2, 4, 3\)"):
        gated_delta_rule(query, key, value, log_decay, beta[..., :3])
    with pytest.raises(ValueError, match="Expected queries and keys"):
        gated_delta_rule(query[..., :3], key, value, log_decay, beta)
    with pytest.raises(ValueError, match="a multiple of the 2 key heads as value heads, got 3"):
        gated_delta_rule(query, key, value[:, :, :3], log_decay[..., :3], beta[..., :3])
    with pytest.raises(ValueError, match="a chunk size of at least 1, got 0"):
        gated_delta_rule(query, key, value, log_decay, beta, chunk_size=0)


def test_zero_keys_and_queries_have_finite_gradients() -> None:
    inputs = _inputs(4, 10)
    inputs[0][:, 3] = 0
    inputs[1][:, 3] = 0
    assert max(_errors(inputs, torch.float32).values()) < 1e-5


def test_values_alone_may_be_of_another_dtype() -> None:
    inputs = _inputs(5, 20)
    mixed = [x.bfloat16() for x in inputs[:3]] + inputs[3:]
    leaves = [x.requires_grad_() for x in mixed]
    output = gated_delta_rule(*leaves)
    output.sum().backward()
    assert output.dtype == torch.bfloat16
    assert [x.grad.dtype for x in leaves] == [torch.bfloat16] * 3 + [torch.float32] * 2
