"""The cross entropy whose gradient takes the logits' place."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from megatron.core.transformer.cross_entropy import vocab_cross_entropy

N, VOCAB = 37, 50


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """A leaf [N, VOCAB], labels [N] and the gradients of the losses [N]."""
    generator = torch.Generator().manual_seed(0)
    leaf = (torch.randn(N, VOCAB, generator=generator) * 4).to(dtype).requires_grad_()
    return (
        leaf,
        torch.randint(VOCAB, (N,), generator=generator),
        torch.randn(N, generator=generator),
    )


def _reference(leaf: Tensor, labels: Tensor, grad_losses: Tensor) -> tuple[Tensor, Tensor]:
    """Losses and the leaf's gradient by torch, in fp32."""
    leaf = leaf.detach().float().requires_grad_()
    losses = F.cross_entropy(leaf, labels, reduction="none")
    losses.backward(grad_losses)
    assert leaf.grad is not None
    return losses.detach(), leaf.grad


@pytest.mark.parametrize("chunk_numel", [1, 3 * VOCAB, 1 << 24])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)])
def test_losses_and_gradients_are_torchs(
    dtype: torch.dtype, tolerance: float, chunk_numel: int
) -> None:
    leaf, labels, grad_losses = _inputs(dtype)
    losses = vocab_cross_entropy(leaf.clone(), labels, chunk_numel)
    losses.backward(grad_losses)
    expected_losses, expected_grad = _reference(leaf, labels, grad_losses)
    assert losses.dtype == torch.float32
    torch.testing.assert_close(
        losses, expected_losses, rtol=1e-5, atol=1e-5
    )  # fp32 whatever the logits' dtype
    assert leaf.grad is not None
    assert leaf.grad.dtype == dtype
    torch.testing.assert_close(leaf.grad.float(), expected_grad, rtol=tolerance, atol=1e-6)


def test_leading_dims_are_rows_and_losses_are_no_view() -> None:
    leaf, labels, grad_losses = _inputs()
    expected_losses, expected_grad = _reference(leaf, labels, grad_losses)
    losses = vocab_cross_entropy(leaf.clone().unflatten(0, (1, N)), labels.unsqueeze(0), 3 * VOCAB)
    assert losses.shape == (1, N)
    assert not losses._is_view()
    losses.backward(grad_losses.unsqueeze(0))
    torch.testing.assert_close(losses[0], expected_losses)
    torch.testing.assert_close(leaf.grad, expected_grad)


def test_large_logits_do_not_overflow() -> None:
    leaf = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    losses = vocab_cross_entropy(leaf.clone(), torch.tensor([1]))
    losses.sum().backward()
    assert losses.item() == 2e4
    assert leaf.grad is not None
    assert leaf.grad.tolist() == [[1.0, -1.0, 0.0]]


def test_gradient_lies_in_the_logits_storage() -> None:
    leaf, labels, grad_losses = _inputs()
    logits = leaf.clone()
    received: list[Tensor] = []
    logits.register_hook(received.append)
    vocab_cross_entropy(logits, labels).backward(grad_losses)
    (gradient,) = received
    assert gradient.untyped_storage().data_ptr() == logits.untyped_storage().data_ptr()
    torch.testing.assert_close(gradient, _reference(leaf, labels, grad_losses)[1])


class _Allocations(TorchDispatchMode):
    """Records the bytes of every storage that an operation returns without having been given it."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []
        self._kept: list[Tensor] = []  # so that no address is used twice

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {
            t.untyped_storage().data_ptr()
            for t in tree_iter((args, kwargs))
            if isinstance(t, Tensor)
        }
        for tensor in tree_iter(result):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().data_ptr() not in given:
                self.sizes.append(tensor.untyped_storage().nbytes())
                self._kept.append(tensor)
        return result


def _largest_allocation(loss: Any, dtype: torch.dtype) -> int:
    weight = torch.randn(VOCAB, 8).to(dtype).requires_grad_()
    hidden = torch.randn(N, 8).to(dtype)
    logits = F.linear(hidden, weight)
    labels = torch.randint(VOCAB, (N,))
    with _Allocations() as allocations:
        losses = loss(logits, labels)
        # The logits' gradient only: what the projection's backward allocates is not the loss's
        # matter.
        torch.autograd.grad(losses.sum(), logits)
    assert allocations.sizes
    return max(allocations.sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_largest_allocation_of_forward_and_backward_is_one_fp32_chunk(dtype: torch.dtype) -> None:
    rows = 4
    chunk_bytes = rows * VOCAB * 4
    assert (
        _largest_allocation(lambda x, y: vocab_cross_entropy(x, y, rows * VOCAB), dtype)
        == chunk_bytes
    )
    # The measure sees what torch's own loss allocates: the logits' size, at the least.
    reference = _largest_allocation(
        lambda x, y: F.cross_entropy(x.float(), y, reduction="none"), dtype
    )
    assert reference >= N * VOCAB * 4


def test_second_backward_is_refused() -> None:
    leaf, labels, _ = _inputs()
    loss = vocab_cross_entropy(leaf.clone(), labels).sum()
    loss.backward(retain_graph=True)
    first = leaf.grad.clone() if leaf.grad is not None else None
    with pytest.raises(RuntimeError, match="the first wrote the gradient over the logits"):
        loss.backward()
    assert first is not None
    assert torch.equal(leaf.grad, first)


def test_gradient_of_the_gradient_is_refused() -> None:
    leaf, labels, _ = _inputs()
    logits = leaf.clone()
    with pytest.raises(RuntimeError, match="cannot be differentiated"):
        torch.autograd.grad(vocab_cross_entropy(logits, labels).sum(), leaf, create_graph=True)
    assert torch.equal(logits, leaf)


def test_another_reader_of_the_logits_is_stopped_by_autograd() -> None:
    leaf, labels, _ = _inputs()
    logits = leaf.tanh()  # saves its result, the logits, for its own backward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        vocab_cross_entropy(logits, labels).sum().backward()


def test_leaf_logits_that_want_a_gradient_are_refused() -> None:
    leaf, labels, _ = _inputs()
    for logits in (leaf, leaf.view(1, N, VOCAB).flatten(0, 1)):
        with pytest.raises(ValueError, match="got a leaf's values"):
            vocab_cross_entropy(logits, labels)


def test_nothing_is_overwritten_where_no_gradient_is_wanted() -> None:
    leaf, labels, grad_losses = _inputs()
    before = leaf.detach().clone()
    with torch.no_grad():
        losses = vocab_cross_entropy(leaf, labels)
    assert not losses.requires_grad
    frozen = leaf.detach()
    torch.testing.assert_close(
        vocab_cross_entropy(frozen, labels), _reference(leaf, labels, grad_losses)[0]
    )
    assert torch.equal(leaf, before)


@pytest.mark.parametrize("label", [-1, -100, VOCAB])
def test_labels_out_of_range_are_named(label: int) -> None:
    leaf, labels, _ = _inputs()
    labels[3] = label
    with pytest.raises(
        ValueError, match=rf"Expected labels in \[0, {VOCAB}\), got labels from .*{label}"
    ):
        vocab_cross_entropy(leaf.clone(), labels)


def test_inputs_that_do_not_fit_are_refused() -> None:
    leaf, labels, _ = _inputs()
    with pytest.raises(ValueError, match=r"Expected logits \[..., vocab\] and labels \[...\]"):
        vocab_cross_entropy(leaf.clone(), labels[1:])
    with pytest.raises(ValueError, match="int64 labels"):
        vocab_cross_entropy(leaf.clone(), labels.int())
    with pytest.raises(ValueError, match="contiguous"):
        vocab_cross_entropy(leaf.detach().expand(2, N, VOCAB)[:, 0].T.contiguous().T, labels[:2])


def test_no_rows_give_no_losses() -> None:
    logits = torch.randn(0, VOCAB, requires_grad=True).clone()
    assert vocab_cross_entropy(logits, torch.zeros(0, dtype=torch.int64)).shape == (0,)
