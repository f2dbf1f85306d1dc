"""Sorted tokens times their experts' matrices, in both ways of computing it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from megatron.core.transformer import grouped_matmul as module
from megatron.core.transformer.grouped_matmul import grouped_matmul

COUNTS = st.lists(st.sampled_from([0, 0, 1, 2, 3, 7]), min_size=1, max_size=6)


def _inputs(
    counts: list[int],
    dtype: torch.dtype = torch.float64,
    *,
    sizes: tuple[int, int] = (8, 16),
    is_transposed: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, matrices (a view of a parameter whose rows are outputs, if transposed), biases."""
    generator = torch.Generator().manual_seed(sum(counts) + len(counts))
    shape = (len(counts), *(sizes[::-1] if is_transposed else sizes))
    tokens, stored, biases = (
        torch.randn(s, generator=generator).to(dtype).requires_grad_()
        for s in ((sum(counts), sizes[0]), shape, (len(counts), sizes[1]))
    )
    return tokens, stored.mT if is_transposed else stored, biases


def _one_by_one(tokens: Tensor, matrices: Tensor, counts: list[int], biases: Tensor) -> Tensor:
    """Each token by itself."""
    experts = [expert for expert, count in enumerate(counts) for _ in range(count)]
    products = [
        token @ matrices[expert] + biases[expert]
        for token, expert in zip(tokens, experts, strict=True)
    ]
    return torch.stack(products) if products else tokens @ matrices.sum(0) + biases.sum(0)


def _garbage_for_none(tokens: Tensor, others: Tensor, *, offs: Tensor) -> Tensor:
    """`torch._grouped_mm` of a device on which groups without tokens are left unwritten."""
    found: Tensor = REAL_KERNEL(tokens, others, offs=offs)
    if found.dim() == 3:
        found[offs.diff(prepend=offs.new_zeros(1)) == 0] = torch.nan
    return found


REAL_KERNEL = torch._grouped_mm


@pytest.fixture
def one_kernel() -> Iterator[None]:
    """All groups by one kernel, which PyTorch imitates on the CPU, too."""
    with (
        mock.patch.object(module, "_is_one_kernel", lambda tokens, _: len(tokens) > 0),
        mock.patch("torch._grouped_mm", _garbage_for_none),
    ):
        yield


def _gradients(output: Tensor, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    weights = torch.linspace(-1, 2, output.numel(), dtype=torch.float64).view_as(output)
    return torch.autograd.grad((output.double() * weights).sum(), inputs)


def _check_against_one_by_one(
    counts: list[int], dtype: torch.dtype, is_transposed: bool, tolerance: float
) -> None:
    inputs = _inputs(counts, dtype, is_transposed=is_transposed)
    wide = tuple(x.detach().double().requires_grad_() for x in inputs)
    output = grouped_matmul(*inputs[:2], torch.tensor(counts), inputs[2])
    expected = _one_by_one(wide[0], wide[1], counts, wide[2])

    assert output.dtype is dtype
    found = (output, *_gradients(output, inputs))
    for ours, theirs in zip(found, (expected, *_gradients(expected, wide)), strict=True):
        scale = 1 + theirs.abs().max().item() if theirs.numel() else 1
        torch.testing.assert_close(ours.double(), theirs, rtol=0, atol=tolerance * scale)


@given(counts=COUNTS, is_transposed=st.booleans())
def test_product_and_gradients_match_each_token_by_itself(
    counts: list[int], is_transposed: bool
) -> None:
    _check_against_one_by_one(counts, torch.float64, is_transposed, 1e-12)


@pytest.mark.usefixtures("one_kernel")
@pytest.mark.parametrize("counts", [[5], [3, 0, 4], [0, 6, 0, 0], [0, 0]])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_one_kernel_for_all_groups_gives_the_same(counts: list[int], is_transposed: bool) -> None:
    _check_against_one_by_one(counts, torch.bfloat16, is_transposed, 2**-7)


def test_experts_without_tokens_are_not_multiplied() -> None:
    counts = [0, 4, 0, 0, 2]
    tokens, matrices, _ = _inputs(counts)
    with mock.patch("torch.mm", wraps=torch.mm) as multiply:
        output = grouped_matmul(tokens, matrices, torch.tensor(counts))
        assert multiply.call_count == 2
        _gradients(output, (tokens, matrices))
    assert multiply.call_count == 6


@pytest.mark.parametrize("is_transposed", [False, True])
@pytest.mark.parametrize("way", ["one kernel", "loop"])
def test_gradient_of_a_stored_matrix_is_contiguous(
    way: str, is_transposed: bool, request: Any
) -> None:
    """Or autograd would copy it."""
    if way == "one kernel":
        request.getfixturevalue("one_kernel")
    stored = torch.randn(3 * 16, 8, dtype=torch.bfloat16, requires_grad=True)
    matrices = stored.unflatten(0, (3, 16))
    matrices = matrices.mT if is_transposed else matrices
    tokens = torch.randn(6, matrices.shape[1], dtype=torch.bfloat16)
    strides: list[tuple[int, ...]] = []
    matrices.register_hook(lambda grad: strides.append(grad.stride()))
    grouped_matmul(tokens, matrices, torch.tensor([1, 2, 3])).sum().backward()
    assert strides == [matrices.stride()]


def test_autocast_narrows_products_and_gradients_come_back_wide() -> None:
    counts = torch.tensor([4, 0, 2])
    inputs = _inputs(counts.tolist(), torch.float32)
    narrow = [x.detach().bfloat16() for x in inputs]
    expected = grouped_matmul(*narrow[:2], counts, narrow[2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = grouped_matmul(*inputs[:2], counts, inputs[2])
        doubled = grouped_matmul(*(x.double() for x in inputs[:2]), counts)
    assert output.dtype is torch.bfloat16
    assert doubled.dtype is torch.float64
    assert torch.equal(output, expected)
    assert all(grad.dtype is torch.float32 for grad in torch.autograd.grad(output.sum(), inputs))


@pytest.mark.parametrize(
    ("tokens", "matrices", "counts", "biases"),
    [
        ((4, 3), (2, 5, 6), (2,), None),
        ((4, 3), (2, 3, 6), (3,), None),
        ((4, 3), (3, 6), (2,), None),
        ((4, 3), (2, 3, 6), (2,), (2, 3)),
    ],
)
def test_shapes_that_do_not_fit_are_rejected(
    tokens: tuple[int, ...],
    matrices: tuple[int, ...],
    counts: tuple[int, ...],
    biases: tuple[int, ...] | None,
) -> None:
    with pytest.raises(ValueError, match=r"Expected tokens \[tokens, in\]"):
        grouped_matmul(
            torch.zeros(tokens),
            torch.zeros(matrices),
            torch.zeros(counts, dtype=torch.int64),
            None if biases is None else torch.zeros(biases),
        )


def test_the_kernel_is_found_by_trying_it() -> None:
    device = torch.device("cpu")
    trial = module._has_kernel.__wrapped__
    assert trial(device)
    with mock.patch("torch._grouped_mm", side_effect=RuntimeError("no kernel here")):
        assert not trial(device)
    with mock.patch.object(torch, "_grouped_mm", create=True):
        del torch._grouped_mm
        assert not trial(device)


@pytest.mark.parametrize("counts", [[2, 1], [3, 2], [0, 0]])
def test_counts_of_other_tokens_are_rejected(counts: list[int]) -> None:
    tokens, matrices, _ = _inputs([2, 2])
    with pytest.raises(ValueError, match=f"add up to 4 tokens, got {sum(counts)}"):
        grouped_matmul(tokens, matrices, torch.tensor(counts))


@pytest.mark.parametrize("other", [0, 1, 2])
def test_other_dtypes_are_rejected_but_under_autocast(other: int) -> None:
    counts = torch.tensor([2, 3])
    inputs = [x.float() for x in _inputs([2, 3])]
    inputs[other] = inputs[other].bfloat16()
    with pytest.raises(ValueError, match="of one dtype, got"):
        grouped_matmul(*inputs[:2], counts, inputs[2])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert grouped_matmul(*inputs[:2], counts, inputs[2]).dtype is torch.bfloat16


class _OnAccelerator:
    """A bf16 tensor as the choice of a kernel sees it, on a device that has the one for all."""

    def __init__(self, *shape: int) -> None:
        self.values = torch.empty(shape, dtype=torch.bfloat16, device="meta")
        self.device = torch.device("meta")

    def __getattr__(self, name: str) -> Any:
        return getattr(self.values, name)

    def __len__(self) -> int:
        return len(self.values)

    def data_ptr(self) -> int:
        return 0


@pytest.mark.parametrize(("num_experts", "expected"), [(1023, True), (1024, False)])
def test_more_groups_than_the_kernel_takes_are_computed_one_by_one(
    num_experts: int, expected: bool
) -> None:
    tokens: Any = _OnAccelerator(8, 16)
    matrices: Any = _OnAccelerator(num_experts, 16, 16)
    with mock.patch.object(module, "_has_kernel", return_value=True):
        assert module._is_one_kernel(tokens, matrices) is expected
