from __future__ import annotations

import pytest
from torch.distributed.tensor import Partial, Replicate, Shard

from megatron.core.distributed.fsdp.placement import (
    Flat,
    Placements,
    axes_to_move,
    check_placements,
    sharded_axes,
)


def test_flat_is_a_shard_of_dim_zero():
    assert Flat() == Shard(0)
    assert Flat().dim == 0
    assert sharded_axes((Replicate(), Flat())) == (False, True)


@pytest.mark.parametrize(
    ("placements", "error", "message"),
    [
        ((Flat(), Replicate()), ValueError, "the Flat placements to be a suffix of the list"),
        ((Shard(1),), NotImplementedError, "Expected dim-0 Shard placements"),
        (("Flat",), TypeError, "got 'Flat' on axis 0"),
        ((Partial("max"),), TypeError, "Partial\\('sum'\\) or Partial\\('avg'\\)"),
    ],
)
def test_placements_that_a_flat_buffer_lacks_are_rejected(placements, error, message):
    with pytest.raises(error, match=message):
        check_placements(placements)


@pytest.mark.parametrize(
    ("old", "new", "axes"),
    [
        ((Replicate(), Replicate()), (Flat(), Flat()), [1, 0]),
        ((Flat(), Flat()), (Replicate(), Replicate()), [0, 1]),
        ((Partial("avg"), Flat()), (Replicate(), Flat()), [0]),
        ((Replicate(), Flat()), (Replicate(), Flat()), []),
    ],
)
def test_a_redistribution_keeps_the_cut_axes_last_on_its_way(old, new, axes):
    assert axes_to_move(old, new) == axes


def test_the_zero_strategies_are_values():
    avg = Partial("avg")
    assert Placements.for_strategy("no_shard") == Placements(
        (0,), (Replicate(),), (avg,), (Replicate(),)
    )
    assert Placements.for_strategy("optim") == Placements((0,), (Replicate(),), (avg,), (Flat(),))
    assert Placements.for_strategy("optim_grads") == Placements(
        (0,), (Replicate(),), (Flat(),), (Flat(),)
    )
    zero3 = Placements.for_strategy("optim_grads_params", "dp")
    assert zero3 == Placements(("dp",), (Flat(),), (Flat(),), (Flat(),))
    assert (zero3.defers_reduction, Placements.for_strategy("optim").defers_reduction) == (
        False,
        True,
    )
    with pytest.raises(ValueError, match=r"Expected one of .*'optim_grads_params'.*, got 'zero3'"):
        Placements.for_strategy("zero3")


def test_placements_are_values_and_name_every_axis_once():
    lists, tuples = (Placements(kind(["dp"]), *[kind([Flat()])] * 3) for kind in (list, tuple))
    assert lists == tuples
    assert hash(lists) == hash(tuples)
    with pytest.raises(ValueError, match="Expected distinct data-parallel axes"):
        Placements(("dp", "dp"), *[[Flat(), Flat()]] * 3)


@pytest.mark.parametrize(
    ("parameter", "gradient", "optimizer", "message"),
    [
        (
            [Flat()],
            [Replicate()],
            [Flat()],
            "Shard\\(0\\) as gradient placement wherever the parameter placement is",
        ),
        (
            [Replicate()],
            [Flat()],
            [Replicate()],
            "Shard\\(0\\) as optimizer placement wherever the gradient placement is",
        ),
        ([Flat()] * 2, [Flat()], [Flat()], "Expected 1 parameter placements, .*, got 2"),
        (
            [Replicate()],
            [Replicate()],
            [Flat()],
            "Shard\\(0\\) or Partial as gradient placement wherever the optimizer",
        ),
        ([Partial()], [Partial()], [Flat()], "Replicate or Shard\\(0\\) as parameter placements"),
        (
            [Replicate()],
            [Partial()],
            [Partial()],
            "Replicate or Shard\\(0\\) as optimizer placements",
        ),
    ],
)
def test_placements_that_do_not_fit_together_are_rejected(parameter, gradient, optimizer, message):
    with pytest.raises(ValueError, match=message):
        Placements(("dp",), parameter, gradient, optimizer)


def test_a_kept_axis_is_one_more_axis_that_cuts_everything():
    dense = Placements.for_strategy("optim")
    kept = dense.with_kept_axis("ep", other_axes=["edp"])
    assert kept == Placements(
        ("edp", "ep"),
        (Replicate(), Flat()),
        (Partial("avg"), Flat()),
        (Flat(), Flat()),
        kept_axes=("ep",),
    )
    assert dense.with_kept_axis(1).dp_axes == (0, 1)
    assert (dense.is_kept, kept.is_kept) == ((False,), (False, True))
    assert (dense.in_use, kept.in_use) == ((Replicate(),), (Replicate(), Flat()))
    assert kept.defers_reduction
    assert kept != Placements(kept.dp_axes, kept.parameter, kept.gradient, kept.optimizer)
    assert "kept_axes=('ep',)" in repr(kept)
    assert kept.with_kept_axis("more").kept_axes == ("ep", "more")


@pytest.mark.parametrize(
    "kept_axes", [("edp",), ("ep", "edp"), ("other",), (1,), ("a", "edp", "ep")]
)
def test_kept_axes_are_the_last_ones(kept_axes):
    everything = (Flat(), Flat())
    with pytest.raises(ValueError, match="Expected the kept axes to be the last ones of dp_axes"):
        Placements(("edp", "ep"), everything, everything, everything, kept_axes)


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_a_kept_axis_cuts_the_weights_too(strategy):
    one = Placements.for_strategy(strategy)
    with pytest.raises(
        ValueError, match=r"Expected Flat placements on the kept axes \(0,\), got parameter="
    ):
        Placements((0,), one.parameter, one.gradient, one.optimizer, kept_axes=(0,))
