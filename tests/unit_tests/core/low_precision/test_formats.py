"""Casts and scales: every code, every neighbour of one, and the values that have none."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.low_precision.formats import (
    E2M1,
    E4M3,
    E5M2,
    Format,
    decode,
    e8m0_of,
    encode,
    scale_of,
)

FORMATS = {"e4m3": E4M3, "e5m2": E5M2, "e2m1": E2M1}
FP32 = st.floats(width=32, allow_nan=False)


def finite_values(target: Format) -> list[float]:
    """All finite values, ascending."""
    codes = torch.arange(256, dtype=torch.uint8)
    if target is E2M1:
        values = decode(codes[:, None], target, 2).flatten()
    else:
        values = decode(codes.view(target.dtype), target, 1)
    return sorted({value for value in values.tolist() if math.isfinite(value)})


def values_of(
    numbers: list[float], target: Format, noise: list[float] | None = None
) -> list[float]:
    """Numbers as the format has them."""
    random = None if noise is None else torch.tensor(noise)
    codes = encode(torch.tensor(numbers, dtype=torch.float32), target, random)
    return decode(codes, target, len(numbers)).tolist()


def rounded(number: float, target: Format) -> float:
    """To nearest, ties to even: in exact arithmetic, over the list of all values."""
    values = finite_values(target)
    if math.isinf(number):
        return math.copysign(target.largest, number)
    exact = Fraction(number)
    distance = min(abs(exact - Fraction(value)) for value in values)
    nearest = [value for value in values if abs(exact - Fraction(value)) == distance]
    # Values of even codes are every second one from zero.
    return next(
        v for v in nearest if len(nearest) == 1 or values.index(v) % 2 == zero_parity(values)
    )


def zero_parity(values: list[float]) -> int:
    return values.index(0.0) % 2


@pytest.mark.parametrize(
    ("target", "count", "least"), [(E4M3, 253, 2**-9), (E5M2, 247, 2**-16), (E2M1, 15, 0.5)]
)
def test_every_finite_value_survives_and_there_are_as_many_as_the_format_has(
    target: Format, count: int, least: float
) -> None:
    values = finite_values(target)
    assert len(values) == count
    assert values[-1] == target.largest == -values[0]
    assert min(value for value in values if value > 0) == least
    assert values_of(values, target) == values


@pytest.mark.parametrize("name", FORMATS)
def test_between_two_values_the_nearer_is_taken_and_of_ties_the_even_one(name: str) -> None:
    target, parity = FORMATS[name], zero_parity(finite_values(FORMATS[name]))
    values = finite_values(target)
    for number, (low, high) in enumerate(itertools.pairwise(values)):
        middle, little = (low + high) / 2, (high - low) * 1e-3
        near = [middle - little, middle + little]
        even = low if number % 2 == parity else high
        assert values_of([near[0], middle, near[1]], target) == [low, even, high]


@pytest.mark.parametrize("name", FORMATS)
@given(number=FP32)
def test_any_number_is_rounded_as_exact_arithmetic_rounds_it(name: str, number: float) -> None:
    assert values_of([number], FORMATS[name]) == [rounded(number, FORMATS[name])]


@given(number=FP32)
def test_casts_match_pytorch_below_its_overflow(number: float) -> None:
    value = torch.tensor([number])
    assert (
        encode(value, E4M3).float().item() == value.clamp(-448, 448).to(E4M3.dtype).float().item()
    )
    if abs(number) < 61440:
        assert encode(value, E5M2).float().item() == value.to(E5M2.dtype).float().item()


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_beyond_the_largest_value_becomes_the_largest_value(name: str) -> None:
    target = FORMATS[name]
    beyond = [target.largest * 1.2, 3e38, math.inf]
    assert values_of(beyond, target) == [target.largest] * 3
    assert values_of([-number for number in beyond], target) == [-target.largest] * 3


def test_nan_stays_nan_but_in_e2m1_which_has_none() -> None:
    for target in (E4M3, E5M2):
        assert math.isnan(values_of([math.nan], target)[0])
    assert values_of([math.nan], E2M1) == [6.0]


def test_two_codes_of_e2m1_are_in_a_byte_with_the_first_in_the_low_bits() -> None:
    assert encode(torch.tensor([0.5, -6.0, 1.0]), E2M1).tolist() == [0xF1, 0x02]


@given(st.integers(1, 14), st.integers(0, 999))
def test_noise_rounds_up_where_it_reaches_the_rest_of_the_step(index: int, thousandth: int) -> None:
    values = finite_values(E2M1)
    low, high = values[index - 1], values[index]
    if low < 0:
        low, high = high, low  # from zero outwards
    number = low + (high - low) * thousandth / 1000
    rest = (torch.tensor(number).item() - low) / (high - low)
    enough, too_little = min(1 - rest + 1e-3, 0.9999), max(0.0, 1 - rest - 1e-3)
    if 0.01 < rest < 0.99:
        assert values_of([number], E2M1, [enough]) == [high]
        assert values_of([number], E2M1, [too_little]) == [low]


@given(st.integers(0, 254))
def test_every_power_of_two_of_e8m0_stays_and_what_is_above_takes_the_next(exponent: int) -> None:
    power = torch.tensor([exponent], dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    above = torch.nextafter(power, torch.tensor(math.inf))
    assert e8m0_of(power).view(torch.uint8).item() == exponent
    assert e8m0_of(above).view(torch.uint8).item() == min(exponent + 1, 254)


@given(st.floats(min_value=2.0**-126, max_value=2.0**127, width=32))
def test_e8m0_is_rounded_up_where_pytorch_rounds_to_nearest(number: float) -> None:
    value = torch.tensor([number])
    found, theirs = (
        x.view(torch.uint8).int().item() for x in (e8m0_of(value), value.to(torch.float8_e8m0fnu))
    )
    assert found - theirs in (0, 1)
    assert number <= e8m0_of(value).float().item() < 2 * number


def test_e8m0_of_zero_infinity_and_nan() -> None:
    values = torch.tensor([0.0, 1e-45, math.inf, math.nan])
    assert e8m0_of(values).view(torch.uint8).tolist() == [0, 0, 254, 255]


@given(st.floats(min_value=2.0**-149, width=32, allow_infinity=False), st.booleans())
def test_a_scale_brings_the_maximum_to_the_largest_value(number: float, power_of_two: bool) -> None:
    maximum = torch.tensor([number])
    scale = scale_of(maximum, 448.0, power_of_two=power_of_two)
    if power_of_two:
        assert torch.frexp(scale).mantissa.item() == 0.5
        assert scale <= scale_of(maximum, 448.0) < 2 * scale
    elif 448.0 / number < 3e38:
        # As fp32 divides: to nearest.
        assert abs(Fraction(scale.item()) * Fraction(number) / 448 - 1) <= Fraction(1, 2**23)
    else:
        assert scale.item() <= torch.finfo(torch.float32).max


def test_maxima_without_a_scale_give_one() -> None:
    maxima = torch.tensor([0.0, math.inf, math.nan, 1e-45])
    assert scale_of(maxima, 448.0).tolist() == [1, 1, 1, torch.finfo(torch.float32).max]
    assert scale_of(maxima, 448.0, power_of_two=True).tolist() == [1, 1, 1, 2.0**127]
