"""Executors of one bucket in host memory: a rule in one flat pass, or any PyTorch optimizer.

`prepare` runs in the thread that plans the step. It only reads hyperparameters; the factor of the
gradients is not known yet. Once all buckets are prepared, `begin` increments the step counters, and
the update runs on the host lanes: `start`, then the function that it returns.
"""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from megatron.core.dtensors import local_tensor
from megatron.core.optimizer.cpu_offloading.bucket import Bucket, BucketStep, Slot
from megatron.core.optimizer.kernels.newton_schulz import MuonStep
from megatron.core.optimizer.kernels.piece import HostKernel, Piece, merged
from megatron.core.optimizer.matrix_pass import MatrixStep
from megatron.core.optimizer.rule_states import LocalArray
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_tensors import MASTER, STEP, like
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.torch_optimizer import copy_state, init_torch_states, load_torch_states

Options = Mapping[str, Any]  # of a parameter's group


class Stepped(NamedTuple):
    """A slot whose parameter has a gradient, and its options."""

    number: int  # of the slot in the bucket
    slot: Slot
    gradient: torch.Tensor
    options: Options
    matrix_rows: tuple[int, ...] = ()  # of the matrices in it; empty where the rule takes none


class Executor(ABC):
    """Updates the arrays of one bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self.bucket = bucket

    def main_parameters(self) -> list[nn.Parameter]:
        """Views of the main weights, in the shapes of this rank's parts of the parameters."""
        main_weight = self.bucket.main_weight
        return [
            nn.Parameter(slot.of(main_weight).view(local_tensor(slot.parameter).shape))
            for slot in self.bucket.slots
        ]

    @abstractmethod
    def prepare(self, stepped: Sequence[Stepped]) -> BucketStep:
        """Plans the step of some slots. Raises ValueError for unsupported options."""

    @abstractmethod
    def states(self, index: int) -> dict[str, Any]:
        """Returns the states of a slot, in the form of `optimizer.state[parameter]`."""

    @abstractmethod
    def init_states(self) -> None:
        """Allocates all states, without stepping."""

    def own_nbytes(self) -> dict[str, int]:
        """Returns the bytes, by name, of states allocated outside of the host side's memory."""
        return {}

    @abstractmethod
    def load(self, index: int, states: Mapping[str, Any]) -> None:
        """Loads states that were checked against the slot's. Empty: the parameter was never
        stepped.
        """

    @abstractmethod
    def as_torch_optimizer(self) -> torch.optim.Optimizer:
        """Returns a torch optimizer over views of the main weights, with one group per slot. Its
        options may be from an earlier step.
        """

    def state_unit(self, owner: torch.optim.Optimizer) -> StateUnit:
        """Returns the states as a unit that can be read while other buckets are updated."""
        bucket = self.bucket
        parameters = [slot.parameter for slot in bucket.slots]
        states = [self.states(index) for index in range(len(parameters))]

        updated = None if bucket.pending is None else bucket.pending.updated
        return StateUnit(owner, parameters, states, updated, bucket.reads.append)


class RuleExecutor(Executor):
    """Applies an update rule in one pass over the bucket: reads gradients, updates states and main
    weights, and writes compute weights.
    """

    def __init__(
        self,
        bucket: Bucket,
        states: Mapping[str, torch.Tensor],
        rule: UpdateRule,
        kernel: HostKernel,
    ) -> None:
        """
        Args:
            states: the memory of the rule's states, by name, with the layout of the bucket or
                `bucket.state_places`.
            kernel: the kernel of the rule's elementwise part.
        """
        super().__init__(bucket)
        self._rule = rule
        self._kernel = kernel
        self._arrays = states
        self._states = [self._make_states(index) for index in range(len(bucket.slots))]
        self._view: BucketView | None = None  # made when it is first asked for
        # The pieces of the last step, which are reused if the next one steps the same slots and the
        # same slots have equal scalars.
        self._pieces: list[Piece] = []
        self._pieces_of: tuple[Sequence[int], Sequence[int]] | None = None

    def prepare(self, stepped: Sequence[Stepped]) -> BucketStep:
        # Steps are counted per parameter: only parameters with a gradient are stepped.
        counters = [self._states[each.number][STEP] for each in stepped]
        numbers = [int(counter) + 1 for counter in counters]
        scalars = [
            self._rule.scalars(each.options, number)
            for each, number in zip(stepped, numbers, strict=True)
        ]
        flat, matrices = [], []
        for each, own in zip(stepped, scalars, strict=True):
            if self._rule_of(each.number) != self._rule.part_for(each.options):
                raise ValueError(
                    f"Expected use_muon as it was when the states of {self.bucket.name} were "
                    f"allocated, got {each.options['use_muon']}."
                )
            if isinstance(own, MuonStep):
                matrices.append(self._matrix_step(each, own))
            else:
                flat.append((each.number, own))
        pieces = self._planned_pieces([slot for slot, _ in flat], [own for _, own in flat])

        def begin() -> None:
            for counter, number in zip(counters, numbers, strict=True):
                counter.fill_(number)

        gradients = [(each.slot, each.gradient) for each in stepped]
        start = partial(self._kernel.submit, pieces)
        nbytes = sum(piece.traffic for piece in pieces)
        return BucketStep(self.bucket, gradients, begin, start, pieces, nbytes, matrices)

    def arrays(self) -> dict[str, torch.Tensor]:
        """Returns all arrays of the bucket, by their names in a `Piece`."""
        bucket = self.bucket
        own = {"grad": bucket.grad, "weight": bucket.main_weight, "out": bucket.weight}
        return {**own, **self._arrays}

    def _planned_pieces(self, slots: Sequence[int], scalars: Sequence[Hashable]) -> list[Piece]:
        """Returns the pieces of some slots, given the scalars of each slot."""
        # The index of the first slot with equal scalars, so that pieces do not contain the values.
        firsts: dict[Hashable, int] = {}
        kinds = [firsts.setdefault(own, index) for index, own in enumerate(scalars)]
        if self._pieces_of != (slots, kinds):
            pairs = zip(slots, kinds, strict=True)
            self._pieces = merged(self._piece(slot, kind) for slot, kind in pairs)
            self._pieces_of = (slots, kinds)
        return [piece._replace(step=scalars[piece.step]) for piece in self._pieces]

    def states(self, index: int) -> dict[str, Any]:
        return self._states[index]

    def init_states(self) -> None:
        """Does nothing: the constructor gets the memory of all states."""

    def load(self, index: int, states: Mapping[str, Any]) -> None:
        for name, own in self._states[index].items():
            if name in states or name != MASTER:
                copy_state(own, states.get(name, 0.0))
        if MASTER in states:
            self.bucket.main_weight_loaded(index)
        else:
            self.bucket.forget_master(index)

    def as_torch_optimizer(self) -> torch.optim.Optimizer:
        if self._view is None:
            states = [
                {name: local_tensor(value) for name, value in own.items() if name != MASTER}
                for own in self._states
            ]
            self._view = BucketView(self.main_parameters(), states)
        return self._view

    def _rule_of(self, index: int) -> UpdateRule:
        places = self.bucket.state_places
        return self._rule if places is None else places.rules[index]

    def _states_of(self, index: int) -> dict[str, torch.Tensor]:
        """Returns the slot's parts of the state arrays."""
        slot, places = self.bucket.slots[index], self.bucket.state_places
        if places is not None:
            slot = slot._replace(offset=places.offsets[index])
        return {name: slot.of(self._arrays[name]) for name in self._rule_of(index).state_dtypes}

    def _piece(self, index: int, step: Hashable) -> Piece:
        slot = self.bucket.slots[index]
        return Piece(
            step,
            slot.of(self.bucket.grad),
            slot.of(self.bucket.main_weight),
            self._states_of(index),
            out=None if self.bucket.is_quantized else slot.of(self.bucket.weight),
            codes=None if self._kernel.encode is None else self.bucket.codes_of(index),
        )

    def _matrix_step(self, stepped: Stepped, step: MuonStep) -> MatrixStep:
        piece = self._piece(stepped.number, step)
        shape = local_tensor(stepped.slot.parameter).shape
        arrays = {name: LocalArray(flat.view(shape)) for name, flat in piece.arrays().items()}
        # The rows may share memory with the gradients and with the new compute weights: each row
        # element replaces the gradient it was computed from, and a weight, written last, the row.
        passage = arrays["out"].tensor
        if passage.dtype.itemsize == torch.bfloat16.itemsize:
            passage = passage.view(torch.bfloat16)
        return MatrixStep(stepped.slot.parameter, stepped.matrix_rows, step, arrays, passage)

    def _make_states(self, index: int) -> dict[str, torch.Tensor]:
        states = {STEP: torch.zeros((), dtype=torch.float32)}
        parameter = self.bucket.slots[index].parameter
        for name, flat in self._states_of(index).items():
            states[name] = like(parameter, flat.view(local_tensor(parameter).shape))
        return states | self.bucket.master(index)


class TorchExecutor(Executor):
    """Any PyTorch optimizer over views of the bucket's main weights."""

    def __init__(
        self,
        bucket: Bucket,
        cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        widened: torch.Tensor | None,
    ) -> None:
        """`widened`: memory for gradients in the dtype of the main weights, if it differs."""
        super().__init__(bucket)
        self._widened = None if widened is None else widened.view(bucket.main_dtype)
        self._parameters = self.main_parameters()
        # One group per parameter: its options are copied from its group in the outer optimizer.
        self._optimizer = cls([{"params": [view]} for view in self._parameters], **options)
        self._states: list[dict[str, Any]] = [{} for _ in self._parameters]
        # The values that `_states` was built from: an optimizer may replace its states.
        self._inner: list[dict[str, Any]] = [{} for _ in self._parameters]

    def prepare(self, stepped: Sequence[Stepped]) -> BucketStep:
        known = self._optimizer.defaults
        # Copies: the update runs later, when options, also in tensors, may have changed.
        options = [
            {name: copy.deepcopy(value) for name, value in each.options.items() if name in known}
            for each in stepped
        ]
        slots = [(each.number, each.slot) for each in stepped]
        gradients = [(each.slot, each.gradient) for each in stepped]

        def start(grad_scale: float) -> Callable[[], None]:
            return partial(self._step, slots, options, grad_scale)

        return BucketStep(self.bucket, gradients, lambda: None, start)

    def states(self, index: int) -> dict[str, Any]:
        states, seen = self._states[index], self._inner[index]
        if not states:
            states.update(self.bucket.master(index))
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
            self.bucket.main_weight_loaded(index)
        else:
            self.bucket.forget_master(index)

        self._states[index].clear()
        self._inner[index].clear()
        inner = {name: value for name, value in states.items() if name != MASTER}
        load_torch_states(self._optimizer, self._parameters[index], inner)

    def as_torch_optimizer(self) -> torch.optim.Optimizer:
        return self._optimizer

    def _step(
        self, slots: Sequence[tuple[int, Slot]], options: Sequence[Options], grad_scale: float
    ) -> None:
        bucket = self.bucket
        # Parameters without a gradient in this step are not stepped.
        for parameter in self._parameters:
            parameter.grad = None
        for (index, slot), values in zip(slots, options, strict=True):
            self._optimizer.param_groups[index].update(values)
            grad = slot.of(bucket.grad)
            if grad_scale != 1:
                grad.mul_(grad_scale)  # rounded as on the device, where it is done in place too
            if grad.dtype != bucket.main_dtype:
                assert self._widened is not None, "allocated for this"
                grad = slot.of(self._widened).copy_(grad)
            self._parameters[index].grad = grad.view_as(self._parameters[index])

        self._optimizer.step()
        for index, slot in slots:
            self._parameters[index].grad = None
            if not bucket.is_quantized:
                slot.of(bucket.weight).copy_(slot.of(bucket.main_weight))

    def _as_state(self, index: int, value: Any) -> Any:
        is_like = isinstance(value, torch.Tensor) and value.shape == self._parameters[index].shape
        return like(self.bucket.slots[index].parameter, value) if is_like else value


class BucketView(torch.optim.Optimizer):
    """A read-only optimizer over a bucket's main weights in host memory and their states.

    There is one group per parameter. The values are from the last finished update; the options are
    copied from the optimizer's groups when the view is created.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], states: Sequence[Mapping[str, torch.Tensor]]
    ) -> None:
        """`parameters` and `states` share the bucket's memory, one of each for every slot."""
        super().__init__([{"params": [parameter]} for parameter in parameters], {})
        for parameter, own in zip(parameters, states, strict=True):
            self.state[parameter] = dict(own)

    def step(self, closure: Any = None) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: both sides step together."""
        raise _refusal("step")

    def load_state_dict(self, state_dict: Any) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: states are loaded for both sides together."""
        raise _refusal("load_state_dict")

    def register_step_pre_hook(self, hook: Any) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: the hook would never be called."""
        raise _refusal("register_step_pre_hook")

    def register_step_post_hook(self, hook: Any) -> NoReturn:  # noqa: ARG002
        """Raises RuntimeError: the hook would never be called."""
        raise _refusal("register_step_post_hook")


def _refusal(name: str) -> RuntimeError:
    return RuntimeError(
        f"Call {name} on the HybridDeviceOptimizer; this is a read-only view of part of its host "
        "side."
    )
