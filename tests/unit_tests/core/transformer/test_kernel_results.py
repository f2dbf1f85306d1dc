"""Attention that keeps its kernels' results computes the same bits, and keeps no derived inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.core.transformer.kernel_results import keep_kernel_results

SHAPE = (2, 4, 16, 8)  # [batch, heads, seq, dim]
REPEATS = 8  # of the keys, which a core derives from its own ones


class _Count(TorchDispatchMode):
    """How often attention's kernel runs, forward only."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op.name()
        self.number += "scaled_dot_product" in name and not name.endswith("_backward")
        return op(*args, **(kwargs or {}))


def _core(query: Tensor, key: Tensor, value: Tensor, dropout: float = 0.0) -> Tensor:
    """Two kernels, of which the second reads what the first returns."""
    keys, values = (part.repeat(1, 1, REPEATS, 1) for part in (key, value))
    first = F.scaled_dot_product_attention(query, keys, values, dropout_p=dropout)
    return F.scaled_dot_product_attention(first.sin(), keys, values, dropout_p=dropout).exp()


def _plain(core: Callable[..., Tensor], *args: Any) -> Tensor:
    return core(*args)


def _inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(SHAPE, generator=generator).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_outputs_and_gradients_are_the_same_bits(dropout: float) -> None:
    results = []
    for run in (_plain, keep_kernel_results):
        inputs = _inputs()
        torch.manual_seed(3)
        output = run(_core, *inputs, dropout)
        output.square().sum().backward()
        results.append([output, *(part.grad for part in inputs)])
    assert all(map(torch.equal, *results))


def test_kernels_do_not_run_again_even_in_a_second_backward() -> None:
    inputs = _inputs()
    with _Count() as count:
        output = keep_kernel_results(_core, *inputs).sum()
        expected = torch.autograd.grad(output, inputs, retain_graph=True)
        found = torch.autograd.grad(output, inputs)
    assert count.number == 2
    assert all(map(torch.equal, found, expected))


@contextmanager
def _kept(nbytes: dict[int, int]) -> Iterator[None]:
    """The storages that autograd's hooks see, with their sizes."""

    def pack(tensor: Tensor) -> Tensor:
        nbytes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield


def test_hooks_see_arguments_and_results_and_nothing_that_is_derived() -> None:
    inputs, nbytes = _inputs(), dict[int, int]()
    with _kept(nbytes):
        output = keep_kernel_results(_core, *inputs)
    arguments = {part.untyped_storage().data_ptr() for part in inputs}
    assert arguments < nbytes.keys()
    results = [nbytes[pointer] for pointer in nbytes.keys() - arguments]
    of_row = inputs[0][..., 0].nbytes
    # Of two kernels what they return: the heads' results, and a number for each row.
    assert sorted(results) == [of_row, of_row, output.nbytes, output.nbytes]
