"""Sharded modules under activation checkpointing train as they do unsharded on one rank (fp32)."""

from __future__ import annotations

import pytest
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.spec import AttentionSpec, Sinks
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    WIDTH,
    Layer,
    Stack,
    Subject,
    layers,
    square_mean,
    trains_as_on_one_rank,
)


class Segments(Stack):
    """Runs its modules in checkpointed pairs."""

    def __init__(self, *inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*inner)
        self.use_reentrant = use_reentrant

    def run(self, x: Tensor) -> Tensor:
        for first, second in zip(self.inner[::2], self.inner[1::2], strict=True):
            x = checkpoint(
                lambda x, first=first, second=second: second(first(x)),
                x,
                use_reentrant=self.use_reentrant,
            )
        return x


class SelfRecomputing(Layer):
    """Checkpoints its own body."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


recomputation = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "non-reentrant"]
)


@recomputation
@trains_as_on_one_rank
def test_sharded_modules_that_are_recomputed_from_outside(use_reentrant) -> Subject:
    stem, *inner = layers(4)

    def loss(x: Tensor) -> Tensor:
        x = stem(x)
        for layer in inner:
            x = checkpoint(layer, x, use_reentrant=use_reentrant)
        return square_mean(x)

    return Subject([stem, *inner], loss, calls=7)


@recomputation
@trains_as_on_one_rank
def test_sharded_modules_of_a_sharded_root_that_are_recomputed_one_by_one(use_reentrant) -> Subject:
    class Recomputing(Stack):
        def run(self, x: Tensor) -> Tensor:
            x = x + self.scale
            for module in self.inner:
                x = checkpoint(module, x, use_reentrant=use_reentrant)
            return x

    stack = Recomputing(*layers(3))
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)), calls=6)


@recomputation
@trains_as_on_one_rank
def test_a_recomputed_region_of_several_sharded_modules(use_reentrant) -> Subject:
    stem, *inner = layers(5)
    root = nn.Sequential(stem, Segments(*inner, use_reentrant=use_reentrant))
    return Subject([stem, *inner, root], lambda x: square_mean(root(x)), calls=9)


@recomputation
@trains_as_on_one_rank
def test_a_recomputed_region_without_a_sharded_module_around_it(use_reentrant) -> Subject:
    inner = layers(4)

    def region(x: Tensor) -> Tensor:
        for layer in inner[1:]:
            x = layer(x)
        return x

    return Subject(
        inner,
        lambda x: square_mean(checkpoint(region, inner[0](x), use_reentrant=use_reentrant)),
        calls=7,
    )


@recomputation
@trains_as_on_one_rank
def test_a_whole_sharded_model_that_is_recomputed(use_reentrant) -> Subject:
    stack = Stack(*layers(3))

    def loss(x: Tensor) -> Tensor:
        # A reentrant checkpoint has a backward only if an input has one.
        return square_mean(
            checkpoint(stack, x.clone().requires_grad_() + 0, use_reentrant=use_reentrant)
        )

    return Subject([*stack.inner, stack], lambda x: loss(x.detach()) + 0 * x.sum(), calls=6)


@recomputation
@trains_as_on_one_rank
def test_a_sharded_module_that_recomputes_its_own_body(use_reentrant) -> Subject:
    stem = Layer()
    stack = Stack(*(SelfRecomputing(use_reentrant) for _ in range(3)))
    root = nn.Sequential(stem, stack)
    return Subject([stem, *stack.inner, root], lambda x: square_mean(root(x)), calls=7)


@recomputation
@trains_as_on_one_rank
def test_a_sharded_module_that_recomputes_its_own_body_with_sharded_modules_in_it(
    use_reentrant,
) -> Subject:
    stem, *inner = layers(5)
    segments = Segments(*inner, use_reentrant=use_reentrant)
    return Subject([stem, *inner, segments], lambda x: square_mean(segments(stem(x))), calls=9)


@trains_as_on_one_rank
def test_a_recomputed_region_in_a_recomputed_region() -> Subject:
    stem, *inner = layers(5)
    segments = Segments(*inner, use_reentrant=False)
    return Subject(
        [stem, *inner, segments],
        lambda x: square_mean(checkpoint(segments, stem(x), use_reentrant=False)),
        calls=1 + 4 * 3,
    )


@recomputation
@trains_as_on_one_rank
def test_a_recomputed_module_that_is_called_twice(use_reentrant) -> Subject:
    stem, twice, between = layers(3)

    def loss(x: Tensor) -> Tensor:
        x = checkpoint(twice, stem(x), use_reentrant=use_reentrant)
        return square_mean(checkpoint(twice, between(x), use_reentrant=use_reentrant))

    return Subject([stem, twice, between], loss, calls=6, keeps_weights=None)


@recomputation
@trains_as_on_one_rank
def test_a_recomputed_module_that_is_called_again_at_once(use_reentrant) -> Subject:
    """The reduction of its first gradients may be under way when the second ones come."""

    stem, twice = layers(2)

    def loss(x: Tensor) -> Tensor:
        x = checkpoint(twice, stem(x), use_reentrant=use_reentrant)
        return square_mean(checkpoint(twice, x, use_reentrant=use_reentrant))

    return Subject([stem, twice], loss, calls=5)


@recomputation
@trains_as_on_one_rank
def test_a_module_that_recomputes_its_own_body_and_is_called_twice(use_reentrant) -> Subject:
    stem, twice = Layer(), SelfRecomputing(use_reentrant)
    stack = Stack(stem, twice, twice)
    return Subject(
        [stem, twice, stack], lambda x: square_mean(stack(x)), calls=5, keeps_weights=None
    )


@recomputation
@trains_as_on_one_rank
def test_a_module_in_two_recomputed_regions(use_reentrant) -> Subject:
    stem, shared, first, second = layers(4)

    def loss(x: Tensor) -> Tensor:
        x = stem(x)
        y = checkpoint(lambda x: first(shared(x)), x, use_reentrant=use_reentrant)
        z = checkpoint(lambda x, y: second(x) + shared(y), x, y, use_reentrant=use_reentrant)
        return square_mean(y + z)

    return Subject([stem, shared, first, second], loss, calls=9, keeps_weights=None)


@recomputation
@trains_as_on_one_rank
def test_a_recomputed_region_of_modules_that_keep_their_weights(use_reentrant) -> Subject:
    stem, *inner = layers(5)
    root = nn.Sequential(stem, Segments(*inner, use_reentrant=use_reentrant))
    options = {"reshard_after_forward": False}
    return Subject(
        [stem, *inner, root],
        lambda x: square_mean(root(x)),
        calls=9,
        options=options,
        keeps_weights=None,
    )


@pytest.mark.parametrize("softcap", [None, 1.0])
@trains_as_on_one_rank
def test_attention_that_recomputes_its_core_and_reads_its_sinks_there(softcap) -> Subject:
    spec = AttentionSpec(2, 1, 3, scale=1.0, window=2, sinks=Sinks.LEARNED, softcap=softcap)

    stds = {"init_std": 0.5, "output_init_std": 0.5}
    attention = SelfAttention(spec, WIDTH, **stds, recompute_granularity="selective")
    stack = Stack(attention)
    return Subject([attention, stack], lambda x: square_mean(stack(x.unsqueeze(0))), calls=0)
