"""The GPU kernel: its numbers in Triton's interpreter, the instructions it is compiled to, and its
numbers on a GPU.

No test here has run on a GPU. The interpreter shows the kernel's results if every operation is
compiled as written; the PTX shows that it is.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import math
import re
import sys
from collections import Counter
from dataclasses import replace
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from megatron.core.optimizer.kernels import device_adam as device_adam_as_imported
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.kernels.piece import Piece
from tests.unit_tests.core.optimizer.helpers.pieces import adam_piece

triton = pytest.importorskip("triton", reason="the dev extra has it on Linux")
compiler = pytest.importorskip("triton.compiler")
backends = pytest.importorskip("triton.backends.compiler")
interpreter = pytest.importorskip("triton.runtime.interpreter")


def load(name: str) -> ModuleType:
    """A copy of the module made while Triton is there: without a GPU, the module itself leaves it
    alone.
    """
    assert "triton" in sys.modules
    spec = importlib.util.spec_from_file_location(name, device_adam_as_imported.__file__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


device_adam = load("device_adam_with_triton")

F32, BF16, F16 = torch.float32, torch.bfloat16, torch.float16

STEPS = {
    "decoupled": AdamStep(3, 1e-3, weight_decay=0.1),
    "L2": AdamStep(3, 1e-3, weight_decay=0.1, adam_w_mode=False),
    "small beta1 without correction": AdamStep(7, 1e-2, beta1=0.3, bias_correction=False),
    "first": AdamStep(1, 1e-3, eps=1e-6),
}
GRAD_SCALES = {STEPS["decoupled"]: 0.3}  # of the others: 1
# grad, weight, moments, out; with a remainder or not
FORMS = [
    (F32, F32, F32, None, False),
    (BF16, F32, F32, BF16, False),
    (BF16, BF16, BF16, None, False),
    (F16, F16, F32, F32, False),
    (F32, F32, BF16, F16, False),
    (BF16, BF16, F32, None, True),
    (BF16, BF16, F32, BF16, True),
    (BF16, BF16, BF16, F32, True),
]


def fused_multiply_add(x: np.ndarray, y: np.ndarray, z: np.ndarray) -> np.ndarray:
    """x * y + z of fp32 arrays, rounded once: exact products, sums in fp64 rounded to odd, then to
    fp32.
    """
    product, addend = (
        x.astype(np.float64) * y.astype(np.float64),
        np.broadcast_to(z, x.shape).astype(np.float64),
    )
    total = product + addend
    with np.errstate(invalid="ignore"):
        part = total - product
        error = (product - (total - part)) + (addend - part)
    is_even = (total.view(np.int64) & 1) == 0
    toward = np.where(error > 0, np.inf, -np.inf)
    is_adjusted = is_even & (error != 0) & np.isfinite(total)
    return np.where(is_adjusted, np.nextafter(total, toward), total).astype(np.float32)


@pytest.fixture
def interpreted(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A copy of the module whose kernel runs in the interpreter, on CPU tensors."""

    def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        # Some versions' own multiplies, rounds and adds.
        arrays = np.broadcast_arrays(x.data, y.data, z.data)
        return interpreter.TensorHandle(fused_multiply_add(*arrays), z.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_fma", create_fma)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    return load("interpreted_device_adam")


def make_piece(step: AdamStep, form: tuple[Any, ...], numel: int, seed: int = 0) -> Piece:
    grad, weight, moments, out, has_remainder = form
    generator = torch.Generator().manual_seed(seed)

    def normal(scale: float) -> torch.Tensor:
        # Over a wide range: from what underflows in fp16 to what does not.
        return (
            torch.randn(numel, generator=generator)
            * scale
            * 2.0 ** torch.randint(-20, 5, (numel,), generator=generator)
        )

    return adam_piece(
        step,
        grad=normal(0.1).to(grad),
        weight=normal(1.0).to(weight),
        exp_avg=normal(0.01).to(moments),
        exp_avg_sq=normal(0.01).square().to(moments),
        remainder=torch.randint(-(2**15), 2**15, (numel,), generator=generator).short()
        if has_remainder
        else None,
        out=None if out is None else torch.empty(numel, dtype=out),
    )


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def assert_same_bits(piece: Piece, other: Piece) -> None:
    for name, array in piece.arrays().items():
        differing = (bits(array) != bits(other.arrays()[name])).sum().item()
        assert differing == 0, f"{name}: {differing} of {array.numel()}"


@pytest.mark.parametrize(
    ("step", "form"),
    [*zip(itertools.cycle(STEPS.values()), FORMS, strict=False), (STEPS["L2"], FORMS[0])],
    ids=str,
)
def test_interpreted_kernel_gives_the_bits_of_the_host_kernel(interpreted, step, form):
    piece, other, before = (make_piece(step, form, 1100) for _ in range(3))
    grad_scale = GRAD_SCALES.get(step, 1.0)
    interpreted.run([piece], grad_scale)
    HostAdam().run([other], grad_scale)
    assert_same_bits(piece, other)
    assert not torch.equal(piece.weight, before.weight)
    assert torch.equal(bits(piece.grad), bits(before.grad))


@pytest.mark.filterwarnings("ignore:invalid value encountered")
def test_infinities_and_zeros_in_gradients_come_out_as_on_the_host(interpreted):
    piece, other = (make_piece(STEPS["first"], FORMS[0], 64) for _ in range(2))
    for each in (piece, other):
        each.grad[:4] = torch.tensor([math.inf, -math.inf, 0.0, -0.0])
        each.states["exp_avg_sq"][2:4] = each.states["exp_avg"][2:4] = 0.0
    interpreted.run([piece], 1.0)
    HostAdam().run([other])
    for name, array in piece.arrays().items():
        torch.testing.assert_close(array, other.arrays()[name], rtol=0, atol=0, equal_nan=True)
    assert piece.weight[:2].isnan().all()
    assert piece.weight[2:].isfinite().all()


@pytest.mark.parametrize("form", FORMS[-2:], ids=str)
def test_a_weight_that_becomes_nan_keeps_no_remainder(interpreted, form):
    piece = make_piece(STEPS["first"], form, 8)
    piece.grad[3] = math.nan
    interpreted.run([piece], 1.0)
    assert piece.weight.isnan().tolist() == [index == 3 for index in range(8)]
    assert piece.remainder[3] == 0


def test_the_gradient_may_be_written_over_with_the_new_weight(interpreted):
    piece, other = (make_piece(STEPS["decoupled"], FORMS[1], 1500) for _ in range(2))
    interpreted.run([piece._replace(out=piece.grad)], 1.0)
    HostAdam().run([other])
    assert torch.equal(piece.grad, other.out)


@pytest.mark.parametrize("numel", [1, 1024, 1025])
def test_nothing_behind_a_piece_is_touched(interpreted, numel):
    whole = make_piece(STEPS["decoupled"], FORMS[1], 2100)
    before = make_piece(STEPS["decoupled"], FORMS[1], 2100)
    before.out.copy_(whole.out)
    interpreted.run([whole.part(7, numel), whole.part(0, 0)], 1.0)
    for name, array in whole.arrays().items():
        kept, old = bits(array), bits(before.arrays()[name])
        assert torch.equal(kept[:7], old[:7])
        assert torch.equal(kept[7 + numel :], old[7 + numel :])
    assert not torch.equal(whole.weight[7 : 7 + numel], before.weight[7 : 7 + numel])


def test_a_piece_that_no_kernel_takes_is_rejected(interpreted):
    piece = make_piece(STEPS["first"], FORMS[0], 8)
    with pytest.raises(ValueError, match="Expected exp_avg of 8 elements as weight has, got 7"):
        interpreted.run([piece._replace(states=piece.states | {"exp_avg": torch.zeros(7)})], 1.0)


@pytest.mark.gpu
@pytest.mark.parametrize("step", STEPS.values(), ids=list(STEPS))
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_the_kernel_gives_the_bits_of_the_host_kernel_on_a_gpu(form, step):
    numel = 1_000_003  # not a multiple of a block
    on_host = make_piece(step, form, numel)
    for start, value in enumerate((0.0, 1e-40, math.inf, math.nan)):
        on_host.grad[start :: numel // 50] = value
    before = on_host.weight.clone()
    on_device = on_host.mapped(lambda array: array.to("cuda"))
    grad_scale = GRAD_SCALES.get(step, 1.0)
    for number in range(step.step, step.step + 3):
        device_adam_as_imported.run(
            [on_device._replace(step=replace(step, step=number))], grad_scale
        )
        HostAdam().run([on_host._replace(step=replace(step, step=number))], grad_scale)

    assert (bits(on_host.weight) != bits(before)).sum() > numel // 2
    for name, array in on_host.arrays().items():
        found = on_device.arrays()[name].cpu()
        both_nan = array.isnan() & found.isnan()
        assert ((bits(array) == bits(found)) | both_nan).all(), name


def test_the_exact_fma_of_these_tests_rounds_once():
    ones = np.ones(2, np.float32)
    x = np.float32(1 + 2**-12) * ones
    # The square is 1 + 2**-11 + 2**-24, which rounds to 1 + 2**-11; the rest is lost when
    # rounding twice.
    assert (fused_multiply_add(x, x, -np.float32(1 + 2**-11) * ones) == np.float32(2**-24)).all()
    assert (np.float32(x * x) - np.float32(1 + 2**-11) == 0).all()


def test_without_triton_stepping_says_what_is_missing(monkeypatch):
    monkeypatch.setattr(device_adam, "triton", None)
    with pytest.raises(RuntimeError, match="Expected Triton, which steps GPU tensors, got none"):
        device_adam.run([make_piece(STEPS["first"], FORMS[0], 8)], 1.0)


def test_the_kernel_is_tried_before_the_first_step(interpreted, monkeypatch, caplog):
    monkeypatch.setattr(interpreted, "why_triton_fails", lambda: None)
    assert interpreted.works_on(torch.device("cpu"))
    assert caplog.records == []


@pytest.mark.parametrize("missing", [None, "no Python.h"])
def test_a_kernel_that_does_not_run_is_one_warning_with_the_reason(missing, monkeypatch, caplog):
    class Broken:
        def __getitem__(self, _: tuple[int, ...]) -> Any:
            raise OSError("no such compiler")

    module = load("broken_device_adam")
    monkeypatch.setattr(module, "why_triton_fails", lambda: missing)
    monkeypatch.setattr(module, "_adam_kernel", Broken())
    for _ in range(2):
        assert not module.works_on(torch.device("cpu"))
    (warning,) = caplog.records
    assert (missing or "no such compiler") in warning.getMessage()


def test_launches_forbid_fusion(monkeypatch):
    options: list[dict[str, Any]] = []

    class Recorder:
        def __getitem__(self, _: tuple[int, ...]) -> Any:
            return lambda *_, **keywords: options.append(keywords)

    monkeypatch.setattr(device_adam, "_adam_kernel", Recorder())
    device_adam.run([make_piece(STEPS["first"], FORMS[0], 8)], 1.0)
    assert [keywords["enable_fp_fusion"] for keywords in options] == [False]


@functools.cache
def compiled_ptx(is_l2: bool, fuses: bool) -> str:
    """The kernel as an H100 would get it. Triton brings its own compiler; no GPU is needed."""
    scalars = (
        "grad_scale",
        "l2",
        "decay",
        "lerp",
        "square",
        "beta2",
        "minus_step_size",
        "sqrt_correction2",
        "eps",
    )
    flags = {
        "has_l2": is_l2,
        "lerps_from_grad": False,
        "is_split": False,
        "has_out": True,
        "block_numel": 1024,
    }
    signature = {
        "grad": "*bf16",
        **dict.fromkeys(("weight", "exp_avg", "exp_avg_sq", "remainder"), "*fp32"),
        "out": "*bf16",
        "numel": "i32",
        **dict.fromkeys(scalars, "fp32"),
        **dict.fromkeys(flags, "constexpr"),
    }
    source = compiler.ASTSource(device_adam._adam_kernel, signature, constexprs=flags)
    return triton.compile(
        source, target=backends.GPUTarget("cuda", 90, 32), options={"enable_fp_fusion": fuses}
    ).asm["ptx"]


def instructions(ptx: str) -> Counter[str]:
    """How often fp32 arithmetic of each kind occurs."""
    return Counter(re.findall(r"\b((?:fma|mul|add|sub|div|sqrt|rcp|rsqrt)\.[a-z.]*f32)\b", ptx))


@pytest.mark.parametrize("is_l2", [False, True])
def test_compiled_for_a_gpu_it_is_the_same_operations_all_correctly_rounded(is_l2):
    counts = instructions(compiled_ptx(is_l2, fuses=False))
    per_thread = counts["sqrt.rn.f32"]
    assert per_thread == 1024 // 128
    assert {name: count / per_thread for name, count in counts.items()} == {
        "fma.rn.f32": 2 + is_l2,
        "sqrt.rn.f32": 1,
        "div.rn.f32": 2,
        "sub.rn.f32": 1,
        "add.rn.f32": 2,
        "mul.rn.f32": 5,
    }


def test_that_test_would_notice_a_fusion():
    assert instructions(compiled_ptx(True, fuses=True)) != instructions(
        compiled_ptx(True, fuses=False)
    )
