"""`FusedAdam`: Adam and AdamW in one pass over memory, on the CPU and on GPUs, states distributed
as parameters are.

    optimizer = FusedAdam(model.parameters(), lr=1e-3, weight_decay=0.01)
    optimizer.step(grad_scale=clip_coefficient)

The constructor and its meaning are TransformerEngine's; the arithmetic is that of torch's fused
AdamW, bit for bit (see [Note: arithmetic] in kernels/adam.py). Parameters may be plain tensors or
DTensors: those of `fully_shard`, here or in PyTorch. The arithmetic runs on local tensors and
communicates nothing.

States of a parameter `p`, in `optimizer.state[p]`:

    step           scalar, fp32, on the CPU: the steps that p has taken, those with a gradient
    exp_avg        like p, in exp_avg_dtype
    exp_avg_sq     like p, in exp_avg_sq_dtype
    master_param   with master_weights, of a 16-bit p: its fp32 value, like p, in master_weight_dtype; with
                   store_param_remainders, of a bf16 p: int16, what p lacks of its fp32 value (see
                   [Note: remainder])

If p is a DTensor, all but `step` are, with p's mesh, placements, global shape and stride. States in
fp16 and fp8 have a scale for each (local) tensor, which the optimizer keeps (see [Note: scales]);
state dicts hold their values in fp32.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch

from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup, group_of
from megatron.core.drivers import driver_of
from megatron.core.dtensors import check_whole, local_tensor
from megatron.core.lanes import Event
from megatron.core.optimizer import scaled_states
from megatron.core.optimizer.adam_updates import LocalArray, PlannedUpdates, Update, carry_out, plan
from megatron.core.optimizer.gradient_source import (
    check_not_elsewhere,
    clear_gradients,
    gradient_of,
)
from megatron.core.optimizer.kernels import device_adam, torch_adam
from megatron.core.optimizer.kernels.adam import FLOAT_DTYPES, AdamPiece, AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.state_loading import STEP, check_state, checked_states
from megatron.core.optimizer.state_tensors import StateMemory, difference, like
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.step_inputs import StepInputs

_STATE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn)
_MASTER_DTYPES = (torch.float32, torch.float16)

# What a copy has besides what every torch optimizer's has.
_COPIED = (
    "adam_w_mode",
    "master_weights",
    "use_decoupled_grad",
    "store_param_remainders",
    "set_grad_none",
    "exp_avg_dtype",
    "exp_avg_sq_dtype",
    "master_weight_dtype",
    "_scales",
    "_num_host_threads",
)


class _Planned(NamedTuple):
    """The step that a parameter with a gradient is about to take."""

    parameter: torch.Tensor
    gradient: torch.Tensor  # local
    step: AdamStep


class _Hold(NamedTuple):
    """Parameters that are not stepped before an event: until then their weights and states are
    being read.
    """

    parameters: Sequence[torch.Tensor]
    event: Event


class _Batch(NamedTuple):
    """Updates that are carried out together, after events."""

    events: list[Event]
    updates: PlannedUpdates


class FusedStep(NamedTuple):
    """A step of all parameters with a gradient, but for the factor of the gradients. See
    `FusedAdam.plan_step`.
    """

    inputs: StepInputs
    parameters: list[_Planned]
    batches: list[_Batch]
    holds: list[_Hold]  # that were known


class FusedAdam(torch.optim.Optimizer):
    """See the module's docstring.

    `torch.uint8` as a dtype of moments means fp8 e4m3, as in TransformerEngine.

    Args:
        params: fp32, bf16 or fp16 parameters, or groups of them.
        lr, betas, eps, weight_decay, bias_correction: as in torch's AdamW; may differ between
            groups.
        amsgrad, capturable: must be False.
        adam_w_mode: decoupled weight decay; otherwise it is added to the gradient (L2).
        master_weights: keep fp32 values of 16-bit parameters. Those of our `fully_shard` are main
            weights already.
        master_weight_dtype: in which they are kept: fp32 or fp16.
        exp_avg_dtype, exp_avg_sq_dtype: fp32, bf16, fp16 or fp8 e4m3.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`; its dtype may be another
            than p's.
        store_param_remainders: keep of the fp32 value of a bf16 parameter only what the parameter
            lacks.
        set_grad_none: what `zero_grad` does if it is not told; None means True, as in
            TransformerEngine.
        num_host_threads: of the pass over CPU tensors; default: the cores that this rank may use.

    Raises:
        NotImplementedError: for amsgrad and for capturable.
        ValueError: for a dtype or constant that is none of these; for remainders without fp32
            master weights.
    """

    recuts_states_on_load = True  # so that nobody else has to look, before every step

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        capturable: bool = False,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        num_host_threads: int | None = None,
    ) -> None:
        for name, value in (("amsgrad", amsgrad), ("capturable", capturable)):
            if value:
                raise NotImplementedError(f"Expected {name}=False, got {value}.")
        if store_param_remainders and not (master_weights and master_weight_dtype == torch.float32):
            raise ValueError(
                "Expected store_param_remainders with master_weights=True in torch.float32, got "
                f"master_weights={master_weights} in {master_weight_dtype}."
            )
        self.adam_w_mode = adam_w_mode
        self.master_weights = master_weights
        self.use_decoupled_grad = use_decoupled_grad
        self.store_param_remainders = store_param_remainders
        self.set_grad_none = True if set_grad_none is None else bool(set_grad_none)
        self.exp_avg_dtype = _checked_dtype("exp_avg_dtype", exp_avg_dtype, _STATE_DTYPES)
        self.exp_avg_sq_dtype = _checked_dtype("exp_avg_sq_dtype", exp_avg_sq_dtype, _STATE_DTYPES)
        self.master_weight_dtype = _checked_dtype(
            "master_weight_dtype", master_weight_dtype, _MASTER_DTYPES
        )
        self._scales: dict[torch.Tensor, dict[str, torch.Tensor]] = {}
        self._num_host_threads = num_host_threads
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults)
        self._make_parts()

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As in torch.optim. ValueError for parameters or constants that are not as the constructor
        wants them.
        """
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            _check_group(group)
        except ValueError:
            self.param_groups.pop()
            raise

    def __getstate__(self) -> dict[str, Any]:
        # Their module refuses to be copied too. A copy of a parameter has no group, so nothing
        # would hand its weights on to the module.
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
        """What belongs to this object alone, and no copy takes over."""
        self._memory = StateMemory()
        self._holds: list[_Hold] = []
        self._revision = 0  # of the states: see `StepInputs`
        self._host: HostAdam | None = None
        # First among the hooks, so that those of users see values.
        self.register_state_dict_post_hook(_unscale)

    # Stepping

    @torch.no_grad()
    def init_state(self) -> None:
        """Allocates the states that there are not yet, without stepping: moments of zero, masters
        as the parameters.
        """
        for parameter in self._parameters():
            has_gradient = gradient_of(parameter, self.use_decoupled_grad) is not None
            if not self.state.get(parameter) and (parameter.requires_grad or has_gradient):
                self._allocate(parameter)

    @torch.no_grad()
    def plan_step(self) -> FusedStep:
        """What `step` is about to do, all but the factor of the gradients: for who has yet to wait
        for that factor.

        Allocates states, steps nothing. A plan holds the gradients, whose values may still change.

        Raises:
            As `step` does.
        """
        self.init_state()
        inputs = self._step_inputs()
        planned = self._plan()
        batches = [
            _Batch(
                events,
                plan(
                    [
                        Update(each.step, self._arrays(each))
                        for each in part
                        if each.gradient.numel()
                    ]
                ),
            )
            for events, part in self._batches(planned)
        ]
        return FusedStep(inputs, planned, batches, list(self._holds))

    @torch.no_grad()
    def step(  # type: ignore[override]  # torch's has no grad_scale
        self,
        closure: Callable[[], float] | None = None,
        *,
        grad_scale: float = 1.0,
        planned: FusedStep | None = None,
    ) -> float | None:
        """Steps every parameter that has a gradient. The others' states stay as they are, `step`
        included.

        Args:
            closure: computes the loss anew, and gradients.
            grad_scale: what gradients are multiplied with as they are read, a clip coefficient say.
            planned: what `plan_step` has answered for this step. Without it, or if gradients have
                been replaced, options changed or states loaded or stepped since, the step is
                planned here.

        Returns:
            What `closure` returned.

        Raises:
            RuntimeError: for gradients that are partial sums, and for GPU tensors without Triton.
            ValueError: for a gradient or state that is not distributed, shaped and placed as its
                parameter, and for a gradient in an attribute that is not read.
            In either case, no parameter has been stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if planned is None or not planned.inputs.are_still(self._step_inputs()):
            planned = self.plan_step()
        self._revision += 1
        self._wait_for_readers(besides=planned.holds)
        for batch in planned.batches:
            for event in batch.events:
                event.synchronize()
            carry_out(batch.updates, grad_scale, self._run)
        for each in planned.parameters:
            self.state[each.parameter][STEP].fill_(float(each.step.step))
        # Kernels write by address, which autograd does not notice.
        torch.autograd.graph.increment_version([each.parameter for each in planned.parameters])
        return loss

    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Clears the gradients that `step` reads: to None, or in place to zero. Default: as
        `set_grad_none` says.
        """
        is_none = self.set_grad_none if set_to_none is None else set_to_none
        clear_gradients(self._parameters(), self.use_decoupled_grad, is_none)

    # States

    def state_units(self) -> list[StateUnit]:
        """What is updated while other parts may still be read: each FSDP group, and all parameters
        without one.
        """
        units: dict[FsdpParameterGroup | None, list[torch.Tensor]] = {}
        for parameter in self._parameters():
            units.setdefault(group_of(parameter), []).append(parameter)
        return [self._unit(parameters) for parameters in units.values()]

    def _unit(self, parameters: Sequence[torch.Tensor]) -> StateUnit:
        states = [self.state.get(parameter, {}) for parameter in parameters]
        return StateUnit(
            self,
            parameters,
            states,
            None,
            lambda event: self._holds.append(_Hold(parameters, event)),
        )

    def get_unscaled_state(self, param: torch.Tensor, state_name: str) -> torch.Tensor:
        """A state's values in fp32: the state itself if it is fp32, else a copy. Remainders are
        given as they are.
        """
        state: torch.Tensor = self.state[param][state_name]
        if state.dtype in (torch.float32, torch.int16):
            return state
        scale = self._scales[param].get(state_name)
        local = local_tensor(state)
        return like(param, local.float() if scale is None else scaled_states.read(local, scale))

    def state_scale(self, param: torch.Tensor, state_name: str) -> torch.Tensor | None:
        """What a state's values are multiplied with to be read: scalar, fp32, not a copy; None if
        it has no scale.
        """
        return self._scales[param].get(state_name)

    @torch.no_grad()
    def set_scaled_state(
        self, param: torch.Tensor, state_name: str, unscaled_state: torch.Tensor
    ) -> None:
        """Stores values in a state, rounded and scaled as it is kept. `unscaled_state` is not
        changed.

        Args:
            param: one of the optimizer's parameters.
            state_name: exp_avg, exp_avg_sq or master_param.
            unscaled_state: fp32, of remainders int16; distributed and shaped as the parameter.

        Raises:
            ValueError: for a state that `param` does not have, and for other tensors.
        """
        dtypes = self._state_dtypes(param)
        if state_name not in dtypes:
            raise ValueError(f"Expected one of {sorted(dtypes)}, got {state_name!r}.")
        expected = torch.int16 if dtypes[state_name] == torch.int16 else torch.float32
        check_state(state_name, unscaled_state, param, expected)
        self._revision += 1
        self._wait_for_readers()
        if not self.state.get(param):
            self._allocate(param)
        self._store(param, state_name, unscaled_state)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Takes the values of a state dict over into the states' own memory, and its groups'
        constants.

        Everything is checked before anything is changed. A state may come from another device.
        Parameters without a state in the dict begin anew. TransformerEngine's dicts, which have one
        step for each group, are understood.

        Raises:
            ValueError: for other groups, for states that are missing or unexpected, for those that
                are not distributed or shaped as their parameter or not of the dtype in which
                `state_dict` gives them.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        states = checked_states(self.param_groups, state_dict, self._state_dtypes)
        self._revision += 1
        self._wait_for_readers()
        for parameter in self._parameters():
            if parameter in states:
                self._install(parameter, states[parameter])
            elif self.state.get(parameter):
                self._reset(parameter)
        for own, loaded in zip(
            self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True
        ):
            own.update(
                {name: value for name, value in loaded.items() if name not in ("params", STEP)}
            )
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def _state_dtypes(self, parameter: torch.Tensor) -> dict[str, torch.dtype]:
        """How the states of a parameter are kept, but for `step`."""
        dtypes = {"exp_avg": self.exp_avg_dtype, "exp_avg_sq": self.exp_avg_sq_dtype}
        if self.master_weights and parameter.dtype.itemsize == 2 and group_of(parameter) is None:
            is_remainder = self.store_param_remainders and parameter.dtype == torch.bfloat16
            dtypes["master_param"] = torch.int16 if is_remainder else self.master_weight_dtype
        return dtypes

    def _allocate(self, parameter: torch.Tensor) -> None:
        dtypes = self._state_dtypes(parameter)
        tensors = {
            name: self._memory.empty(parameter, name, dtype) for name, dtype in dtypes.items()
        }
        self._scales[parameter] = {
            name: scaled_states.new_scale(local_tensor(tensor).device)
            for name, tensor in tensors.items()
            if scaled_states.is_scaled(tensor.dtype)
        }
        self.state[parameter] = {STEP: torch.zeros((), dtype=torch.float32), **tensors}
        self._reset(parameter)

    def _reset(self, parameter: torch.Tensor) -> None:
        """Makes the states those of a parameter that has taken no step."""
        for name, tensor in self.state[parameter].items():
            local_tensor(tensor).zero_()
            if name == "master_param" and tensor.dtype != torch.int16:
                self._store(parameter, name, local_tensor(parameter).detach().float())

    def _store(self, parameter: torch.Tensor, name: str, values: torch.Tensor) -> None:
        own, values = local_tensor(self.state[parameter][name]), local_tensor(values)
        scale = self._scales[parameter].get(name)
        if scale is not None:
            is_weight = name == "master_param"
            scaled_states.restore(own, scale, values.to(own.device), is_weight=is_weight)
        elif own.data_ptr() != values.data_ptr():
            own.copy_(values)

    def _install(self, parameter: torch.Tensor, loaded: dict[str, Any]) -> None:
        if not self.state.get(parameter):
            self._allocate(parameter)
        for name, value in loaded.items():
            if name == STEP:
                self.state[parameter][STEP].fill_(float(value))
            else:
                self._store(parameter, name, value)

    # One step

    def _parameters(self) -> Iterator[torch.Tensor]:
        return itertools.chain.from_iterable(group["params"] for group in self.param_groups)

    def _step_inputs(self) -> StepInputs:
        return StepInputs.of(self.param_groups, self.use_decoupled_grad, self._revision)

    def _plan(self) -> list[_Planned]:
        """What there is to do, once it is known to be possible, with gradients as they are."""
        planned = []
        for group_number, group in enumerate(self.param_groups):
            steps: dict[int, AdamStep] = {}
            for index, parameter in enumerate(group["params"]):
                place = f"parameter {index} of group {group_number}"
                gradient = gradient_of(parameter, self.use_decoupled_grad)
                if gradient is None:
                    check_not_elsewhere(parameter, self.use_decoupled_grad, place)
                    continue
                self._check(parameter, gradient, place)
                number = int(self.state[parameter][STEP]) + 1
                if number not in steps:
                    steps[number] = AdamStep.of(group, number, 1.0, self.adam_w_mode)
                planned.append(_Planned(parameter, local_tensor(gradient).detach(), steps[number]))
        return planned

    def _batches(self, planned: Sequence[_Planned]) -> Iterator[tuple[list[Event], list[_Planned]]]:
        """What may be stepped, batch by batch: first what nobody reads, then each unit once it has
        been read.
        """
        held = [
            (hold.event, {id(parameter) for parameter in hold.parameters})
            for hold in self._holds
            if not hold.event.is_done()
        ]
        last = {
            parameter: number
            for number, (_, parameters) in enumerate(held)
            for parameter in parameters
        }
        batches: dict[int, list[_Planned]] = {}
        for each in planned:
            batches.setdefault(last.get(id(each.parameter), -1), []).append(each)

        for number in sorted(batches):
            own = {id(each.parameter) for each in batches[number]}
            yield (
                [event for event, parameters in held[: number + 1] if parameters & own],
                batches[number],
            )

    def _wait_for_readers(self, besides: Sequence[_Hold] = ()) -> None:
        """Waits for those that read any of the states, but not for some that are known."""
        known = set(map(id, besides))
        for hold in self._holds:
            if id(hold) not in known:
                hold.event.synchronize()
        # Only now, since an error may have ended the wait; and what is still read stays.
        self._holds = [hold for hold in self._holds if not hold.event.is_done()]

    def _check(self, parameter: torch.Tensor, gradient: torch.Tensor, place: str) -> None:
        """Parity between a parameter, its gradient and its states."""
        check_whole([gradient])
        if gradient.layout != torch.strided or not gradient.is_floating_point():
            raise ValueError(
                f"Expected a dense floating-point gradient of {place}, got {gradient.layout} "
                f"{gradient.dtype}."
            )
        device = local_tensor(parameter).device
        dtypes = self._state_dtypes(parameter)
        tensors = {"gradient": gradient, **{name: self.state[parameter][name] for name in dtypes}}
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
        if _takes_triton(device):
            device_adam.check_available()

    def _run(self, pieces: Sequence[AdamPiece]) -> None:
        on_host = [piece for piece in pieces if piece.weight.device.type == "cpu"]
        on_device = [piece for piece in pieces if piece.weight.device.type != "cpu"]
        if on_host:
            if self._host is None:
                self._host = HostAdam(self._num_host_threads)
            self._host.run(on_host)
        if on_device:
            kernel = device_adam if _takes_triton(on_device[0].weight.device) else torch_adam
            kernel.run(on_device)

    def _arrays(self, planned: _Planned) -> dict[str, LocalArray]:
        """The local tensors of a step, by their names in AdamPiece."""
        scales = self._scales[planned.parameter]
        states = {
            name: LocalArray(local_tensor(tensor), scales.get(name))
            for name, tensor in self.state[planned.parameter].items()
            if name != STEP
        }
        master, own = (
            states.pop("master_param", None),
            LocalArray(local_tensor(planned.parameter).detach()),
        )
        arrays = {"grad": LocalArray(planned.gradient), **states}
        if master is None:
            return {**arrays, "weight": own}
        if master.tensor.dtype == torch.int16:
            return {**arrays, "weight": own, "remainder": master}
        return {**arrays, "weight": master, "out": own}


def _takes_triton(device: torch.device) -> bool:
    return device.type != "cpu" and driver_of(device.type).has_triton


def _unscale(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
    """The state dict with values in the place of scaled states, and dicts of its own."""
    assert isinstance(optimizer, FusedAdam), "its hook"
    parameters = list(optimizer._parameters())
    states = {
        number: {
            name: optimizer.get_unscaled_state(parameters[number], name)
            if scaled_states.is_scaled(value.dtype)
            else value
            for name, value in state.items()
        }
        for number, state in state_dict["state"].items()
    }
    return {**state_dict, "state": states}


def _checked_dtype(name: str, dtype: torch.dtype, allowed: tuple[torch.dtype, ...]) -> torch.dtype:
    dtype = torch.float8_e4m3fn if dtype == torch.uint8 else dtype
    if dtype not in allowed:
        raise ValueError(
            f"Expected {name} to be one of {', '.join(map(str, allowed))}, got {dtype}."
        )
    return dtype


def _check_group(group: dict[str, Any]) -> None:
    for index, parameter in enumerate(group["params"]):
        if parameter.dtype not in FLOAT_DTYPES:
            raise ValueError(
                f"Expected parameters of {', '.join(map(str, FLOAT_DTYPES))}, got "
                f"{parameter.dtype} at {index}."
            )
    for name in ("lr", "eps", "weight_decay"):
        if not group[name] >= 0:
            raise ValueError(f"Expected {name} of at least 0, got {group[name]}.")
    if not all(0 <= beta < 1 for beta in group["betas"]):
        raise ValueError(f"Expected betas in [0, 1), got {group['betas']}.")
