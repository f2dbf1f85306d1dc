"""`TensorCut` against the plain definition: a rank's part is its share of every section, or of the
columns.
"""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from megatron.core.transformer.fused_weight import FusedLinear, FusedWeight, Linear
from megatron.core.transformer.tensor_cut import TensorCut, tensor_cuts


class Case(NamedTuple):
    cut: TensorCut
    whole: Tensor  # every element is another number
    num_parts: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.whole.shape)

    @property
    def parts(self) -> list[Tensor]:
        """The part of each rank, by the definition."""
        if self.cut.dim == 1:
            return [*self.whole.chunk(self.num_parts, 1)]
        sections = [each.chunk(self.num_parts) for each in self.whole.split(self.cut.sections)]
        return [torch.cat(part) for part in zip(*sections, strict=True)]

    @property
    def stored(self) -> Tensor:
        return torch.cat(self.parts)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_parts = draw(st.integers(1, 4))
    sizes = st.integers(1, 3)
    if draw(st.booleans()):
        sections = tuple(draw(sizes) * num_parts for _ in range(draw(sizes)))
        tail = draw(st.lists(sizes, max_size=2))
        cut, shape = TensorCut(0, sections), (sum(sections), *tail)
    else:
        rest = draw(st.lists(sizes, max_size=1))
        cut, shape = TensorCut(1), (draw(sizes), draw(sizes) * num_parts, *rest)
    numel = torch.Size(shape).numel()
    return Case(cut, torch.arange(numel).view(shape), num_parts)


@given(cases())
def test_stored_shapes_match_the_parts_one_after_the_other(case: Case) -> None:
    assert case.stored.shape == case.cut.stored_shape(case.shape, case.num_parts)
    assert case.cut.global_shape(case.stored.shape, case.num_parts) == case.shape
    for part in case.parts:
        assert part.shape == case.cut.part_shape(case.shape, case.num_parts)


@given(cases())
def test_the_global_order_comes_back_from_the_stored_one(case: Case) -> None:
    assert torch.equal(case.cut.to_global(case.stored, case.num_parts), case.whole)


@given(cases(), st.data())
def test_boxes_of_stored_rows_have_their_elements_in_stored_order(
    case: Case, data: st.DataObject
) -> None:
    stop = data.draw(st.integers(0, len(case.stored)))
    rows = range(data.draw(st.integers(0, stop)), stop)

    end = rows.start
    for box in case.cut.boxes(case.shape, case.num_parts, rows):
        assert box.rows.start == end
        own = case.stored[box.rows.start : box.rows.stop].reshape(box.sizes)
        end = box.rows.stop
        there = tuple(slice(o, o + s) for o, s in zip(box.offsets, box.sizes, strict=True))
        assert torch.equal(case.whole[there], own)
    assert end == rows.stop


@given(cases())
def test_no_box_spans_two_sections(case: Case) -> None:
    bounds = torch.tensor([0, *case.cut.sections]).cumsum(0).tolist()
    for box in case.cut.boxes(case.shape, case.num_parts, range(len(case.stored))):
        first, last = box.offsets[0], box.offsets[0] + box.sizes[0] - 1
        inside = [bound for bound in bounds[1:-1] if first < bound <= last]
        assert not inside


@pytest.mark.parametrize(
    ("cut", "shape"),
    [
        (TensorCut(0, (4, 3)), (7, 2)),
        (TensorCut(0, (4, 4)), (10, 2)),
        (TensorCut(1), (4, 3)),
        (TensorCut(1), (4,)),
    ],
    ids=["an odd section", "sections of other rows", "odd columns", "no columns"],
)
def test_a_parameter_that_cannot_be_divided_is_named(
    cut: TensorCut, shape: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match=r"layers\.0\.weight"):
        cut.check(shape, 2, "layers.0.weight")


def test_a_cut_needs_sections_for_rows_and_none_for_columns() -> None:
    for dim, sections in [(0, ()), (1, (4,)), (2, ())]:
        with pytest.raises(ValueError, match=f"dim {dim}"):
            TensorCut(dim, sections)


def declaring(layer: nn.Linear, **dims: int) -> nn.Linear:
    layer.tensor_dims = dims  # type: ignore[assignment]
    return layer


def test_modules_declare_their_cuts_and_sections() -> None:
    fused = declaring(FusedLinear(4, FusedWeight([("query", 8), ("key", 4)])), weight=0, bias=0)
    column = declaring(Linear(4, 6, bias=False), weight=0)
    row = declaring(Linear(4, 6), weight=1)
    model = nn.ModuleList([fused, column, row, Linear(4, 4)])

    assert tensor_cuts(model) == {
        fused.weight: TensorCut(0, (8, 4)),
        fused.bias: TensorCut(0, (8, 4)),
        column.weight: TensorCut(0, (6,)),
        row.weight: TensorCut(1),
    }


def test_a_tied_parameter_must_be_declared_alike() -> None:
    first = declaring(Linear(4, 4, bias=False), weight=0)
    second = declaring(Linear(4, 4, bias=False), weight=0)
    second.weight = first.weight
    assert tensor_cuts(nn.ModuleList([first, second])) == {first.weight: TensorCut(0, (4,))}

    second.tensor_dims = {"weight": 1}  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"1\.weight"):
        tensor_cuts(nn.ModuleList([first, second]))
