"""The tables of families, and the text of patterns of layers."""

from __future__ import annotations

import pytest

from megatron.core.models.families.config_json import FAMILIES
from megatron.core.models.families.layer_fields import pattern_of
from megatron.core.transformer.layer_pattern import layer_pattern


def test_families_are_told_apart_by_their_name_in_the_file() -> None:
    assert len({family.model_type for family in FAMILIES}) == len(FAMILIES)


@pytest.mark.parametrize("every_nth", [True, False])
@pytest.mark.parametrize(
    "kinds", [(1, 0, 0, 1), (1, 1, 0), (0, 0, 1), (0,), (1,), (0, 0), (1, 0, 1, 0), (0, 1, 0, 1)]
)
def test_the_text_of_a_pattern_stands_for_its_layers(
    kinds: tuple[int, ...], every_nth: bool
) -> None:
    wanted = tuple(kind == 1 for kind in kinds)
    text = pattern_of(wanted, every_nth=every_nth)
    assert layer_pattern("", text, len(kinds), every_nth=every_nth) == wanted
