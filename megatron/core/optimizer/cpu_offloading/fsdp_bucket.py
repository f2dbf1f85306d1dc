"""`FsdpBucket`: the parameters of one FSDP group."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from functools import partial

import torch
from torch import nn

from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.dtensors import local_tensor
from megatron.core.lane_timings import D2H, Recorder, StepRecorder
from megatron.core.lanes import Event, IssuingLane, Lane
from megatron.core.optimizer.cpu_offloading.bucket import Bucket, Slot, fetch_each


class FsdpBucket(Bucket):
    """The arrays have the layout of the group's own shards, and its main weights are `main_weight`
    itself.
    """

    is_delivered = True

    def __init__(self, group: FsdpParameterGroup, stepped: Iterable[nn.Parameter]) -> None:
        main_grad, gradients = group.main_grad, group.gradients
        assert main_grad is not None, "parameters that are stepped require gradients"
        assert gradients is not None, "as main_grad"
        self._group = group
        self._main_grad = main_grad
        self._gradients = gradients
        self._indices = sorted(group.index_of(parameter) for parameter in stepped)
        self._fetched: int | None = None  # main_versions of the gradients in `grad`
        super().__init__(
            group.display_name,
            [self._slot(index) for index in self._indices],
            group.main_weight.range.numel,
            main_dtype=group.main_weight.dtype,
            grad_dtype=main_grad.dtype,
            weight_dtype=group.dtype,
            accepted_grad_dtypes=(main_grad.dtype,),
        )

    def own_main_weight(self) -> torch.Tensor | None:
        # For autograd, an update of the array is no change of the parameters: the delivery is.
        return apart(self._group.main_weight.local_buffer) if self._group.is_on_host else None

    def adopt(self, owner: object) -> None:
        if not self._group.is_on_host:
            self._group.put_main_weight(self._as_buffer(apart(self.main_weight)))
        self._group.delivery.claim(owner)

    def reload(self) -> None:
        self._group.mark_updated()

    def check(self, owner: object) -> None:
        if not self._group.delivery.is_claimed_by(owner):
            raise RuntimeError(
                f"Expected to be the one optimizer of {self.name}, got another one, made later, "
                "that updates its main weights."
            )

    def fetch_during_backward(self, lane: Lane, timings: Recorder) -> None:
        # The group belongs to the model, and must keep neither the optimizer nor its lanes alive.
        own_bucket, own_lane = weakref.ref(self), weakref.ref(lane)

        def send_down(reduced: Event) -> Event:
            bucket, lane = own_bucket(), own_lane()
            if bucket is None or lane is None:
                return reduced

            # A worker thread issues the copy behind the reduction, which has counted its writes,
            # but not behind writes of this thread until the worker gets to it.
            is_late = isinstance(lane, IssuingLane)
            fetch = partial(bucket.fetch_early, bucket._main_versions() if is_late else None)
            timed = timings.coming.timed(D2H, fetch, bucket.grad.nbytes, bucket.name)
            return bucket.queue_fetch(lane, timed, [reduced])

        self._group.send_main_grad(send_down)

    def fetch_early(self, seen_versions: int | None = None) -> None:
        """Copies all gradients before the step.

        Args:
            seen_versions: `_main_versions` when the copy was asked for, if later writes are not in
                it.
        """
        # Before the copy: writes during the copy must count as writes after it.
        self._fetched = self._main_versions() if seen_versions is None else seen_versions
        self.grad.copy_(self._main_grad.local_buffer, non_blocking=True)

    def fetch(self, gradients: Sequence[tuple[Slot, torch.Tensor]]) -> None:
        indices = {
            id(slot.parameter): index for slot, index in zip(self.slots, self._indices, strict=True)
        }
        # Gradients that a caller assigned are outside of the group's buffer.
        others = [
            (slot, gradient)
            for slot, gradient in gradients
            if not self._gradients.is_main(indices[id(slot.parameter)], gradient)
        ]
        if len(others) < len(gradients) and self._fetched != self._main_versions():
            self.grad.copy_(self._main_grad.local_buffer, non_blocking=True)
        self._fetched = None
        fetch_each(self.grad, others)

    def send(self, stepped: Sequence[Slot]) -> None:
        target = self._group.post_optimizer_model_weight.local_buffer
        for offset, numel in _ranges(stepped):
            target.narrow(0, offset, numel).copy_(
                self.weight.narrow(0, offset, numel), non_blocking=True
            )

    def deliver(self, timings: StepRecorder) -> None:
        assert self.sent is not None, "called once the weights' way up is queued"
        self._group.delivery.announce(
            timings.awaited(self.sent), before_use=timings.before_use(self.sent)
        )

    def as_state(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        return self._as_buffer(flat).get_dtensor(self._indices[index])

    def _main_versions(self) -> int:
        """Counts the writes to the group's gradients."""
        return self._gradients.main_versions()

    def _as_buffer(self, flat: torch.Tensor) -> DBuffer:
        group = self._group
        return DBuffer.from_local(flat, group.mesh, group.placements.optimizer, group.layout)

    def _slot(self, index: int) -> Slot:
        parameter = self._group.fsdp_parameters[index].sharded
        offset = self._group.main_weight.chunk(index).offset
        return Slot(parameter, offset, local_tensor(parameter).numel())


def _ranges(slots: Sequence[Slot]) -> list[tuple[int, int]]:
    """Returns (offset, numel) of the slots, with neighbours joined."""
    ranges: list[tuple[int, int]] = []
    for slot in sorted(slots, key=lambda slot: slot.offset):
        if ranges and sum(ranges[-1]) == slot.offset:
            ranges[-1] = (ranges[-1][0], ranges[-1][1] + slot.numel)
        elif slot.numel:
            ranges.append((slot.offset, slot.numel))
    return ranges
