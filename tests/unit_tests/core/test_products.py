from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megatron.core import products

SIXTEEN_BITS = (torch.bfloat16, torch.float16)


@pytest.fixture(params=SIXTEEN_BITS, ids=str)
def slow_dtype(request, monkeypatch) -> torch.dtype:
    """A dtype as on a CPU without products in it, and blocks that tests' matrices do not fit."""
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset(SIXTEEN_BITS))
    for name, size in (("_ROWS", 3), ("_INNER", 4), ("_COLUMNS", 5)):
        monkeypatch.setattr(products, name, size)
    return request.param


def drawn(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype)


def test_a_product_is_that_of_fp32_rounded_once(slow_dtype):
    left = drawn(7, 9, dtype=slow_dtype, seed=0)
    right = drawn(11, 9, dtype=slow_dtype, seed=1).t()
    out = torch.full((7, 11), float("nan"), dtype=slow_dtype)
    assert products.mm(left, right, out) is out

    exact = left.double() @ right.double()
    spacing = torch.finfo(slow_dtype).eps * exact.abs()
    assert ((out.double() - exact).abs() <= 0.51 * spacing + 1e-6).all()


def test_a_sum_with_a_product_is_rounded_once(slow_dtype):
    left, right = drawn(7, 9, dtype=slow_dtype, seed=0), drawn(9, 11, dtype=slow_dtype, seed=1)
    added = drawn(7, 11, dtype=slow_dtype, seed=2)
    found = products.addmm(added, left, right, beta=3.5, alpha=-0.25)

    exact = 3.5 * added.double() - 0.25 * (left.double() @ right.double())
    spacing = torch.finfo(slow_dtype).eps * exact.abs()
    assert ((found.double() - exact).abs() <= 0.51 * spacing + 1e-6).all()


@pytest.mark.parametrize("lead", [(), (5,), (2, 5), (2, 0)])
@pytest.mark.parametrize("has_bias", [False, True])
def test_a_linear_layer_has_the_gradients_of_one_in_fp32(monkeypatch, slow_dtype, lead, has_bias):
    tensors = [drawn(*lead, 9, dtype=slow_dtype, seed=0), drawn(7, 9, dtype=slow_dtype, seed=1)]
    if has_bias:
        tensors.append(drawn(7, dtype=slow_dtype, seed=2))
    grad = drawn(*lead, 7, dtype=slow_dtype, seed=3)

    calls = []
    multiply = products._multiply
    monkeypatch.setattr(products, "_multiply", lambda *args: (calls.append(1), multiply(*args))[1])
    own = [tensor.clone().requires_grad_() for tensor in tensors]
    output = products.linear(*own)
    assert output.dtype == slow_dtype
    output.backward(grad)
    assert len(calls) == 3, "forward, and two gradients"

    wide = [tensor.float().requires_grad_() for tensor in tensors]
    expected = F.linear(*wide)
    expected.backward(grad.float())
    torch.testing.assert_close(output.float(), expected, atol=0.05, rtol=0.01)
    for mine, theirs in zip(own, wide, strict=True):
        assert mine.grad is not None
        assert mine.grad.is_contiguous()
        torch.testing.assert_close(mine.grad.float(), theirs.grad, atol=0.05, rtol=0.01)


def test_a_linear_layer_can_be_differentiated_twice(slow_dtype):
    inputs = drawn(5, 9, dtype=slow_dtype, seed=0).requires_grad_()
    weight = drawn(7, 9, dtype=slow_dtype, seed=1).requires_grad_()
    (slope,) = torch.autograd.grad(products.linear(inputs, weight).sum(), inputs, create_graph=True)
    slope.square().sum().backward()
    expected = 2 * 5 * weight.detach().float().sum(0).expand(7, 9)
    torch.testing.assert_close(weight.grad.float(), expected, atol=0.1, rtol=0.02)


def test_a_compiled_linear_layer_is_one_graph_for_all_numbers_of_rows(slow_dtype):
    graphs = []

    def count(graph: torch.fx.GraphModule, _: object) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    compiled = torch.compile(products.linear, backend=count, fullgraph=True, dynamic=True)
    weight = drawn(7, 9, dtype=slow_dtype, seed=1)
    for num_rows in (2, 5, 8):
        inputs = drawn(num_rows, 9, dtype=slow_dtype, seed=0)
        assert torch.equal(compiled(inputs, weight), products.linear(inputs, weight))
    (graph,) = graphs
    assert any("mm_in_fp32" in str(node.target) for node in graph.graph.nodes)


def test_a_frozen_layer_keeps_its_weight_and_not_its_inputs(slow_dtype):
    inputs = drawn(5, 9, dtype=slow_dtype, seed=0).requires_grad_()
    weight, kept = drawn(7, 9, dtype=slow_dtype, seed=1), []
    with torch.autograd.graph.saved_tensors_hooks(kept.append, lambda tensor: tensor):
        products.linear(inputs, weight)
    assert [tensor.data_ptr() for tensor in kept] == [weight.data_ptr()]


def test_under_autocast_results_are_pytorchs(slow_dtype):  # noqa: ARG001  of a slow CPU
    inputs, weight = drawn(5, 9, dtype=torch.float32, seed=0), torch.ones(7, 9)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(products.linear(inputs, weight), F.linear(inputs, weight))
        assert not products.is_slow(inputs.bfloat16())
