"""Which layers are of a kind."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron.core.options import ConfigError
from megatron.core.transformer.layer_pattern import layer_pattern

FLAG = "--linear-attention-freq"


def _bits(text: str, num_layers: int, every_nth: bool = False, from_first: bool = False) -> str:
    kinds = layer_pattern(FLAG, text, num_layers, every_nth=every_nth, from_first=from_first)
    return "".join(str(int(kind)) for kind in kinds)


def test_a_number_is_all_but_every_nth_layer_or_every_nth_layer() -> None:
    assert _bits("4", 9) == "111011101"
    assert _bits("4", 9, every_nth=True) == "000100010"
    assert _bits("1", 3) == "000"
    assert _bits("99", 3) == "111"


def test_every_nth_layer_may_be_counted_from_the_first_one() -> None:
    assert _bits("4", 9, every_nth=True, from_first=True) == "100010001"
    assert _bits("99", 3, every_nth=True, from_first=True) == "100"
    assert _bits("[0,1,0]", 3, every_nth=True, from_first=True) == "010"


@given(st.lists(st.integers(0, 1), min_size=1, max_size=6), st.integers(1, 5))
def test_a_repeated_list_is_what_python_makes_of_it(part: list[int], times: int) -> None:
    whole = part * times
    assert _bits(f"{part}*{times}", len(whole)) == "".join(map(str, whole))


@pytest.mark.parametrize(
    "text",
    [
        "0",
        "-1",
        "x",
        "[1,0",
        "[2,0]",
        "[True,0]",
        "[1]*0+[1,0]",
        "[1,0]*1000000000",
        "[1]*True+[0]",
        "2*[1]",
        "(1,0)",
        "[x for x in (1,0)]",
        "__import__('os')",
        "(" * 5000,
        "[1]" + "+[0]" * 5000,
        "",
    ],
)
def test_anything_else_is_rejected_and_nothing_is_run(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--linear-attention-freq: expected a number"):
        layer_pattern(FLAG, text, 2, every_nth=False)


def test_a_list_of_another_length_is_rejected_with_both() -> None:
    with pytest.raises(ConfigError, match=r"for --num-layers 4, got 3\."):
        layer_pattern(FLAG, "[1,0,1]", 4, every_nth=False)
