"""`RuleStates`: how a `RuleOptimizer` keeps the states of a parameter p.

    step                scalar, fp32, on the CPU: number of steps that p has taken
    states of the rule  like p, in the rule's dtypes
    master_param        with master weights, of a 16-bit p: its fp32 value or the remainder, like p

If p is a DTensor, all but `step` are, with p's mesh, placements, global shape and stride. States in
fp16 and fp8 have a scale for each (local) tensor, which is kept here (see [Note: scales]).

Kernels work on the tensors themselves where they can: contiguous ones, with all states in fp32 or
all in bf16. Scaled and strided tensors are copied for the kernel, and the result is stored again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.distributed.fsdp.parameter_group import group_of
from megatron.core.dtensors import check_whole, local_tensor
from megatron.core.dtypes import FLOAT_DTYPES, MASTER_DTYPES, UNSCALED_STATE_DTYPES
from megatron.core.optimizer.kernels.piece import Kernel, Piece, merged
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_tensors import (
    MASTER,
    STEP,
    StateMemory,
    TensorWrites,
    difference,
    is_rounding,
    like,
)

States = dict[str, Any]  # of one parameter, by name


@dataclass(frozen=True)
class MasterWeights:
    """How fp32 values of 16-bit parameters are kept, if they are.

    Raises:
        NotImplementedError: for another dtype than fp32 and fp16.
        ValueError: for remainders of anything but fp32.
    """

    is_kept: bool
    dtype: torch.dtype
    as_remainders: bool

    def __post_init__(self) -> None:
        if self.as_remainders and not (self.is_kept and self.dtype == torch.float32):
            raise ValueError(
                "Expected store_param_remainders with master_weights=True in torch.float32, got "
                f"master_weights={self.is_kept} in {self.dtype}."
            )
        if self.dtype not in MASTER_DTYPES:
            raise NotImplementedError(
                f"Expected master_weight_dtype to be one of {', '.join(map(str, MASTER_DTYPES))}, "
                f"got {self.dtype}."
            )

    def dtype_of(self, parameter: torch.Tensor) -> torch.dtype | None:
        """Of a parameter's `master_param`, int16 for a remainder; None if it has none."""
        # Parameters of our `fully_shard` are main weights already.
        is_narrow = parameter.dtype.itemsize == 2
        if not (self.is_kept and is_narrow) or group_of(parameter) is not None:
            return None
        # fp16 has other exponents than fp32: no remainder of 16 bits completes it.
        if self.as_remainders and parameter.dtype == torch.bfloat16:
            return torch.int16
        return self.dtype


class RuleStates:
    """Allocates and describes the states, which the optimizer owns."""

    def __init__(self, rule: UpdateRule, masters: MasterWeights) -> None:
        self._rule = rule
        self._masters = masters
        self._rules: dict[torch.Tensor, UpdateRule] = {}
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._memory = StateMemory()
        # To parameters with a master, and to remainders.
        self._writes = TensorWrites()

    def divide_rule(self, groups: Iterable[Mapping[str, Any]]) -> None:
        """Gives the parameters of an optimizer's groups the parts of the rule that their groups
        have, and drops all other parameters.

        NotImplementedError for a rule that does not take a parameter's main weight.
        """
        rules = {}
        for group in groups:
            rule = self._rule.part_for(group)
            for parameter in group["params"]:
                if rule.takes_matrices and self._masters.dtype_of(parameter) == torch.float16:
                    raise NotImplementedError(
                        f"Expected main weights of {rule.name} in torch.float32, got torch.float16."
                    )
                rules[parameter] = rule
        self._rules = rules

    def rule_of(self, parameter: torch.Tensor) -> UpdateRule:
        """The rule of a parameter's states and kernels."""
        return self._rules.get(parameter, self._rule)

    def dtypes_of(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """The dtypes of a parameter's states, without `step`."""
        master = self._masters.dtype_of(parameter)
        own = self.rule_of(parameter).state_dtypes
        return own if master is None else {**own, MASTER: master}

    def check_remainders(self, parameter: torch.Tensor, are_kept: bool | None) -> None:
        """ValueError if a parameter's master is, or is not, a remainder, unlike a caller said."""
        own = self.dtypes_of(parameter).get(MASTER) == torch.int16
        if are_kept not in (None, own):
            raise ValueError(
                f"Expected store_param_remainders={own}, as this optimizer keeps the states of a "
                f"{parameter.dtype} parameter, got {are_kept}."
            )

    def scale_of(self, parameter: torch.Tensor, name: str) -> torch.Tensor | None:
        """The factor by which a state's stored numbers are read; None if it has no scale."""
        return self._scales[parameter].get(name)

    def allocate(self, parameter: torch.Tensor) -> States:
        """The states of a parameter that has taken no step."""
        dtypes = self.dtypes_of(parameter)
        group = group_of(parameter)
        rules = [self._rules.get(each.sharded) for each in group.fsdp_parameters] if group else []
        tensors = {
            name: self._memory.empty(
                parameter,
                name,
                dtype,
                of_all=all(rule is None or name in rule.state_dtypes for rule in rules),
            )
            for name, dtype in dtypes.items()
        }

        self._scales[parameter] = {
            name: scaled_states.new_scale(local_tensor(tensor).device)
            for name, tensor in tensors.items()
            if scaled_states.is_scaled(tensor.dtype)
        }
        states: States = {STEP: torch.zeros((), dtype=torch.float32), **tensors}
        self.reset(parameter, states)
        return states

    def reset(self, parameter: torch.Tensor, states: States) -> None:
        """Resets states, as if their parameter had never been stepped."""
        for name, tensor in states.items():
            local_tensor(tensor).zero_()
            # A parameter that was never stepped is its fp32 value: the remainder is zero.
            if name == MASTER and tensor.dtype != torch.int16:
                self.store(parameter, states, name, local_tensor(parameter).detach().float())
        self.see_master(parameter, states)

    def store(
        self, parameter: torch.Tensor, states: States, name: str, values: torch.Tensor
    ) -> None:
        """Writes values into a state, rounded and scaled as it is kept. A master then takes
        precedence over its parameter's value.
        """
        if name == MASTER:
            self._writes.see(parameter)
            self._writes.forget(states[name])
        own, values = local_tensor(states[name]), local_tensor(values)
        scale = self.scale_of(parameter, name)
        if scale is not None:
            is_weight = name == MASTER
            scaled_states.restore(own, scale, values.to(own.device), is_weight=is_weight)
        # A state dict of this very optimizer shares its memory.
        elif own.data_ptr() != values.data_ptr():
            own.copy_(values)

    def install(self, parameter: torch.Tensor, states: States, loaded: States) -> None:
        """Takes over loaded states, which are known to fit."""
        for name, value in loaded.items():
            # Counts may be numbers, in TransformerEngine's dicts, and are on the CPU here.
            if name == STEP:
                states[STEP].fill_(float(value))
            else:
                self.store(parameter, states, name, value)

    def follow_writes(self, parameter: torch.Tensor, states: States) -> None:
        """Before a step, makes the master of a parameter that others wrote to its value."""
        if not self._writes.are_new(parameter):
            return

        master, given = states[MASTER], local_tensor(parameter).detach()
        if master.dtype == torch.int16:
            # Loaded since the last step, it belongs to the parameter, which may be loaded later.
            if not self._writes.are_new(master):
                local_tensor(master).zero_()
        elif not self._is_rounding_of_master(given, parameter, states):
            self.store(parameter, states, MASTER, given.float())
        self.see_master(parameter, states)

    def see_master(self, parameter: torch.Tensor, states: States) -> None:
        """Marks a parameter and its master, if it has one, as consistent."""
        if MASTER in states:
            self._writes.see(parameter)
            self._writes.see(states[MASTER])

    def _is_rounding_of_master(
        self, given: torch.Tensor, parameter: torch.Tensor, states: States
    ) -> bool:
        scale = self.scale_of(parameter, MASTER)
        # The smallest step between fp16 numbers.
        step = 0.0 if scale is None else float(scale) * 2.0**-24
        own = local_tensor(self.unscaled(parameter, states, MASTER))
        return is_rounding(given, own, step)

    def unscaled(self, parameter: torch.Tensor, states: States, name: str) -> torch.Tensor:
        """A state's values in fp32: the state itself if it is fp32 or a remainder, else a copy."""
        state: torch.Tensor = states[name]
        if state.dtype in (torch.float32, torch.int16):
            return state

        scale, local = self.scale_of(parameter, name), local_tensor(state)
        return like(parameter, local.float() if scale is None else scaled_states.read(local, scale))

    def arrays(
        self, parameter: torch.Tensor, gradient: torch.Tensor, states: States
    ) -> dict[str, LocalArray]:
        """The local tensors of a step: grad, weight, remainder and out as in `Piece`, and states by
        name.
        """
        arrays = {"grad": LocalArray(gradient)}
        for name, tensor in states.items():
            if name != STEP:
                arrays[name] = LocalArray(local_tensor(tensor), self.scale_of(parameter, name))

        master = arrays.pop(MASTER, None)
        own = LocalArray(local_tensor(parameter).detach())
        if master is None:
            return {**arrays, "weight": own}
        if master.tensor.dtype == torch.int16:
            return {**arrays, "weight": own, "remainder": master}
        # The master is updated, and the parameter takes its rounding.
        return {**arrays, "weight": master, "out": own}

    def check(
        self, parameter: torch.Tensor, gradient: torch.Tensor, states: States, place: str
    ) -> None:
        """Rejects a gradient and states that are not like their parameter.

        Args:
            place: the parameter, for messages.

        Raises:
            RuntimeError: for gradients that are partial sums, and for a parameter that was cast
                after its states were made.
            ValueError: for anything else.
        """
        check_whole([gradient])
        self._check_not_cast(parameter, states, place)
        if gradient.layout != torch.strided or not gradient.is_floating_point():
            raise ValueError(
                f"Expected a dense floating-point gradient of {place}, got {gradient.layout} "
                f"{gradient.dtype}."
            )

        # Kernels write by address: a state that does not fit would have its neighbours overwritten.
        device, dtypes = local_tensor(parameter).device, self.dtypes_of(parameter)
        if missing := dtypes.keys() - states.keys():
            raise ValueError(
                f"Expected {', '.join(sorted(missing))} among the states of {place}, got "
                f"{', '.join(sorted(states))}. Set use_muon before the optimizer's first step."
            )
        tensors = {"gradient": gradient, **{name: states[name] for name in dtypes}}
        for name, tensor in tensors.items():
            found = difference(tensor, parameter)
            if found is not None:
                raise ValueError(
                    f"Expected {name} of {place} with {found.expected} as it has, got {found.got}."
                )
            if local_tensor(tensor).device != device:
                raise ValueError(
                    f"Expected {name} of {place} on {device}, got {local_tensor(tensor).device}."
                )
            if name in dtypes and tensor.dtype != dtypes[name]:
                raise ValueError(
                    f"Expected {name} of {place} in {dtypes[name]}, got {tensor.dtype}."
                )

    def _check_not_cast(self, parameter: torch.Tensor, states: States, place: str) -> None:
        """RuntimeError if `module.to(dtype)` has made states for another dtype out of these."""
        needs_master, has_master = MASTER in self.dtypes_of(parameter), MASTER in states
        # An fp32 main weight is right for an fp32 parameter, too. A remainder is not.
        is_left_over = has_master and not needs_master and states[MASTER].dtype == torch.int16
        if is_left_over or (needs_master and not has_master):
            raise RuntimeError(
                f"The dtype of {place} became {parameter.dtype} after the optimizer had made its "
                "states for another one. Cast the model before the optimizer's first step."
            )


# The names of arrays that are not states.
_COMMON = ("grad", "weight", "remainder", "out")


class LocalArray(NamedTuple):
    """A local tensor of any strides, with its scale if it has one; see [Note: scales]."""

    tensor: torch.Tensor
    scale: torch.Tensor | None = None


class Update(NamedTuple):
    """One parameter's step over local tensors of one shape and device: the arrays of `Piece`, and
    states by name.
    """

    step: Any
    arrays: Mapping[str, LocalArray]

    @property
    def is_direct(self) -> bool:
        """Whether kernels can work on the tensors themselves."""
        # Kernels have one dtype for all states, and see memory, neither shapes nor scales.
        dtypes = {array.tensor.dtype for name, array in self.arrays.items() if _is_state(name)}
        return (
            len(dtypes) <= 1
            and dtypes <= {*UNSCALED_STATE_DTYPES}
            and self.arrays["grad"].tensor.dtype in FLOAT_DTYPES
            and all(
                array.scale is None and array.tensor.is_contiguous()
                for array in self.arrays.values()
            )
        )


class PlannedUpdates(NamedTuple):
    """Updates as they will be handed to kernels, but for the factor of the gradients."""

    pieces: list[Piece]  # arrays that kernels update in place, joined
    others: list[Update]


def plan(updates: Sequence[Update]) -> PlannedUpdates:
    """Puts together what there is to do. Reads and writes no array."""
    pieces = [
        _piece(update.step, {name: array.tensor for name, array in update.arrays.items()})
        for update in updates
        if update.is_direct
    ]
    return PlannedUpdates(merged(pieces), [update for update in updates if not update.is_direct])


def carry_out(planned: PlannedUpdates, grad_scale: float, kernel: Kernel) -> None:
    """Has the kernel do all updates."""
    kernel(planned.pieces, grad_scale)

    # One after the other, so that the copies take the memory of one.
    for update in planned.others:
        copies = {name: _working_copy(name, array) for name, array in update.arrays.items()}
        kernel([_piece(update.step, copies)], grad_scale)
        for name, array in update.arrays.items():
            # A gradient is only read.
            if copies[name] is not array.tensor and name != "grad":
                _write_back(name, array, copies[name])


def _piece(step: Any, arrays: Mapping[str, torch.Tensor]) -> Piece:
    return Piece(
        step,
        arrays["grad"],
        arrays["weight"],
        {name: array for name, array in arrays.items() if _is_state(name)},
        arrays.get("remainder"),
        arrays.get("out"),
    )


def _is_state(name: str) -> bool:
    return name not in _COMMON


def _working_copy(name: str, array: LocalArray) -> torch.Tensor:
    """A tensor that kernels can work on: contiguous, states and unusual gradients in fp32.

    It is the array's own tensor if that is so already.
    """
    # All states go to fp32, though one alone may be what kernels do not take: they must be alike.
    tensor = array.tensor
    if array.scale is not None:
        tensor = scaled_states.read(tensor, array.scale)
    elif _is_state(name) or tensor.dtype not in (*FLOAT_DTYPES, torch.int16):
        tensor = tensor.float()
    return tensor.contiguous()


def _write_back(name: str, array: LocalArray, values: torch.Tensor) -> None:
    if array.scale is None:
        array.tensor.copy_(values)
    else:
        scaled_states.write(array.tensor, array.scale, values, is_weight=name == "weight")
