"""`HybridDeviceOptimizer`: an optimizer of which a part, or all, lives in host memory.

    backward, last microbatch   d2h: a group's gradients are copied down once they are reduced
    step                        host: one pass over a bucket's flat arrays, in forward order
                                h2d: its compute weights are copied up
    next forward                a group's gather waits for its own weights only

The host side takes the last groups of the network: their gradients come first in backward, and
their weights are needed last in forward. `offload_first` names groups that go before them. Host and
device side give the same bits, so where a group lives never changes a run.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from megatron.core.dtensors import check_whole
from megatron.core.host_keeper import KeptMemory
from megatron.core.lane_timings import LaneTimings
from megatron.core.optimizer.config import DEFAULT_OPTIMIZER_FRACTION, Overlap
from megatron.core.optimizer.cpu_offloading.both_sides import BothSides, options_of
from megatron.core.optimizer.cpu_offloading.host_side import HostStep
from megatron.core.optimizer.cpu_offloading.hybrid_settings import HybridSettings, updaters_of
from megatron.core.optimizer.cpu_offloading.kept_layout import KeptBucket, Landed
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.kernels.piece import check_grad_scale
from megatron.core.optimizer.planning_optimizer import PlanningOptimizer
from megatron.core.optimizer.rule_optimizer import RuleStep
from megatron.core.optimizer.rules import UpdateRule
from megatron.core.optimizer.state_loading import (
    check_options,
    loaded_options,
    states_by_parameter,
)
from megatron.core.optimizer.state_units import StateUnit
from megatron.core.optimizer.step_inputs import StepInputs, check_not_elsewhere, clear_gradients
from megatron.core.timeline import AnyTimeline


class HybridStep(NamedTuple):
    """A step of both sides, but for the factor of the gradients."""

    inputs: StepInputs
    on_host: HostStep
    on_device: RuleStep | None  # optimizers of torch's do not plan


class HybridDeviceOptimizer(PlanningOptimizer):
    """A `torch.optim.Optimizer` over plain tensors, DTensors and FSDP groups' parameters, part of
    which it keeps and updates in host memory. It is AdamW with the defaults of `FusedAdam`, which
    are TransformerEngine's: `weight_decay` is 0, where `torch.optim.AdamW` decays by 0.01. With
    `torch.optim.AdamW` as its classes, the defaults are torch's. With a `rule`, it is that rule.

    The constructor plans, allocates the host side and moves what belongs there. All ranks of the
    mesh call it together.

    `param_groups` may be changed at any time and count from the next step on: their options, and
    also their parameters. Programs such as accelerate build the optimizer, then shard the model and
    put the sharded parameters into the groups. The next step, `load_state_dict` or `init_state`,
    which all ranks call together, plans these anew and frees the memory of the old ones. As soon as
    there are states, parameters can still be removed, reordered and added, but no longer replaced.

    A parameter without a gradient is not stepped, on either side. Reading `state`, `state_dict()`,
    and saving wait for pending updates; so does `state_dict()` of a module whose main
    weights are here. Call `synchronize` before reading a parameter itself.

    Args:
        params: parameters on one device, or groups of them as for any optimizer, in the order of
            forward; sharded already, or replaced in `param_groups` before the first step.
        offload_fraction: of all elements, 0 to 1; at least as many are on the host, in whole FSDP
            modules.
        cpu_optimizer_cls, gpu_optimizer_cls: what updates the parameters of either side; default:
            `FusedAdam`, which also replaces `torch.optim.AdamW`, with the defaults of that class.
            Both become the `Adam` rule. Other classes are stepped as they are.
        param_update_in_fp32: fp32 main weights on the host for 16-bit parameters; FSDP groups
            always have fp32 main weights.
        pin_cpu_grads: page-locked memory for gradients that are copied down.
        pin_cpu_params: the same for weights that are copied up. Main weights and moments never
            travel: they are not pinned.
        overlap_cpu_optimizer_d2h_h2d: lanes; otherwise the same work one after the other, in this
            thread.
        fetch_during_backward: FSDP groups' gradients go down as soon as they are reduced; needs
            overlapping lanes. Best clip by `grad_scale`: gradients that are written to between
            backward and `step` go down again. Writes through `.data` or `numpy()`, and collectives
            on `to_local()`, move no version counter and are missed.
        overlap_step_with_forward: `step` returns when the work for FSDP groups is queued; needs
            overlapping lanes.
        use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`. Outside of FSDP groups its
            dtype may be another than p's, and it travels in fp32.
        exp_avg_dtype, exp_avg_sq_dtype: fp32 or bf16, dtypes of the moments of AdamW on both sides.
        num_host_threads: default: a rank's share of the machine's cores; see host_threads.py.
        num_local_ranks: ranks on this machine; default: LOCAL_WORLD_SIZE, or 1.
        records_timings: clocks for `timings`.
        offload_first: parameters whose groups go to the host before any other, such as the
            parameters of every `Experts`; from the last of them on. Parameters that replace them
            inherit this.
        rule: updates the parameters of both sides in one flat pass, such as `Lion()`; instead of
            the classes and of the dtypes of moments.
        update_on_device: share of the host's elements, 0 to 1, that the device updates: whole FSDP
            groups, evenly among the others. Their main weights and states stay in host memory and
            pass through the device a chunk at a time (streamed_pass.py), so the host has less to
            do and the link more. None: the share that is the fastest in the first nine steps, in
            which all ranks step together. No bit changes. Needs overlapping lanes and a rule on
            both sides, but not Muon.
        early_update_bytes: additional host memory with which sharded FSDP groups are updated
            before `step`, as soon as their gradients have come down, from the last group on. `step`
            makes the updates final if its `grad_scale` is the expected one, 1 unless
            `expect_grad_scale` was called, and otherwise repeats them; see early_updates.py. No bit
            changes. 0: none. Needs `fetch_during_backward`, and AdamW or another elementwise rule,
            but not Muon.
        kept: where host memory comes from, if it is to survive the process; see `land` and
            `finish_kept`. Needs a rule, FSDP groups whose main weights are there too
            (`OffloadPolicy.kept`), and neither early updates nor updates on the device.
        kwargs: options of the rule or the optimizer classes: lr, betas, weight_decay. Classes other
            than AdamW allocate their states outside the slabs, and these are not counted.

    Raises:
        ValueError: for a fraction outside 0 to 1, `offload_first` of other parameters, main weights
            in host memory of a group that the fraction leaves on the device, parameters on several
            devices, dtypes that the rule does not take, and a rule together with a class.
        TypeError: for options that neither side has.
        NotImplementedError: for decoupled gradients with other classes than AdamW.
        HostMemoryError: on all ranks, before anything is allocated, if one machine's memory does
            not suffice.
        PinError: if memory cannot be pinned.
    """

    _is_complete = False  # while torch's constructor runs, there are no sides yet

    def __init__(
        self,
        params: Any,
        offload_fraction: float = DEFAULT_OPTIMIZER_FRACTION,
        cpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        gpu_optimizer_cls: type[torch.optim.Optimizer] | None = None,
        param_update_in_fp32: bool = False,
        pin_cpu_grads: bool = True,
        pin_cpu_params: bool = True,
        overlap_cpu_optimizer_d2h_h2d: bool = True,
        *,
        fetch_during_backward: bool = False,
        overlap_step_with_forward: bool = False,
        use_decoupled_grad: bool = False,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        num_host_threads: int | None = None,
        num_local_ranks: int | None = None,
        records_timings: bool = False,
        offload_first: Iterable[nn.Parameter] = (),
        rule: UpdateRule | None = None,
        update_on_device: float | None = 0.0,
        early_update_bytes: int = 0,
        kept: KeptMemory | None = None,
        **kwargs: Any,
    ) -> None:
        overlaps = (overlap_cpu_optimizer_d2h_h2d, fetch_during_backward, overlap_step_with_forward)
        overlap = {one.value: one for one in Overlap}.get(overlaps)
        if overlap is None:
            raise ValueError(
                "Expected overlap_cpu_optimizer_d2h_h2d, which the other overlaps need, got it off."
            )
        dtypes = (exp_avg_dtype, exp_avg_sq_dtype)
        host, device = updaters_of(cpu_optimizer_cls, gpu_optimizer_cls, dtypes, rule, kwargs)
        settings = HybridSettings(
            host=host,
            device=device,
            in_fp32=param_update_in_fp32,
            pins_grads=pin_cpu_grads,
            pins_params=pin_cpu_params,
            overlap=overlap,
            use_decoupled_grad=use_decoupled_grad,
            num_host_threads=num_host_threads,
            num_local_ranks=num_local_ranks,
            records_timings=records_timings,
            update_on_device=update_on_device,
            early_update_bytes=early_update_bytes,
            kept=kept,
        )
        settings.check()
        super().__init__(params, settings.common_defaults())
        self.use_decoupled_grad = use_decoupled_grad
        parameters = list(self._parameters())
        self._sides = BothSides(parameters, settings, offload_fraction, offload_first)
        self._is_started = False  # whether a step was taken, or states were loaded or allocated
        self._adopt_parameters()
        self._is_complete = True

    # The contract of torch.optim

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all parameters by name, not copies, once pending updates have finished.

        Empty, as in torch's optimizers, until the first step, load of states or `init_state`.
        """
        if self._is_complete:
            self.synchronize()
        if self._is_started:
            self._adopt_parameters()
            # States of parameters that left the groups stay with them, in case they come back.
            states, own = self._sides.states(), set(self._parameters())
            for parameter in set(self._state).difference(own.intersection(states)):
                del self._state[parameter]
            self._state.update({p: values for p, values in states.items() if p in own})
        return self._state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._is_complete:
            raise RuntimeError(
                "The states of this optimizer cannot be assigned: they are in the memory of both "
                "sides. Use load_state_dict."
            )
        self._state = state

    @torch.no_grad()
    def plan_step(self) -> HybridStep:
        """Plans a step up to the factor of the gradients, for callers that still wait for that.

        Does not step. A plan holds the gradients, whose values may still change.

        It raises what `step` raises.
        """
        self._adopt_parameters()
        inputs = self._step_inputs()
        check_whole(inputs.gradients)
        gradients = dict(zip(self._parameters(), inputs.gradients, strict=True))
        for parameter, gradient in gradients.items():
            if gradient is not None:
                self._sides.check_gradient(parameter, gradient)
            else:
                place = f"a parameter of shape {tuple(parameter.shape)}"
                check_not_elsewhere(parameter, self.use_decoupled_grad, place)
        # An optimizer made later for the same parameters updates them now.
        for bucket in self._sides.host_side.buckets:
            bucket.check(self)

        on_host = self._sides.host_side.plan_step(gradients, options_of(self.param_groups))
        return HybridStep(inputs, on_host, self._sides.device_side.plan_step(self.param_groups))

    @torch.no_grad()
    def step(
        self,
        closure: Callable[[], Any] | None = None,
        *,
        grad_scale: float = 1.0,
        planned: HybridStep | None = None,
    ) -> Any:
        """Steps every parameter that has a gradient.

        Args:
            closure: computes the loss again, and is called first.
            grad_scale: a factor of the gradients, such as the coefficient of clipping, applied as
                they are read.
            planned: the plan that `plan_step` returned for this step. Without it, or if gradients
                have been replaced, options changed or states loaded or stepped since, the step is
                planned here.

        Raises:
            ValueError: for a gradient of another shape, dtype or device than expected, or in an
                attribute that is not read (see `use_decoupled_grad`), and for a grad_scale that is
                not finite; no parameter is stepped.
            RuntimeError: for partial sums of gradients, and for parameters that were replaced
                after the first step; no parameter is stepped.
        """
        loss = self._loss_of(closure)
        check_grad_scale(grad_scale)
        self._adopt_parameters()
        if self._only_initializes():
            self.init_state()
            # The helper's gradients of zeros, which its own `zero_grad` would leave there.
            clear_gradients(self._parameters(), False, set_to_none=True)
            return loss
        if planned is None or not planned.inputs.are_still(self._step_inputs()):
            planned = self.plan_step()
        self._is_started = True
        self._revision += 1
        # Before the device's step is issued, which the host's work need not wait for.
        now = self._sides.device.event()
        # First, since the device's optimizer may raise, if it is one of torch's. Plans cannot fail.
        self._sides.device_side.step(grad_scale, planned.on_device)
        self._sides.host_side.step(planned.on_host, grad_scale, now)
        return loss

    def land(self, number: int) -> list[Landed]:
        """Waits until the gradients of the coming step are in host memory, where they stay until
        their buckets have been updated. Returns what `finish_kept` needs besides them.

        Only with kept memory.

        Args:
            number: of the step: more than 0, and more than the one before.
        """
        self._adopt_parameters()
        return self._sides.host_side.land(number)

    def kept_buckets(
        self, memory: KeptMemory, names: Mapping[torch.Tensor, list[str]]
    ) -> list[KeptBucket]:
        """Describes the buckets for processes that have other ones.

        Args:
            memory: in which their arrays are.
            names: the names of each parameter in checkpoints.
        """
        groups = {
            parameter: number
            for number, group in enumerate(self.param_groups)
            for parameter in group["params"]
        }
        return self._sides.host_side.kept_buckets(memory, groups, names)

    @torch.no_grad()
    def finish_kept(
        self,
        number: int,
        memory: KeptMemory,
        buckets: Sequence[KeptBucket],
        landed: Sequence[Landed],
        grad_scale: float,
    ) -> None:
        """Finishes the last step of an earlier rank in its memory, which need not be this
        optimizer's.

        Args:
            number: of the step.
            memory, buckets: of the earlier rank, with all files mapped.
            landed: what `land` returned before the step. The groups have the options of the step.
            grad_scale: the factor of the gradients.
        """
        self._sides.host_side.finish_kept(
            number, memory, buckets, landed, self.param_groups, grad_scale
        )

    @torch.no_grad()
    def take_over(self, counts: Sequence[Sequence[int]]) -> None:
        """Takes over main weights and states that are in this optimizer's memory already.

        Args:
            counts: of each bucket, the steps that each of its parameters has taken.
        """
        self._adopt_parameters()
        self._is_started = True
        self._revision += 1
        self._sides.host_side.take_over(counts)

    def expect_grad_scale(self, grad_scale: float) -> None:
        self._sides.host_side.expect_grad_scale(grad_scale)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients that `step` reads: to None, or in place to zero."""
        if not set_to_none:
            self._sides.host_side.wait_gradients_read()
        clear_gradients(self._parameters(), self.use_decoupled_grad, set_to_none)

    def synchronize(self) -> None:
        """Waits until all updates have ended and their weights are up. Raises what failed there.

        Between backward and `step`, early updates are undone.
        """
        self._sides.host_side.synchronize()

    def state_units(self) -> list[StateUnit]:
        """The units of the device side, and one for each bucket."""
        self._adopt_parameters()
        on_host = self._sides.host_side.state_units(self)
        return self._sides.device_side.state_units() + on_host

    def record_to(self, timeline: AnyTimeline) -> None:
        """Records the lanes' work in a timeline. RuntimeError without `records_timings`."""
        self._sides.record_to(timeline)

    def timings(self) -> LaneTimings | None:
        """Means over the steps completed since the last call; None without a record.

        With `overlap_step_with_forward` the last step is not among them: the forward still waits
        for it.
        """
        return self._sides.host_side.shown_timings.collect()

    def reload_parameters(self) -> None:
        """Takes over the parameters' values, after a write that no version counter shows.

        Such are writes into `.data` or by numpy, collectives on `to_local()`, and, outside of FSDP
        groups, operators on lists of FSDP2 DTensors and fused kernels (`torch._fused_adamw_`).
        Both sides detect other writes at the next step, also writes by `load_state_dict` and an
        assigned `.data`.
        """
        self._adopt_parameters()
        self._sides.host_side.wait_until_free()
        for bucket in self._sides.host_side.buckets:
            bucket.reload()
        self._sides.device_side.reload()

    def init_state(self) -> None:
        """Allocates the states that are not there yet, without stepping."""
        self._adopt_parameters()
        self._is_started = True
        self._sides.init_states(self.param_groups)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies states into the memory where they belong, and takes the groups' options over.

        Raises:
            ValueError: for other groups, states, shapes or dtypes than this optimizer's; the
                optimizer is unchanged.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed

        self._adopt_parameters()
        self._check_options(state_dict["param_groups"])
        saved = states_by_parameter(self.param_groups, state_dict, self._sides.host_side.rule)
        # accelerate loads the state dict of a new optimizer back into it: that is not a start.
        if saved or self._is_started:
            self._sides.host_side.wait_until_free()
            self._sides.init_states(self.param_groups)
            # Parameters without a state in the dict start over.
            self._revision += 1
            self._sides.load({p: saved.get(p, {}) for p in self._parameters()})
            # Not after an error: parameters of an optimizer without states may still be replaced.
            self._is_started = True

        for group, other in zip(self.param_groups, state_dict["param_groups"], strict=True):
            group.update(loaded_options(group, other))
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, at any time; the new parameters are planned by themselves. All ranks of the
        mesh add them together.

        Raises:
            ValueError: for parameters that the constructor would reject.
            RuntimeError: for some of the parameters of an FSDP module of which this optimizer has
                others.
        """
        super().add_param_group(param_group)
        if self._is_complete:
            try:
                self._adopt_parameters()
            except BaseException:
                self.param_groups.pop()
                raise

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "Expected state_dict() to be used, got an attempt to copy or pickle an offloaded "
            "optimizer."
        )

    # Sides and memory

    @property
    def plan(self) -> OffloadPlan:
        """Which groups are on which side."""
        return self._sides.plan

    @property
    def host_bytes(self) -> int:
        """Bytes on this rank: main weights, states of a rule, gradients and compute weights."""
        return sum(self._sides.host_side.nbytes_by_state.values())

    def host_bytes_by_state(self) -> dict[str, int]:
        """Bytes of host memory by purpose; the alignment of an array counts with it.

        The sum is `host_bytes`, and the states that an optimizer of another class has so far.
        """
        return self._sides.host_side.all_nbytes_by_state()

    @property
    def slots_nbytes(self) -> int:
        """Bytes on the device through which states pass that it updates for the host."""
        return self._sides.host_side.slots_nbytes

    @property
    def device_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer of the device side; None if everything is on the host."""
        return self._sides.device_side.optimizer

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is updated in host memory."""
        return self._sides.host_side.place_of(parameter) is not None

    # The interface of megatron-core

    @property
    def gpu_optimizer(self) -> torch.optim.Optimizer | None:
        """`device_optimizer`, with the options that the groups have now."""
        self._adopt_parameters()
        self._sides.device_side.take_options(self.param_groups)
        return self.device_optimizer

    @property
    def cpu_optimizers(self) -> list[torch.optim.Optimizer]:
        """The host side, an optimizer for each bucket over views of its main weights, once pending
        updates have finished. Read-only: see `BucketView`.
        """
        self._adopt_parameters()
        return self._sides.host_side.torch_optimizers(options_of(self.param_groups))

    @property
    def sub_optimizers(self) -> list[torch.optim.Optimizer]:
        """`cpu_optimizers`, and `gpu_optimizer` unless it is None."""
        on_device = self.gpu_optimizer
        return self.cpu_optimizers + ([] if on_device is None else [on_device])

    @property
    def param_to_fp32_param(self) -> dict[torch.Tensor, torch.Tensor]:
        """The fp32 main weights of 16-bit parameters, not copies, once pending updates have
        finished. Parameters that are main weights themselves are not among them.
        """
        self._adopt_parameters()
        return self._sides.host_side.masters() | self._sides.device_side.masters()

    def update_fp32_param_by_new_param(self) -> None:
        """Copies the values of 16-bit parameters to their main weights, on both sides.

        For example after loading a checkpoint's weights into the model. An alias of
        `reload_parameters` with megatron-core's name.
        """
        self.reload_parameters()

    # Helpers

    def _adopt_parameters(self) -> None:
        """Follows changes of the groups. Every method that needs both sides calls it first.

        Raises:
            RuntimeError: for parameters that were replaced after the first step, or after states
                were loaded or allocated.
        """
        if self._sides.adopt(self, has_states=self._is_started):
            self._revision += 1

    def _only_initializes(self) -> bool:
        """Whether PyTorch's state-dict helpers call `step` to have the states allocated."""
        # By the caller: zero gradients and a rate of zero may also be the first step of a warmup,
        # on all ranks, or on some that have a shard without anything else.
        frame: FrameType | None = None if self._is_started else sys._getframe()
        while frame is not None:
            if frame.f_code.co_name == "_init_optim_state":
                name: str = frame.f_globals["__name__"]
                return name == "torch.distributed.checkpoint.state_dict"
            frame = frame.f_back
        return False

    def _check_options(self, loaded: list[dict[str, Any]]) -> None:
        """ValueError for groups' options that the host's rule cannot honour."""
        rule = self._sides.host_side.rule
        if rule is not None:
            # Other numbers of groups are rejected with the states.
            for own, other in zip(self.param_groups, loaded, strict=False):
                check_options(rule, own, other)
