"""How the parameters of one bucket are updated in host memory: by our Adam, flat, or by any PyTorch optimizer.

`prepare` runs in the thread that calls `step`, while the hyperparameters are what they are; the work that it answers
runs on the host lane. Both see the same bucket, in the same order, step after step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from megatron.core.distributed.fsdp.gradients import local_tensor
from megatron.core.optimizer.cpu_offloading.device_link import Slot
from megatron.core.optimizer.cpu_offloading.host_arrays import BucketArrays
from megatron.core.optimizer.kernels.adam import AdamPiece, AdamStep, merged
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.state_tensors import like
from megatron.core.optimizer.torch_optimizer import init_torch_states

# The options of a parameter: its group's, without "params".
Options = Mapping[str, Any]


class HostUpdate(Protocol):
    """See the module's docstring."""

    def prepare(
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options], grad_scale: float
    ) -> Callable[[], None]:
        """Advances the step of the slots (with their numbers) that have a gradient, and answers the work to do."""

    def states(self, index: int) -> dict[str, Any]:
        """The states of a slot by name, as its parameter's owner sees them. Allocates nothing."""

    def init_states(self) -> None:
        """Allocates all states, without stepping."""

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        """Takes over the states of a slot, which have been checked against its own; none: it was never stepped."""


class FlatAdam:
    """AdamW over the whole bucket: one pass that reads gradients and writes states and compute weights."""

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
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options], grad_scale: float
    ) -> Callable[[], None]:
        pieces = []
        for index, slot in stepped:
            step = self._states[index]["step"]
            step += 1
            if slot.numel:
                constants = adam_step(options(slot.parameter), int(step), grad_scale, self._adam_w_mode)
                pieces.append(self._piece(slot, constants))
        joined = merged(pieces)
        return lambda: self._adam.run(joined)

    def states(self, index: int) -> dict[str, Any]:
        return self._states[index]

    def init_states(self) -> None:
        """They are there from the start."""

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        for name, own in self._states[index].items():
            copy_state(own, states.get(name, 0.0))

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
        return states | {name: link.as_state(array, index) for name, array in self._arrays.items()}


class TorchUpdate:
    """Any PyTorch optimizer over views of the bucket's main weights."""

    def __init__(self, bucket: BucketArrays, cls: type[torch.optim.Optimizer], options: dict[str, Any]) -> None:
        self._bucket = bucket
        self._parameters = [self._view(slot) for slot in bucket.link.slots]
        # A group for each, so that every parameter keeps the options of the group it has outside.
        self._optimizer = cls([{"params": [parameter]} for parameter in self._parameters], **options)
        self._states: list[dict[str, Any]] = [{} for _ in self._parameters]
        self._inner: list[dict[str, Any]] = [{} for _ in self._parameters]  # what _states was made from

    def prepare(
        self, stepped: Sequence[tuple[int, Slot]], options: Callable[[nn.Parameter], Options], grad_scale: float
    ) -> Callable[[], None]:
        known = self._optimizer.defaults
        values = {
            index: {name: value for name, value in options(slot.parameter).items() if name in known}
            for index, slot in stepped
        }
        return lambda: self._step(stepped, values, grad_scale)

    def states(self, index: int) -> dict[str, Any]:
        states, seen = self._states[index], self._inner[index]
        for name, value in self._optimizer.state.get(self._parameters[index], {}).items():
            if name not in seen or seen[name] is not value:
                seen[name], states[name] = value, self._as_state(index, value)
        return states

    def init_states(self) -> None:
        init_torch_states(self._optimizer)

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        if not states:
            self._optimizer.state.pop(self._parameters[index], None)
            self._states[index].clear()
            self._inner[index].clear()
            return
        own = self._optimizer.state[self._parameters[index]]
        for name, value in states.items():
            if isinstance(own.get(name), torch.Tensor):
                copy_state(own[name], value)
            elif isinstance(value, torch.Tensor):
                own[name] = local_tensor(value).detach().to("cpu", copy=True)
            else:
                own[name] = value

    def _step(self, stepped: Sequence[tuple[int, Slot]], values: Mapping[int, Options], grad_scale: float) -> None:
        bucket = self._bucket
        for parameter in self._parameters:
            parameter.grad = None
        for index, slot in stepped:
            self._optimizer.param_groups[index].update(values[index])
            grad = slot.of(bucket.grad)
            if grad_scale != 1:
                grad.mul_(grad_scale)  # rounded as on the device, where it is done in place too
            self._parameters[index].grad = grad.to(bucket.main_weight.dtype).view_as(self._parameters[index])
        self._optimizer.step()
        for index, slot in stepped:
            self._parameters[index].grad = None
            slot.of(bucket.weight).copy_(slot.of(bucket.main_weight))

    def _view(self, slot: Slot) -> nn.Parameter:
        return nn.Parameter(slot.of(self._bucket.main_weight).view(local_tensor(slot.parameter).shape))

    def _as_state(self, index: int, value: Any) -> Any:
        parameter = self._bucket.link.slots[index].parameter
        is_like = isinstance(value, torch.Tensor) and value.shape == self._parameters[index].shape
        return like(parameter, value) if is_like else value


def adam_step(options: Options, step: int, grad_scale: float, adam_w_mode: bool) -> AdamStep:
    """The constants of one step, from a parameter group's options."""
    beta1, beta2 = options["betas"]
    return AdamStep(
        step=step,
        lr=float(options["lr"]),
        beta1=float(beta1),
        beta2=float(beta2),
        eps=float(options["eps"]),
        weight_decay=float(options["weight_decay"]),
        adam_w_mode=adam_w_mode,
        bias_correction=bool(options.get("bias_correction", True)),
        grad_scale=grad_scale,
    )


def copy_state(own: torch.Tensor, value: Any) -> None:
    """Writes a state, a tensor or a number, into the tensor that it lies in; nothing if it is that very memory."""
    target = local_tensor(own)
    if not isinstance(value, torch.Tensor):
        target.fill_(value)
    elif local_tensor(value).data_ptr() != target.data_ptr() or target.numel() == 0:
        target.copy_(local_tensor(value))
