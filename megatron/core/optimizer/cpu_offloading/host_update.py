"""How the parameters of one bucket are updated in host memory: by our Adam, flat, or by any PyTorch
optimizer.

`prepare` runs in the thread that plans the step, while the hyperparameters are what they are, and
changes nothing. The factor of the gradients need not be known yet. Once all buckets have been
prepared, `begin` counts the step, and its work runs on the host lane.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.device_link import Slot
from megatron.core.optimizer.cpu_offloading.host_arrays import MASTER, BucketArrays
from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep, merged, with_grad_scale
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.state_tensors import like
from megatron.core.optimizer.torch_optimizer import copy_state, init_torch_states, load_torch_states

# The options of a parameter: its group's, without "params".
Options = Mapping[str, Any]


class Prepared(NamedTuple):
    """A step of one bucket that can be done."""

    begin: Callable[[], None]
    work: Callable[[float], None]  # given the factor of the gradients
    nbytes: int = 0  # that the work reads and writes; 0: not known


class HostUpdate(Protocol):
    """See the module's docstring."""

    def prepare(
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options]
    ) -> Prepared:
        """The step of the slots (with their numbers) that have a gradient. ValueError for options
        it cannot honour.
        """

    def states(self, index: int) -> dict[str, Any]:
        """The states of a slot by name, as its parameter's owner sees them. Allocates nothing."""

    def init_states(self) -> None:
        """Allocates all states, without stepping."""

    def own_nbytes(self) -> dict[str, int]:
        """Bytes of the states that are not in the bucket's memory, by name, as far as there are any
        yet.
        """

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        """Takes over the states of a slot, which have been checked against its own; none: it was
        never stepped.
        """


class FlatAdam:
    """AdamW over the whole bucket: one pass that reads gradients and writes states and compute
    weights.
    """

    def __init__(
        self,
        bucket: BucketArrays,
        exp_avg: torch.Tensor,
        exp_avg_sq: torch.Tensor,
        adam: HostAdam,
        adam_w_mode: bool,
    ) -> None:
        self._bucket = bucket
        self._adam_w_mode = adam_w_mode
        self._arrays = {"exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
        self._adam = adam
        self._states = [self._make_states(index) for index in range(len(bucket.link.slots))]

    def prepare(
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options]
    ) -> Prepared:
        counters = [self._states[index]["step"] for index, _ in stepped]
        steps = [
            AdamStep.of(options(slot.parameter), int(counter) + 1, 1.0, self._adam_w_mode)
            for (_, slot), counter in zip(stepped, counters, strict=True)
        ]
        pieces = merged(
            self._piece(slot, step)
            for (_, slot), step in zip(stepped, steps, strict=True)
            if slot.numel
        )

        def begin() -> None:
            for counter, step in zip(counters, steps, strict=True):
                counter.fill_(step.step)

        nbytes = sum(map(_traffic, pieces))
        return Prepared(
            begin, lambda grad_scale: self._adam.run(with_grad_scale(pieces, grad_scale)), nbytes
        )

    def states(self, index: int) -> dict[str, Any]:
        return self._states[index]

    def init_states(self) -> None:
        """They are there from the start."""

    def own_nbytes(self) -> dict[str, int]:
        return {}

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        for name, own in self._states[index].items():
            if name in states or name != MASTER:
                copy_state(own, states.get(name, 0.0))
        if MASTER not in states:
            self._bucket.forget_master(index)

    def _piece(self, slot: Slot, step: AdamStep) -> AdamPiece:
        return AdamPiece(
            step=step,
            grad=slot.of(self._bucket.grad),
            weight=slot.of(self._bucket.main_weight),
            exp_avg=slot.of(self._arrays["exp_avg"]),
            exp_avg_sq=slot.of(self._arrays["exp_avg_sq"]),
            out=slot.of(self._bucket.weight),
        )

    def _make_states(self, index: int) -> dict[str, torch.Tensor]:
        link = self._bucket.link
        states = {"step": torch.zeros((), dtype=torch.float32)}
        states |= {name: link.as_state(array, index) for name, array in self._arrays.items()}
        return states | self._bucket.master(index)


class TorchUpdate:
    """Any PyTorch optimizer over views of the bucket's main weights."""

    def __init__(
        self,
        bucket: BucketArrays,
        cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        widened: torch.Tensor | None,
    ) -> None:
        """`widened` is memory for the bucket's gradients in the dtype of its main weights, if they
        have another.
        """
        self._bucket = bucket
        self._widened = None if widened is None else widened.view(bucket.main_weight.dtype)
        self._parameters = [self._view(slot) for slot in bucket.link.slots]
        # A group for each, so that every parameter keeps the options of the group it has outside.
        self._optimizer = cls(
            [{"params": [parameter]} for parameter in self._parameters], **options
        )
        self._states: list[dict[str, Any]] = [{} for _ in self._parameters]
        self._inner: list[dict[str, Any]] = [
            {} for _ in self._parameters
        ]  # what _states was made from

    def prepare(
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options]
    ) -> Prepared:
        known = self._optimizer.defaults
        values = {
            index: {name: value for name, value in options(slot.parameter).items() if name in known}
            for index, slot in stepped
        }
        return Prepared(lambda: None, lambda grad_scale: self._step(stepped, values, grad_scale))

    def states(self, index: int) -> dict[str, Any]:
        states, seen = self._states[index], self._inner[index]
        if not states:
            states.update(self._bucket.master(index))
        for name, value in self._optimizer.state.get(self._parameters[index], {}).items():
            if name not in seen or seen[name] is not value:
                seen[name], states[name] = value, self._as_state(index, value)
        return states

    def init_states(self) -> None:
        init_torch_states(self._optimizer)

    def own_nbytes(self) -> dict[str, int]:
        nbytes: dict[str, int] = {}
        for states in self._optimizer.state.values():
            for name, value in states.items():
                if isinstance(value, torch.Tensor) and value.dim():
                    nbytes[name] = nbytes.get(name, 0) + value.nbytes
        return nbytes

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        if MASTER in states:
            copy_state(self.states(index)[MASTER], states[MASTER])
        else:
            self._bucket.forget_master(index)
        self._states[index].clear()
        self._inner[index].clear()
        inner = {name: value for name, value in states.items() if name != MASTER}
        load_torch_states(self._optimizer, self._parameters[index], inner)

    def _step(
        self, stepped: Sequence[tuple[int, Slot]], values: Mapping[int, Options], grad_scale: float
    ) -> None:
        bucket = self._bucket
        for parameter in self._parameters:
            parameter.grad = None
        for index, slot in stepped:
            self._optimizer.param_groups[index].update(values[index])
            grad = slot.of(bucket.grad)
            if grad_scale != 1:
                grad.mul_(grad_scale)  # rounded as on the device, where it is done in place too
            if grad.dtype != bucket.main_weight.dtype:
                assert self._widened is not None, "allocated for this"
                grad = slot.of(self._widened).copy_(grad)
            self._parameters[index].grad = grad.view_as(self._parameters[index])
        self._optimizer.step()
        for index, slot in stepped:
            self._parameters[index].grad = None
            slot.of(bucket.weight).copy_(slot.of(bucket.main_weight))

    def _view(self, slot: Slot) -> nn.Parameter:
        return nn.Parameter(
            slot.of(self._bucket.main_weight).view(local_tensor(slot.parameter).shape)
        )

    def _as_state(self, index: int, value: Any) -> Any:
        parameter = self._bucket.link.slots[index].parameter
        is_like = isinstance(value, torch.Tensor) and value.shape == self._parameters[index].shape
        return like(parameter, value) if is_like else value


def _traffic(piece: AdamPiece) -> int:
    """Bytes that a pass over these arrays reads and writes: weight and moments both, the others one
    of the two.
    """
    both = (piece.weight, piece.exp_avg, piece.exp_avg_sq)
    return (
        2 * sum(array.nbytes for array in both)
        + piece.grad.nbytes
        + (0 if piece.out is None else piece.out.nbytes)
    )
