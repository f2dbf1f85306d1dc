"""A small stack of layers, sharded under a policy of dtypes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from megatron.core.distributed.fsdp import (
    FsdpContext,
    MixedPrecisionPolicy,
    microbatch,
)
from tests.unit_tests.core.distributed.fsdp.parity.helpers.shardings import FP32
from tests.unit_tests.core.distributed.fsdp.parity.helpers.subjects import (
    Layer,
    Stack,
    Subject,
    batches,
    built,
    shard,
    square_mean,
)


def stack_subject(dtype: torch.dtype = FP32) -> Subject:
    stack = Stack(Layer()).to(dtype)
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x.to(dtype)).float()))


def sharded_stack(sharding: str, dtype: torch.dtype, **options: Any) -> tuple[Subject, FsdpContext]:
    """A stack under the policy that the options describe."""
    subject = built(lambda: stack_subject(dtype))
    subject.options = {
        "grad_divisor": options.pop("grad_divisor", 1),
        "mixed_precision_policy": MixedPrecisionPolicy(**options),
    }
    return subject, shard(subject, sharding)


def backward(
    subject: Subject, context: FsdpContext, numbers: Sequence[int], *, is_whole: bool = True
) -> None:
    """The microbatches of these numbers; they end a step if `is_whole`."""
    for number in numbers:
        with microbatch(context, is_last=is_whole and number == numbers[-1]):
            subject.loss(batches(0, number)[dist.get_rank()]).backward()
