"""Stored values are restored exactly: whole tensors, parts of them, and in the middle of a run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from megatron.core.optimizer import scaled_states
from megatron.core.optimizer.fused_adam import FusedAdam

F16, F8 = torch.float16, torch.float8_e4m3fn
DTYPES = (F16, F8)
LARGEST = {F16: 65504.0, F8: 448.0}
BITS = {F16: 11, F8: 4}  # significant ones
INTEGERS = {F16: torch.int16, F8: torch.uint8}
# Between these, no product of a scale and a number of the format is subnormal or infinite in fp32.
SCALE_EXPONENTS = {F16: (-101, 110), F8: (-116, 118)}


def bits(tensor: torch.Tensor) -> list[int]:
    """Equal lists are equal values, zeros with their signs; every NaN is the same."""
    return torch.where(tensor.isnan(), torch.nan, tensor).view(torch.int32).tolist()


def numbers(dtype: torch.dtype, patterns: list[int] | range) -> torch.Tensor:
    """The numbers of a format by their bits."""
    return torch.tensor(list(patterns)).to(INTEGERS[dtype]).view(dtype)


def finite_numbers(dtype: torch.dtype) -> torch.Tensor:
    """All positive ones, in their order."""
    found = numbers(dtype, range(1, 2 ** (8 * dtype.itemsize - 1)))
    return found[found.float().isfinite()]


def written(
    dtype: torch.dtype,
    values: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    stored, scale = (
        torch.empty(values.shape, dtype=dtype),
        scaled_states.new_scale(torch.device("cpu")),
    )
    scaled_states.write(stored, scale, values, **options)
    return stored, scale


def restored(dtype: torch.dtype, values: torch.Tensor, **options: Any) -> torch.Tensor:
    """The values that are read once these have been loaded."""
    stored, scale = (
        torch.empty(values.shape, dtype=dtype),
        scaled_states.new_scale(torch.device("cpu")),
    )
    scaled_states.restore(stored, scale, values, **options)
    return scaled_states.read(stored, scale)


# The identity


@st.composite
def stored_states(draw: st.DrawFn) -> tuple[torch.dtype, torch.Tensor, float]:
    """Any numbers of a format, under any scale that it may have."""
    dtype = draw(st.sampled_from(DTYPES))
    pattern = st.integers(0, 256**dtype.itemsize - 1)
    stored = numbers(dtype, draw(st.lists(pattern, min_size=1, max_size=40)))
    if not stored.float().isfinite().all():
        return dtype, stored, 1.0
    mantissa = draw(st.integers(2**23, 2**24 - 1) | st.just(2**23))
    return dtype, stored, mantissa * 2.0 ** (draw(st.integers(*SCALE_EXPONENTS[dtype])) - 23)


@given(stored_states())
@example((F8, torch.tensor([448.0, 2.0**-9]).to(F8), 1.0))
@example((F8, torch.tensor([448.0, 2.0**-9]).to(F8), 2.0**-20))
@example((F16, torch.tensor([65504.0, 2.0**-24]).to(F16), 1.0))
@example((F8, torch.tensor([240.0, 2.0**-9]).to(F8), 1.0))
@example((F8, torch.tensor([-0.0, 0.0, 3.5, -0.25]).to(F8), 1.25))
@example((F16, torch.tensor([2.0**-24]).to(F16), 2.5243551976337916e-29))
@example((F16, torch.tensor([2.0**-20, 2.0**-24]).to(F16), 1.7e-30))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_whatever_is_stored_is_loaded_as_it_is(state):
    dtype, stored, scale = state
    values = scaled_states.read(stored, torch.tensor(scale))
    assert bits(restored(dtype, values)) == bits(values)


FP32_LARGEST = torch.finfo(torch.float32).max
SPECIAL = [0.0, -0.0, 445.0, 448.0, 465.0, 65504.0, 65519.0, 2.0**-24, FP32_LARGEST]
fp32 = st.floats(width=32) | st.sampled_from(SPECIAL)
near_each_other = st.builds(
    lambda exponent, values: [value * 2.0**exponent for value in values],
    st.integers(-126, 127),
    st.lists(st.floats(-0.75, 0.75, width=32), min_size=1, max_size=20),
)


@given(
    st.sampled_from([(F16, False), (F16, True), (F8, False)]),
    st.lists(fp32, min_size=1, max_size=20) | near_each_other,
    st.data(),
)
@example((F16, False), [FP32_LARGEST, 1.0], None)
@settings(max_examples=150, deadline=None, derandomize=True)
def test_what_a_step_has_stored_is_loaded_as_it_is_and_so_are_parts_of_it(kind, values, data):
    dtype, is_weight = kind
    stored, scale = written(dtype, torch.tensor(values, dtype=torch.float32), is_weight=is_weight)
    is_finite = torch.tensor(values).isfinite()
    values = scaled_states.read(stored, scale)
    if is_weight and not values.isfinite().all():
        return  # values at the end of fp32's range round beyond it, as in bf16
    assert values.isfinite().all() or not is_finite.all()
    assert bits(restored(dtype, values, is_weight=is_weight)) == bits(values)
    first, last = 0, 1
    if data is not None:
        first = data.draw(st.integers(0, len(values) - 1))
        last = data.draw(st.integers(first + 1, len(values)))
    part = values[first:last]
    assert bits(restored(dtype, part, is_weight=is_weight)) == bits(part)
    if values.isfinite().all() and values.abs().max() > 2.0**-90:
        again, same = written(dtype, values, is_weight=is_weight)
        assert torch.equal(again.view(INTEGERS[dtype]), stored.view(INTEGERS[dtype]))
        assert torch.equal(same, scale)


@pytest.mark.parametrize(
    ("dtype", "is_weight", "every"),
    [
        (F8, False, 1),
        *((F16, is_weight, 197) for is_weight in (False, True)),
        *(pytest.param(F16, is_weight, 1, marks=pytest.mark.wide) for is_weight in (False, True)),
    ],
)
def test_every_number_of_a_format_may_be_the_largest(dtype, is_weight, every):
    """With the least numbers, under two kinds of scale."""
    representable = finite_numbers(dtype)
    least = representable[:3].float()
    for index in range(0, len(representable), every):
        for scale in (2.0**-30, 1.0 + 2.0**-23):
            largest = representable[index : index + 1].float()
            values = torch.cat([largest, -least, torch.zeros(1)]) * scale
            assert bits(restored(dtype, values, is_weight=is_weight)) == bits(values), (
                index,
                scale,
            )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [torch.inf, torch.nan])
def test_values_that_are_not_finite_stay_so(dtype, value):
    values = scaled_states.read(*written(dtype, torch.tensor([1.0, value, 0.0, 2.0])))
    assert values.isfinite().tolist() == [True, False, True, True]


def test_values_that_were_not_stored_before_are_rounded_and_not_refused():
    values = torch.randn(1000, generator=torch.Generator().manual_seed(1))
    for dtype in DTYPES:
        loaded = restored(dtype, values)
        assert torch.equal(loaded, scaled_states.read(*written(dtype, values)))
        assert not torch.equal(loaded, values)


# How much is rounded


def te_rounded(dtype: torch.dtype, values: torch.Tensor) -> torch.Tensor:
    """By TransformerEngine's formula: the largest magnitude becomes 448, or half of 65504."""
    scale = values.abs().max() / (LARGEST[dtype] / (2 if dtype == F16 else 1))
    return (values * scale.reciprocal()).to(dtype).float() * scale


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("distribution", ["normal", "uniform", "squares"])
def test_the_largest_values_are_rounded_no_worse_than_by_transformer_engine(dtype, distribution):
    generator = torch.Generator().manual_seed(3)
    ours, theirs = [], []
    for _ in range(100):
        draw = torch.rand if distribution == "uniform" else torch.randn
        values = draw(1000, generator=generator)
        values = values.square() if distribution == "squares" else values
        values *= 2.0 ** float(torch.empty(()).uniform_(-40, 40, generator=generator))
        is_large = values.abs() >= 0.8 * values.abs().max()
        for errors, rounded in (
            (ours, scaled_states.read(*written(dtype, values))),
            (theirs, te_rounded(dtype, values)),
        ):
            errors.append(((rounded - values) / values).abs()[is_large])
        # The very largest is exact but for the rounding of the scale and of the product.
        index = values.abs().argmax()
        largest = scaled_states.read(*written(dtype, values))[index]
        assert abs(largest / values[index] - 1) <= 2.0**-23
    ours, theirs = torch.cat(ours), torch.cat(theirs)
    assert ours.numel() > 300
    assert ours.mean() <= theirs.mean() * 1.001
    assert ours.max() <= theirs.max() * 1.001
    assert theirs.max() > 2.0 ** -(BITS[dtype] + 2), "they round, too"


def test_16_bit_weights_are_exact_in_fp16_main_weights_and_stay_so_while_others_change():
    generator = torch.Generator().manual_seed(4)
    for dtype in (F16, torch.bfloat16):
        parameter = nn.Parameter(torch.randn(100, generator=generator).to(dtype))
        before = parameter.detach().clone()
        optimizer = FusedAdam([parameter], lr=0.1, master_weights=True, master_weight_dtype=F16)
        for _ in range(20):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[before.float().abs().argmax()] = 1.0
            optimizer.step()
        moved = parameter.detach() != before
        assert moved.sum() == 1
        main = optimizer.get_unscaled_state(parameter, "master_param")
        assert torch.equal(main[~moved], before[~moved].float())


# Runs


def _run(
    options: dict[str, Any],
    resumed_at: int | None = None,
) -> tuple[list[torch.Tensor], list[Any]]:
    """Weights, and stored states, after eight steps."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((64, 48), (33,)) * 4
    owned = [nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    optimizer = FusedAdam(owned, lr=1e-2, **options)
    for number in range(8):
        if number == resumed_at:
            saved = copy.deepcopy(optimizer.state_dict())
            optimizer = FusedAdam(owned, lr=1e-2, **options)
            optimizer.load_state_dict(saved)
        for parameter in owned:
            # Of very different magnitudes: some are stored as the least numbers of a format.
            sizes = torch.rand(parameter.shape, generator=generator) ** 8
            sizes *= 10.0 ** -(number % 3)
            parameter.grad = torch.randn(parameter.shape, generator=generator) * sizes
        optimizer.step()
    names = ("exp_avg", "exp_avg_sq")
    raw = [optimizer.state[p][name].view(torch.uint8).tolist() for p in owned for name in names]
    return [p.detach().clone() for p in owned], [
        raw,
        [optimizer.get_unscaled_state(p, n) for p in owned for n in names],
    ]


@pytest.mark.parametrize(
    "options",
    [
        {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F16},
        {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F8},
        {"exp_avg_dtype": F16, "exp_avg_sq_dtype": F16},
    ],
    ids=str,
)
def test_a_run_that_is_resumed_at_any_step_ends_with_the_same_bits(options):
    weights, (raw, values) = _run(options)
    for number in (1, 4, 7):
        other_weights, (other_raw, other_values) = _run(options, resumed_at=number)
        assert all(map(torch.equal, other_weights, weights)), number
        assert all(map(torch.equal, other_values, values)), number
        assert other_raw == raw, number
