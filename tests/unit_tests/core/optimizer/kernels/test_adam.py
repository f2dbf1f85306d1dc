from __future__ import annotations

import dataclasses

import pytest
import torch

from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.piece import Piece, merged
from tests.unit_tests.core.optimizer.helpers.pieces import adam_piece

STEP = AdamStep(1, lr=0.1)


def buffers(numel: int) -> Piece:
    """A piece of whole buffers with everything that a piece can have."""
    return adam_piece(
        STEP,
        grad=torch.zeros(numel, dtype=torch.bfloat16),
        weight=torch.zeros(numel, dtype=torch.bfloat16),
        exp_avg=torch.zeros(numel),
        exp_avg_sq=torch.zeros(numel),
        remainder=torch.zeros(numel, dtype=torch.int16),
        out=torch.zeros(numel, dtype=torch.float16),
    )


def changed_with(piece: Piece, change: dict[str, torch.Tensor]) -> Piece:
    """With other arrays, by name."""
    states = {name: change.pop(name, state) for name, state in piece.states.items()}
    return piece._replace(states=states, **change)


def cut(piece: Piece, lengths: list[int]) -> list[Piece]:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [piece.part(start, numel) for start, numel in zip(starts, lengths, strict=True)]


def addresses(piece: Piece) -> list[tuple[int, int]]:
    return [(tensor.data_ptr(), tensor.numel()) for tensor in piece.arrays().values()]


def test_neighbours_join_to_what_they_were_cut_from_in_any_order():
    whole = buffers(100)
    first, second, third = cut(whole, [10, 40, 50])
    (joined,) = merged([third, first, second])
    assert addresses(joined) == addresses(whole)
    assert joined.step == STEP


def test_a_gap_keeps_pieces_apart_and_empty_pieces_go():
    whole = buffers(100)
    first, empty, gap, last = cut(whole, [10, 0, 30, 60])
    assert gap.numel == 30
    assert [piece.numel for piece in merged([first, empty, last])] == [10, 60]


def test_pieces_of_another_step_or_dtype_or_storage_stay_apart():
    first, second = cut(buffers(64), [32, 32])
    later = second._replace(step=dataclasses.replace(STEP, step=2))
    assert len(merged([first, later])) == 2
    assert (
        len(merged([first, second._replace(states=second.states | {"exp_avg": torch.zeros(32)})]))
        == 2
    )
    assert len(merged([first, second._replace(out=second.out.view(torch.bfloat16))])) == 2
    assert len(merged([first, second._replace(out=None)])) == 2
    assert len(merged([first, second])) == 1


def test_joined_pieces_of_parameters_do_not_require_gradients():
    weight = torch.nn.Parameter(torch.zeros(8))
    pieces = cut(adam_piece(STEP, torch.zeros(8), weight, torch.zeros(8), torch.zeros(8)), [4, 4])
    (joined,) = merged(pieces)
    assert joined.weight.data_ptr() == weight.data_ptr()
    assert not joined.weight.requires_grad


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grad": torch.zeros(8, dtype=torch.float64)}, r"grad of .*float64"),
        ({"weight": torch.zeros(8)}, "weight of .*float32"),
        ({"exp_avg": torch.zeros(8, dtype=torch.float16)}, "exp_avg of .*float16"),
        ({"exp_avg_sq": torch.zeros(8, dtype=torch.bfloat16)}, "exp_avg_sq of .*bfloat16"),
        ({"remainder": torch.zeros(8, dtype=torch.int32)}, "remainder of .*int32"),
        ({"out": torch.zeros(8, dtype=torch.float64)}, "out of .*float64"),
        ({"grad": torch.zeros(9)}, "grad of 8 .* 9"),
        ({"exp_avg": torch.zeros(16)[::2]}, "contiguous exp_avg"),
        ({"out": torch.zeros(8, device="meta")}, "out on cpu .* meta"),
    ],
)
def test_a_piece_that_no_kernel_could_carry_out_is_rejected(change, message):
    piece = buffers(8)
    piece.check()
    with pytest.raises(ValueError, match=message):
        changed_with(piece, dict(change)).check()


def test_an_out_that_shares_a_part_of_the_gradients_memory_is_rejected():
    memory = torch.zeros(12, dtype=torch.bfloat16)
    piece = buffers(8)._replace(grad=memory[:8])
    piece._replace(out=memory[:8]).check()
    piece._replace(out=memory[:8].view(torch.float16)).check()
    with pytest.raises(ValueError, match=r"at byte 8 of a torch.bfloat16 grad"):
        piece._replace(out=memory[4:]).check()
    wide = torch.zeros(8)
    with pytest.raises(ValueError, match=r"got torch.bfloat16 at byte 0 of a torch.float32 grad"):
        piece._replace(grad=wide, out=wide.view(torch.bfloat16)[:8]).check()


def test_a_step_of_no_meaning_is_rejected():
    with pytest.raises(ValueError, match="Expected a step of at least 1, got 0"):
        AdamStep(0, lr=0.1)
    with pytest.raises(ValueError, match=r"Expected beta2 in \[0, 1\), got 1.0"):
        AdamStep(1, lr=0.1, beta2=1.0)
