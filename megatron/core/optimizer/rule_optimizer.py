"""`RuleOptimizer`: carries out an update rule in one pass over memory, on the CPU and on GPUs, with
states that are distributed as parameters are.

    optimizer = RuleOptimizer(model.parameters(), Lion(), lr=1e-4, weight_decay=0.1)
    optimizer.step(grad_scale=clip_coefficient)

Parameters may be plain tensors or DTensors, also from `fully_shard`, here or in PyTorch. The
arithmetic runs on local tensors, without communication, except for the matrices of Muon, whose rows
ranks exchange: see matrix_pass.py. For the states of a parameter see `RuleStates`. State dicts hold
the values of scaled ones in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.amp.grad_scaler import GradScaler

import megatron.core.optimizer.scaled_states as scaled_states
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.drivers import kinds_of_accelerators
from megatron.core.dtensors import local_tensor
from megatron.core.dtypes import FLOAT_DTYPES
from megatron.core.lanes import Event
from megatron.core.optimizer.kernels.newton_schulz import MuonStep
from megatron.core.optimizer.kernels.piece import Kernel, Piece, check_grad_scale
from megatron.core.optimizer.matrix_pass import (
    MatrixBatch,
    MatrixPass,
    MatrixStep,
    matrix_rows_of,
)
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from megatron.core.optimizer.rule_states import (
    MasterWeights,
    PlannedUpdates,
    RuleStates,
    Update,
    carry_out,
    plan,
)
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_loading import (
    can_be_trained,
    check_options,
    check_state,
    check_states,
    loaded_options,
    states_by_parameter,
)
from megatron.core.optimizer.state_tensors import MASTER, STEP
from megatron.core.optimizer.state_units import Hold, StateUnit, StepHolds
from megatron.core.optimizer.step_inputs import (
    StepInputs,
    check_not_elsewhere,
    clear_gradients,
    gradient_of,
    mark_stepped,
    unscaling_factor,
)

# Attributes of a copy in addition to torch's.
_COPIED = ("rule", "use_decoupled_grad", "set_grad_none", "_states", "_num_host_threads")


class _Planned(NamedTuple):
    """The step that a parameter with a gradient is about to take."""

    parameter: torch.Tensor
    gradient: torch.Tensor  # local
    number: int  # of the step, from 1
    scalars: Hashable
    matrix_rows: tuple[int, ...] | None  # None: the step is elementwise


class _Batch(NamedTuple):
    """Updates that are carried out together, after events."""

    events: list[Event]
    with_master: list[torch.Tensor]  # parameters that have a main weight besides them
    rule: UpdateRule
    updates: PlannedUpdates


class RuleStep(NamedTuple):
    """A step of all parameters with a gradient, but for the factor of the gradients."""

    inputs: StepInputs
    parameters: list[_Planned]
    batches: list[_Batch]
    matrices: list[MatrixBatch]
    holds: list[Hold]  # that were known


class RuleOptimizer(PlanningOptimizer):
    """Carries out an update rule over plain tensors and DTensors.

    Args:
        params: fp32, bf16 or fp16 parameters, or groups of them.
        rule: the rule, with the dtypes of its states.
        master_weights: keep the main weights of 16-bit parameters, `fully_shard`'s own excepted.
            A parameter that others write to becomes its main weight at the next step, unless it is
            that, rounded. No version counter shows a write into `.data`: it is lost, but for
            `set_scaled_state(p, "master_param", p.float())`.
        master_weight_dtype: of these: fp32, or fp16 with a scale.
        store_param_remainders: of a bf16 parameter's fp32 main weight, keep only the bits that the
            parameter lacks.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`.
        set_grad_none: whether `zero_grad` drops gradients; None means True, as in
            TransformerEngine.
        num_host_threads: of the pass over CPU tensors; default: the cores that this rank may use.
        options: options of the rule, such as lr, which may differ between groups.

    Attributes:
        rule: the rule.

    Raises:
        TypeError: for options that the rule does not have.
        NotImplementedError: for another dtype of states.
        ValueError: for other constants or dtypes of parameters; for remainders without fp32 master
            weights.
    """

    recuts_states_on_load = True  # so the hooks of `fully_shard` skip their check

    def __init__(
        self,
        params: Any,
        rule: UpdateRule,
        *,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        store_param_remainders: bool = False,
        use_decoupled_grad: bool = False,
        set_grad_none: bool | None = None,
        num_host_threads: int | None = None,
        **options: Any,
    ) -> None:
        masters = MasterWeights(master_weights, master_weight_dtype, store_param_remainders)
        self.rule = rule
        self._states = RuleStates(rule, masters)
        self.use_decoupled_grad = use_decoupled_grad
        self.set_grad_none = True if set_grad_none is None else bool(set_grad_none)
        self._num_host_threads = num_host_threads
        super().__init__(params, rule.defaults_with(options))
        self._make_parts()
        # Trying a kernel takes time, and may log a warning: not at the first step.
        for parameter in self._parameters():
            device = local_tensor(parameter).device
            if device.type in kinds_of_accelerators():
                self._kernel(self._states.rule_of(parameter), device)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. ValueError for groups that the constructor would reject."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_dtypes(group["params"])
            self.rule.scalars(group, 1)
            if self.rule.part_for(group).takes_matrices:
                matrix_rows_of(group)
            self._states.divide_rule(self.param_groups)
        except (ValueError, NotImplementedError):
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Their module cannot be copied either. A copy of a parameter has no group, so its weights
        # would never reach the module.
        if any(group_of(parameter) is not None for parameter in self._parameters()):
            raise TypeError(
                "Expected state_dict() to be used, got an attempt to copy or pickle an optimizer "
                "over parameters that fully_shard has made."
            )
        state: dict[str, Any] = super().__getstate__()
        return state | {name: getattr(self, name) for name in _COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._make_parts()

    def _make_parts(self) -> None:
        """Makes the parts that copies do not share."""
        self._holds = StepHolds()
        # By rule and type of device; the host's threads start when they are first needed.
        self._kernels: dict[tuple[UpdateRule, str], Kernel] = {}
        self._matrix_pass = MatrixPass()
        # Registered first: hooks of users see values, not scaled states.
        self.register_state_dict_post_hook(partial(_unscale, self._states))

    # Stepping

    @torch.no_grad()
    def init_state(self, *, with_frozen: bool = True) -> None:
        """Allocates missing states without stepping: moments of zero, masters as the parameters.

        Args:
            with_frozen: also for frozen parameters, whose states a checkpoint may hold.
                A step allocates none for them.
        """
        # Programs may have put other parameters into the groups.
        self._states.divide_rule(self.param_groups)
        for parameter in self._parameters():
            is_stepped = (
                parameter.requires_grad
                or gradient_of(parameter, self.use_decoupled_grad) is not None
            )
            is_wanted = is_stepped or (with_frozen and can_be_trained(parameter))
            if is_wanted and not self.state.get(parameter):
                self.state[parameter] = self._states.allocate(parameter)

    @torch.no_grad()
    def initialize_state(
        self, param: torch.Tensor, store_param_remainders: bool | None = None
    ) -> None:
        """Resets a parameter's states, as if it had never been stepped, and allocates missing ones.

        Args:
            param: one of the optimizer's parameters.
            store_param_remainders: as the optimizer keeps them for this parameter; default: so.

        Raises:
            ValueError: for another parameter, and for remainders kept otherwise.
        """
        if all(param is not own for own in self._parameters()):
            raise ValueError(
                f"Expected a parameter of this optimizer, got another, of {tuple(param.shape)}."
            )
        self._states.divide_rule(self.param_groups)
        self._states.check_remainders(param, store_param_remainders)
        self._revision += 1
        self._holds.wait()
        if self.state.get(param):
            self._states.reset(param, self.state[param])
        else:
            self.state[param] = self._states.allocate(param)

    @torch.no_grad()
    def plan_step(self) -> RuleStep:
        """Plans a step up to the factor of the gradients, for callers that still wait for that.

        Allocates states, does not step. A plan holds the gradients, whose values may still change.
        It raises what `step` raises.
        """
        self.init_state(with_frozen=False)
        inputs = self._step_inputs()
        planned = self._plan()
        matrices = [
            MatrixStep(
                each.parameter,
                each.matrix_rows,
                each.scalars,
                self._states.arrays(each.parameter, each.gradient, self.state[each.parameter]),
            )
            for each in planned
            if isinstance(each.scalars, MuonStep) and each.matrix_rows is not None
        ]
        steps = {each.parameter: each for each in planned if each.matrix_rows is None}
        batches = []
        for events, parameters in self._holds.batches(steps):
            updates = [
                Update(
                    each.scalars,
                    self._states.arrays(each.parameter, each.gradient, self.state[each.parameter]),
                )
                for each in map(steps.__getitem__, parameters)
                if each.gradient.numel()
            ]
            # All rules of an optimizer but one take matrices.
            rule = self._states.rule_of(parameters[0])
            batches.append(_Batch(events, self._with_master(parameters), rule, plan(updates)))
        matrix_batches = self._matrix_pass.plan(matrices)
        return RuleStep(inputs, planned, batches, matrix_batches, self._holds.known())

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has no grad_scale
        self,
        closure: Callable[[], float] | None = None,
        grad_scaler: GradScaler | None = None,
        *,
        grad_scale: float = 1.0,
        planned: RuleStep | None = None,
    ) -> float | None:
        """Steps every parameter that has a gradient. The others' states stay as they are, `step`
        included. With Muon, all ranks call it together.

        Args:
            closure: computes the loss and the gradients again.
            grad_scaler: torch's, whose scale is divided out as gradients are read. If one of them
                is not finite, on any rank, the step is skipped. Callers must call its `update`.
            grad_scale: a factor of the gradients, such as the coefficient of clipping, applied as
                they are read.
            planned: the plan that `plan_step` returned for this step. Without it, or if gradients
                have been replaced, options changed or states loaded or stepped since, the step is
                planned here.

        Returns:
            What `closure` returned.

        After an error no parameter has been stepped.

        Raises:
            RuntimeError: for gradients that are partial sums, and for a second step before the
                grad_scaler's `update`.
            ValueError: for a gradient or state that is not distributed, shaped and placed as its
                parameter, for a gradient in an attribute that is not read, and for a grad_scale
                that is not finite.
            NotImplementedError: for matrices of Muon that are not cut between rows.
        """
        loss = self._loss_of(closure)
        factor = unscaling_factor(self, grad_scaler, self.use_decoupled_grad)
        if factor is None:
            mark_stepped(self, grad_scaler)
            return loss
        check_grad_scale(grad_scale)
        grad_scale *= factor

        if planned is None or not planned.inputs.are_still(self._step_inputs()):
            planned = self.plan_step()
        self._revision += 1
        # Only for readers that came after the plan, which waits for the others batch by batch.
        self._holds.wait(besides=planned.holds)
        for batch in planned.batches:
            for event in batch.events:
                event.synchronize()
            self._follow_writes(batch.with_master)
            carry_out(batch.updates, grad_scale, partial(self._run, batch.rule))
        if planned.matrices:
            kernel = partial(self._run, self.rule)
            stages = self._matrix_pass.stages(planned.matrices, grad_scale, kernel)
            for number, stage in enumerate(stages):
                if number < len(planned.matrices):
                    self._prepare(planned.matrices[number])
                stage()

        # After the kernels, which may fail: such a step does not count.
        for each in planned.parameters:
            self.state[each.parameter][STEP].fill_(float(each.number))
        # Kernels write by address, which autograd does not see.
        torch.autograd.graph.increment_version([each.parameter for each in planned.parameters])
        for parameter in self._with_master([each.parameter for each in planned.parameters]):
            self._states.see_master(parameter, self.state[parameter])
        mark_stepped(self, grad_scaler)
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients that `step` reads: to None, or in place to zero. Default:
        `set_grad_none`.
        """
        is_none = self.set_grad_none if set_to_none is None else set_to_none
        clear_gradients(self._parameters(), self.use_decoupled_grad, is_none)

    # States

    def state_units(self) -> list[StateUnit]:
        """One for each FSDP group, and one for all other parameters."""
        units: dict[FsdpParameterGroup | None, list[torch.Tensor]] = {}
        for parameter in self._parameters():
            units.setdefault(group_of(parameter), []).append(parameter)
        return [self._unit(parameters) for parameters in units.values()]

    def _unit(self, parameters: Sequence[torch.Tensor]) -> StateUnit:
        states = [self.state.get(parameter, {}) for parameter in parameters]
        hold = partial(self._holds.add, parameters)
        return StateUnit(self, parameters, states, None, hold, scaled_by=self)

    def get_unscaled_state(
        self, param: torch.Tensor, state_name: str, skip_unscale: bool = False
    ) -> torch.Tensor:
        """A state's values in fp32: the state itself if it is fp32, else a copy. Remainders are
        given as they are, and bf16 states, which have no scale, with `skip_unscale`.
        """
        state: torch.Tensor = self.state[param][state_name]
        if skip_unscale and state.dtype == torch.bfloat16:
            return state
        return self._states.unscaled(param, self.state[param], state_name)

    def state_scale(self, param: torch.Tensor, state_name: str) -> torch.Tensor | None:
        """The factor by which a state's stored numbers are read: scalar, fp32, not a copy; None if
        it has no scale.
        """
        return self._states.scale_of(param, state_name)

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Stores values in a state, rounded and scaled as it is kept. `unscaled_state` is not
        changed.

        Args:
            param: one of the optimizer's parameters.
            state_name: a state of the rule, or master_param.
            unscaled_state: fp32, of remainders int16; distributed and shaped as the parameter.

        Raises:
            ValueError: for a state that `param` does not have, and for other tensors.
        """
        self._states.divide_rule(self.param_groups)
        dtypes = self._states.dtypes_of(param)
        if state_name not in dtypes:
            raise ValueError(f"Expected one of {sorted(dtypes)}, got {state_name!r}.")
        expected = torch.int16 if dtypes[state_name] == torch.int16 else torch.float32
        check_state(state_name, unscaled_state, param, expected)

        # A reader on another thread must not see half of it.
        self._revision += 1
        self._holds.wait()
        if not self.state.get(param):
            self.state[param] = self._states.allocate(param)
        self._states.store(param, self.state[param], state_name, unscaled_state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the values of a state dict over into the states' own memory, and its groups'
        options, except options that choose an implementation.

        Everything is checked before anything is changed. A state may come from another device.
        Parameters without a state in the dict start over. Dicts of the optimizer in torch.optim
        with the same algorithm are supported, and TransformerEngine's, with one step for each
        group.

        Raises:
            ValueError: for other groups, for options of another algorithm (amsgrad, maximize), for
                states that are missing or unexpected, for states that are not distributed or shaped
                as their parameter or not of the dtype in which `state_dict` gives them.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed

        # All checks first: a rejected dict must leave the optimizer unchanged.
        self._states.divide_rule(self.param_groups)
        states = states_by_parameter(self.param_groups, state_dict, self.rule)
        for number, (parameter, saved) in enumerate(states.items()):
            check_states(saved, parameter, number, self._states.dtypes_of(parameter))
        for own, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            check_options(self.rule, own, loaded)
        self._revision += 1
        self._holds.wait()
        for parameter in self._parameters():
            if parameter in states and not self.state.get(parameter):
                self.state[parameter] = self._states.allocate(parameter)
            if parameter in states:
                self._states.install(parameter, self.state[parameter], states[parameter])
            elif self.state.get(parameter):
                self._states.reset(parameter, self.state[parameter])

        for own, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            own.update(loaded_options(own, loaded))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    # One step

    def _plan(self) -> list[_Planned]:
        """The steps of all parameters that have a gradient, once they are known to be possible."""
        planned = []
        for group_number, group in enumerate(self.param_groups):
            scalars: dict[int, Hashable] = {}
            rule = self.rule.part_for(group)
            matrix_rows = matrix_rows_of(group) if rule.takes_matrices else None
            for index, parameter in enumerate(group["params"]):
                place = f"parameter {index} of group {group_number}"
                gradient = gradient_of(parameter, self.use_decoupled_grad)
                if gradient is None:
                    check_not_elsewhere(parameter, self.use_decoupled_grad, place)
                    continue

                self._states.check(parameter, gradient, self.state[parameter], place)
                self._kernel(rule, local_tensor(parameter).device)  # raises without one
                # Parameters of a group that have taken the same number of steps share scalars.
                number = int(self.state[parameter][STEP]) + 1
                if number not in scalars:
                    scalars[number] = self.rule.scalars(group, number)
                local = local_tensor(gradient).detach()
                rows = None if matrix_rows is None else matrix_rows[index]
                planned.append(_Planned(parameter, local, number, scalars[number], rows))
        return planned

    def _with_master(self, parameters: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        return [parameter for parameter in parameters if MASTER in self.state[parameter]]

    def _follow_writes(self, with_master: Iterable[torch.Tensor]) -> None:
        for parameter in with_master:
            self._states.follow_writes(parameter, self.state[parameter])

    def _prepare(self, batch: MatrixBatch) -> None:
        # Readers are waited for batch by batch, in the order of batches, which all ranks share.
        for event in self._holds.events_of(batch.parameters):
            event.synchronize()
        self._follow_writes(self._with_master(batch.parameters))

    def _run(self, rule: UpdateRule, pieces: Iterable[Piece], grad_scale: float) -> None:
        # Parameters may be on several devices at once.
        by_device: dict[torch.device, list[Piece]] = {}
        for piece in pieces:
            by_device.setdefault(piece.weight.device, []).append(piece)
        for device, own in by_device.items():
            self._kernel(rule, device)(own, grad_scale)

    def _kernel(self, rule: UpdateRule, device: torch.device) -> Kernel:
        key = (rule, device.type)
        if key not in self._kernels:
            on_host = device.type == "cpu"
            self._kernels[key] = (
                rule.host_kernel(self._num_host_threads) if on_host else rule.device_kernel(device)
            )
        return self._kernels[key]


def _unscale(
    rule_states: RuleStates, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]
) -> dict[str, Any]:
    """Replaces scaled states by their values, in new dicts."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    states = {
        number: {
            name: rule_states.unscaled(parameters[number], state, name)
            if scaled_states.is_scaled(value.dtype)
            else value
            for name, value in state.items()
        }
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _check_dtypes(parameters: Iterable[torch.Tensor]) -> None:
    for index, parameter in enumerate(parameters):
        if parameter.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Expected parameters of {', '.join(map(str, FLOAT_DTYPES))}, got "
                f"{parameter.dtype} at {index}."
            )
