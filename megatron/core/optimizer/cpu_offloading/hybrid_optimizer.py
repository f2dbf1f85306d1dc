"""`HybridDeviceOptimizer`: an optimizer of which a part, or all, lives in host memory.

    backward, last microbatch   gradients of a group are reduced     d2h: copied down, 2 bytes an element in bf16
    step                        buckets in forward order             host: one pass over a bucket's flat arrays
                                                                     h2d: its compute weights copied
                                                                     up
    next forward                a group's gather waits for its own weights, and for nothing else

The host side takes the last groups of the network: their gradients come first in backward, and
their weights are needed last in forward. Host and device side give the same bits, so that where a
group lives never changes a run.
"""

from __future__ import annotations

import copy
import threading
import weakref
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn

from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.dtensors import check_whole
from megatron.core.lanes import Event, InlineLane, Lane, RelayedEvent, is_lane_thread, relay
from megatron.core.local_ranks import local_world_size
from megatron.core.optimizer.clip_grads import scale_grads
from megatron.core.optimizer.cpu_offloading.device_link import (
    DeviceLink,
    GroupLink,
    Slot,
    TensorLink,
)
from megatron.core.optimizer.cpu_offloading.host_arrays import (
    BucketArrays,
    HostAllocator,
    check_memory_on_all_ranks,
)
from megatron.core.optimizer.cpu_offloading.host_threads import host_threads
from megatron.core.optimizer.cpu_offloading.host_update import (
    FlatAdam,
    HostUpdate,
    Options,
    Prepared,
    TorchUpdate,
)
from megatron.core.optimizer.cpu_offloading.issuing_lane import IssuingLane
from megatron.core.optimizer.cpu_offloading.plan import OffloadPlan
from megatron.core.optimizer.cpu_offloading.side_options import (
    ADAM_OPTIONS,
    check_moment_dtypes,
    common_defaults,
    defaults_of,
    is_flat_adam,
    known_to,
)
from megatron.core.optimizer.cpu_offloading.timings import (
    D2H,
    H2D,
    HOST,
    OffloadTimings,
    StepTimings,
    TimingRecorder,
)
from megatron.core.optimizer.cpu_offloading.units import (
    Unit,
    check_dtypes,
    check_sides,
    device_of,
    links_of,
    mesh_of,
    place,
    sharded_owner,
)
from megatron.core.optimizer.fused_adam import FusedAdam, FusedStep
from megatron.core.optimizer.gradient_source import (
    check_not_elsewhere,
    clear_gradients,
    gradient_of,
)
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam
from megatron.core.optimizer.state_loading import check_like, states_by_parameter
from megatron.core.optimizer.state_tensors import Difference, difference
from megatron.core.optimizer.state_units import StateUnit, state_units
from megatron.core.optimizer.step_inputs import IDENTITIES, StepInputs
from megatron.core.optimizer.torch_optimizer import init_torch_states, load_torch_states


class _Bucket:
    """What moves together, with the events of its lanes."""

    def __init__(
        self,
        arrays: BucketArrays,
        update: HostUpdate,
        timings: TimingRecorder | None,
        use_decoupled_grad: bool,
    ) -> None:
        self._use_decoupled_grad = use_decoupled_grad
        self.arrays = arrays
        self.link = arrays.link
        self.update = update
        self.timings = timings
        # Its weights have gone up: the arrays of gradients and weights are free again.
        self.sent: RelayedEvent | None = None
        # Its states and main weights have been read by somebody on another thread.
        self.reads: list[Event] = []

    def stepped(self) -> list[tuple[int, Slot, torch.Tensor]]:
        """The slots whose parameters have a gradient, with their numbers, and the gradients."""
        return [
            (index, slot, gradient)
            for index, slot in enumerate(self.link.slots)
            if (gradient := gradient_of(slot.parameter, self._use_decoupled_grad)) is not None
        ]

    def fetch(self, lane: Lane, work: Callable[[], object], after: Sequence[Event]) -> Event:
        """Queues work that writes gradients into the bucket."""
        return lane.enqueue(work, after=after if self.sent is None else [*after, self.sent])

    def take_reads(self) -> list[Event]:
        """What the next update waits for."""
        reads, self.reads = self.reads, []
        return reads

    def unit(self, optimizer: torch.optim.Optimizer) -> StateUnit:
        """The bucket as what may be read by itself."""
        parameters = [slot.parameter for slot in self.link.slots]
        states = [self.update.states(index) for index in range(len(parameters))]
        updated: Event | None = self.sent
        if self.sent is not None and self.link.delivers:
            updated = self.sent.first  # its parameters are the main weights themselves
        return StateUnit(optimizer, parameters, states, updated, self.reads.append)

    def fetch_early(self, lane: Lane) -> None:
        """From here on, gradients come down as soon as they are reduced, for the last microbatch of
        every step.
        """
        if isinstance(self.link, GroupLink):
            bucket, lane_of = weakref.ref(self), weakref.ref(lane)

            def send_down(reduced: Event) -> Event:
                # The group belongs to the model, and must keep neither the optimizer nor its lanes
                # alive.
                mine, lane = bucket(), lane_of()
                if mine is None or lane is None:
                    return reduced
                assert isinstance(mine.link, GroupLink), (
                    "a bucket keeps its link, and this one had a group's"
                )
                link, grad = mine.link, mine.arrays.grad
                step = None if mine.timings is None else mine.timings.coming
                # The reduction has been issued, and has counted its writes. The copy comes behind
                # it, not behind what this thread issues until the worker gets to it.
                seen = link.main_versions() if isinstance(lane, IssuingLane) else None
                return mine.fetch(
                    lane, _timed(step, D2H, lambda: link.fetch_early(grad, seen)), [reduced]
                )

            self.link.group.send_main_grad(send_down)


class _Host(NamedTuple):
    """The host side: the bytes of its memory, also by what is in it, and the buckets."""

    nbytes: int
    nbytes_by_state: dict[str, int]
    buckets: list[_Bucket]


class _BucketStep(NamedTuple):
    """A step of one bucket, but for the factor of the gradients."""

    bucket: _Bucket
    prepared: Prepared
    gradients: list[tuple[Slot, torch.Tensor]]  # of the slots that are stepped


class HybridStep(NamedTuple):
    """A step of both sides, but for the factor of the gradients. See
    `HybridDeviceOptimizer.plan_step`.
    """

    inputs: StepInputs
    on_host: list[_BucketStep]
    on_device: FusedStep | None  # of another optimizer than FusedAdam nothing is known before


class HybridDeviceOptimizer(torch.optim.Optimizer):
    """See the module's docstring. A `torch.optim.Optimizer` over plain tensors, DTensors and FSDP
    groups' parameters.

    `param_groups` may be changed at any time and count from the next step on. A parameter without a
    gradient is not stepped, on either side. Reading `state`, `state_dict()`, and saving wait for
    updates that are under way; so does `state_dict()` of a module whose main weights are here. Who
    reads a parameter itself calls `synchronize` first.

    Attributes:
        plan: which groups are on which side.
    """

    plan: OffloadPlan

    def __init__(
        self,
        params: Any,
        offload_fraction: float = 0.5,
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
        **kwargs: Any,
    ) -> None:
        """Plans, allocates the host side and moves what belongs there. All ranks of the mesh do it
        together.

        Args:
            params: as for any optimizer, in the order of forward. Parameters on one device, sharded
                already.
            offload_fraction: of all elements, 0 to 1; at least as many are on the host, in whole
                FSDP modules.
            cpu_optimizer_cls, gpu_optimizer_cls: what updates the parameters of either side;
                default: `FusedAdam`, for which `torch.optim.AdamW` also stands, with its own
                defaults. On the host it is one flat pass.
            param_update_in_fp32: fp32 main weights on the host for 16-bit parameters; FSDP groups
                have theirs anyway.
            pin_cpu_grads: page-locked memory for gradients on their way down.
            pin_cpu_params: the same for weights on their way up. Main weights and moments never
                travel: they are not pinned.
            overlap_cpu_optimizer_d2h_h2d: lanes; else the same work one after the other, in this
                thread.
            fetch_during_backward: FSDP groups' gradients go down as soon as they are reduced; needs
                overlapping lanes. Best clip by `grad_scale`: gradients that are written to between
                backward and `step` go down again. (Foreach operations on plain DTensors, those of
                `no_shard`, move no version counter and are missed.)
            overlap_step_with_forward: `step` returns when the work for FSDP groups is queued; needs
                overlapping lanes.
            use_decoupled_grad: read `p.decoupled_grad` instead of `p.grad`. Outside of FSDP groups
                its dtype may be another than p's, and it travels in fp32.
            exp_avg_dtype, exp_avg_sq_dtype: fp32 or bf16, of AdamW's moments on both sides.
            num_host_threads: default: a rank's share of the machine's cores; see host_threads.py.
            num_local_ranks: ranks on this machine; default: LOCAL_WORLD_SIZE, or 1.
            records_timings: clocks for `timings`.
            kwargs: options of the optimizer classes: lr, betas, weight_decay. States of other
                classes than AdamW are theirs: not in the slabs, nor counted before.

        Raises:
            ValueError: for a fraction outside 0 to 1, parameters on several devices, dtypes that
                AdamW does not take.
            NotImplementedError: for decoupled gradients with other classes than AdamW.
            HostMemoryError: on all ranks, before anything is allocated, if one machine's memory
                does not suffice.
            PinError: if memory cannot be pinned.
        """
        self._host: _Host | None = None
        self._device_optimizer: torch.optim.Optimizer | None = None
        self._revision = 0  # of the states: see `StepInputs`
        host_cls, device_cls = cpu_optimizer_cls or FusedAdam, gpu_optimizer_cls or FusedAdam
        self._is_flat = is_flat_adam(host_cls, kwargs)
        moment_dtypes = (exp_avg_dtype, exp_avg_sq_dtype)
        check_moment_dtypes(moment_dtypes, self._is_flat, is_flat_adam(device_cls, kwargs))
        super().__init__(params, common_defaults(host_cls, device_cls, kwargs))
        if (
            overlap_step_with_forward or fetch_during_backward
        ) and not overlap_cpu_optimizer_d2h_h2d:
            raise ValueError(
                "Expected overlap_cpu_optimizer_d2h_h2d, which the other overlaps need, got it off."
            )
        if use_decoupled_grad and not (self._is_flat and is_flat_adam(device_cls, kwargs)):
            classes = f"{host_cls.__name__} and {device_cls.__name__}"
            raise NotImplementedError(
                f"Expected FusedAdam on both sides with use_decoupled_grad, got {classes}."
            )
        self.use_decoupled_grad = use_decoupled_grad
        self._fetches_early = fetch_during_backward
        self._overlaps_forward = overlap_step_with_forward
        self._device = device_of(
            [parameter for group in self.param_groups for parameter in group["params"]]
        )
        self._make_lanes(overlap_cpu_optimizer_d2h_h2d, pin_cpu_grads)
        self._timings: TimingRecorder | None = None
        if records_timings:
            self._timings = TimingRecorder(self._device, has_lanes=overlap_cpu_optimizer_d2h_h2d)
        self.plan, on_device, on_host = place(self.param_groups, offload_fraction, sharded_owner)
        check_sides(on_device)
        links = links_of(on_host, param_update_in_fp32, use_decoupled_grad)
        if self._is_flat:
            check_dtypes(links)
        allocator = HostAllocator(self._device, pin_cpu_grads, pin_cpu_params, self._is_flat)
        allocator.plan(links, moment_dtypes)
        check_memory_on_all_ranks(allocator.needs, num_local_ranks, mesh_of([*on_device, *on_host]))
        adam = None
        if self._is_flat and links:
            threads = host_threads(
                self._device, num_local_ranks or local_world_size(), num_host_threads
            )
            adam = HostAdam(threads.number, cores=threads.cores)
        # The device's first: what it refuses must leave the host's groups where they are.
        fused: dict[str, Any] = dict(
            zip(("exp_avg_dtype", "exp_avg_sq_dtype"), moment_dtypes, strict=True)
        )
        fused |= {"master_weights": param_update_in_fp32, "num_host_threads": num_host_threads}
        fused |= {"use_decoupled_grad": use_decoupled_grad}
        self._make_device_side(on_device, device_cls, known_to(device_cls, kwargs), fused)
        self._make_host_side(links, allocator, host_cls, adam, known_to(host_cls, kwargs))

    # The contract of torch.optim

    @property
    def state(self) -> defaultdict[torch.Tensor, Any]:
        """The states of all parameters by name, once the updates under way have ended. Their dicts
        are not copies.
        """
        if self._host is not None:
            self.synchronize()
            self._collect_states()
        return self._state

    @state.setter
    def state(self, state: defaultdict[torch.Tensor, Any]) -> None:
        if self._host is not None:
            raise RuntimeError(
                "Expected states to come by load_state_dict, which knows where they lie, got "
                "others."
            )
        self._state = state

    @torch.no_grad()
    def plan_step(self) -> HybridStep:
        """What `step` is about to do, all but the factor of the gradients: for who has yet to wait
        for that factor.

        Steps nothing. A plan holds the gradients, whose values may still change.

        Raises:
            As `step` does.
        """
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        inputs = self._step_inputs()
        check_whole(inputs.gradients)
        for parameter, gradient in zip(parameters, inputs.gradients, strict=True):
            if gradient is not None:
                self._check_gradient(parameter, gradient)
            else:
                place = f"a parameter of shape {tuple(parameter.shape)}"
                check_not_elsewhere(parameter, self.use_decoupled_grad, place)
        for bucket in self._buckets:
            bucket.link.check(self)

        options = {
            id(parameter): group for group in self.param_groups for parameter in group["params"]
        }
        planned = [_plan_bucket(bucket, options) for bucket in self._buckets]
        on_host = [step for step in planned if step is not None]
        return HybridStep(inputs, on_host, self._plan_on_device())

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
            grad_scale: gradients are multiplied with it as they are read: the coefficient of
                clipping, say.
            planned: what `plan_step` has answered for this step. Without it, or if gradients have
                been replaced, options changed or states loaded or stepped since, the step is
                planned here.

        Raises:
            ValueError: for a gradient of another shape, dtype or device than expected, or in an
                attribute that is not read (see `use_decoupled_grad`); nothing is stepped.
            RuntimeError: for partial sums of gradients; nothing is stepped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if planned is None or not planned.inputs.are_still(self._step_inputs()):
            planned = self.plan_step()
        self._revision += 1
        now = self._device.event()
        # First, since other optimizers may refuse too; what has been planned cannot fail.
        self._step_on_device(grad_scale, planned.on_device)
        timings = None if self._timings is None else self._timings.begin()
        fetched = [self._begin(step, grad_scale, now, timings) for step in planned.on_host]
        # Gradients may be written to again. Weights may be awaited one by one, where somebody does.
        with nullcontext() if timings is None else timings.waiting(D2H):
            for event in fetched:
                event.wait()
        for bucket in self._buckets:
            if bucket.sent is not None and not (self._overlaps_forward and bucket.link.delivers):
                (bucket.sent.wait if timings is None else partial(timings.wait, bucket.sent))()
        if self._timings is not None and not self._overlaps_forward:
            self._timings.end()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients that `step` reads: to None, or in place to zero."""
        parameters = (parameter for group in self.param_groups for parameter in group["params"])
        clear_gradients(parameters, self.use_decoupled_grad, set_to_none)

    def synchronize(self) -> None:
        """Waits until all updates have ended and their weights are on the device. Raises what
        failed there.
        """
        for bucket in self._buckets:
            if bucket.sent is not None:
                bucket.sent.synchronize()

    def state_units(self) -> list[StateUnit]:
        """Those of the device side, and each bucket, as what may be read while the others are being
        updated.
        """
        if not self._is_flat:
            self.synchronize()  # what other optimizers count, they count as they update
        device = [] if self._device_optimizer is None else state_units(self._device_optimizer)
        return device + [bucket.unit(self) for bucket in self._buckets]

    def timings(self) -> OffloadTimings | None:
        """Means over the steps that have been completed since the last call; None if there are
        none, or no records.

        With `overlap_step_with_forward` the last step is not among them: the forward still waits
        for it.
        """
        return None if self._timings is None else self._timings.collect()

    def reload_parameters(self) -> None:
        """Takes over the values that parameters have, after something wrote to them that no version
        counter shows.

        Other writes are noticed, those by `load_state_dict` too; but not those through `.data`, nor
        those by foreach operations on plain DTensors (FSDP2's, and those of `no_shard`).
        """
        self._wait_until_free()
        for bucket in self._buckets:
            if isinstance(bucket.link, GroupLink):
                bucket.link.group.mark_updated()
            elif isinstance(bucket.link, TensorLink):
                bucket.link.reload(bucket.arrays.main_weight)

    def init_state(self) -> None:
        """Allocates the states that are not there yet, without stepping. On the host, AdamW's are
        from the start.
        """
        if not self._is_flat:
            self.synchronize()
        for bucket in self._buckets:
            bucket.update.init_states()
        if isinstance(self._device_optimizer, FusedAdam):
            self._device_optimizer.init_state()
        elif self._device_optimizer is not None:
            init_torch_states(self._device_optimizer)

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Copies the states of `state_dict()` into the memory where they belong, and takes the
        groups' options over.

        Raises:
            ValueError: for other groups, states, shapes or dtypes than this optimizer's; nothing is
                changed.
        """
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups = [
            own | loaded
            for own, loaded in zip(self.param_groups, state_dict["param_groups"], strict=False)
        ]
        for group in groups if self._is_flat else ():
            AdamStep.of(group, 1, 1.0, True)
        saved: dict[torch.Tensor, Mapping[str, Any]] = {
            p: {} for group in self.param_groups for p in group["params"]
        }
        saved.update(states_by_parameter(self.param_groups, state_dict))
        self._wait_until_free()
        self.init_state()
        optimizer = self._device_optimizer
        for parameter, states in saved.items():
            if id(parameter) in self._slots:
                bucket, index = self._slots[id(parameter)]
                check_like(bucket.update.states(index), states)
            elif optimizer is not None and not isinstance(optimizer, FusedAdam):
                check_like(optimizer.state.get(parameter, {}), states)
        self._revision += 1
        if isinstance(optimizer, FusedAdam):
            self._load_fused_states(optimizer, saved)
        for parameter, states in saved.items():
            if id(parameter) in self._slots:
                bucket, index = self._slots[id(parameter)]
                bucket.update.load(index, states)
            elif optimizer is not None and not isinstance(optimizer, FusedAdam):
                load_torch_states(optimizer, parameter, states)
        for group, other in zip(
            self.param_groups, copy.deepcopy(state_dict["param_groups"]), strict=True
        ):
            group.update({name: value for name, value in other.items() if name not in IDENTITIES})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's, while the optimizer is made. NotImplementedError later: the sides are planned
        once.
        """
        if self._host is not None:
            raise NotImplementedError(
                "Expected all parameters when the optimizer is made, got another group."
            )
        super().add_param_group(param_group)

    def __getstate__(self) -> NoReturn:
        raise TypeError(
            "Expected state_dict() to be used, got an attempt to copy or pickle an offloaded "
            "optimizer."
        )

    # Building

    @property
    def _buckets(self) -> Sequence[_Bucket]:
        return () if self._host is None else self._host.buckets

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory on this rank: main weights, AdamW's moments, gradients and weights
        on their way.
        """
        return 0 if self._host is None else self._host.nbytes

    def host_bytes_by_state(self) -> dict[str, int]:
        """Bytes of host memory by what they are for; what aligns an array counts with it.

        The sum is `host_bytes`, and the states of other optimizers than AdamW, as far as there are
        any yet.
        """
        if self._host is None:
            return {}
        self.synchronize()
        by_state = dict(self._host.nbytes_by_state)
        for bucket in self._buckets:
            for name, nbytes in bucket.update.own_nbytes().items():
                by_state[name] = by_state.get(name, 0) + nbytes
        return by_state

    @property
    def device_optimizer(self) -> torch.optim.Optimizer | None:
        """What steps the device side; None if everything is on the host."""
        return self._device_optimizer

    def holds(self, parameter: torch.Tensor) -> bool:
        """Whether a parameter is updated in host memory."""
        return id(parameter) in self._slots

    def _make_lanes(self, overlaps: bool, pins_grads: bool) -> None:
        if overlaps:
            self._d2h: Lane = self._device.lane("optimizer d2h")
            if self._device.pins_host_memory and not pins_grads:
                self._d2h = IssuingLane(self._device.host_lane("optimizer d2h issue"), self._d2h)
            self._update_lane: Lane = self._device.host_lane("optimizer host")
            self._h2d: Lane = self._device.lane("optimizer h2d")
        else:
            self._d2h = self._update_lane = self._h2d = InlineLane(self._device)

    def _make_host_side(
        self,
        links: Sequence[DeviceLink],
        allocator: HostAllocator,
        cls: type[torch.optim.Optimizer],
        adam: HostAdam | None,
        options: dict[str, Any],
    ) -> None:
        allocator.allocate()
        buckets = []
        for link in links:
            arrays = allocator.arrays(link)
            link.adopt(arrays.main_weight, self)
            update: HostUpdate
            if adam is None:
                update = TorchUpdate(arrays, cls, options, allocator.widened())
            else:
                update = FlatAdam(
                    arrays, *allocator.moments(link), adam, options.get("adam_w_mode", True)
                )
            buckets.append(_Bucket(arrays, update, self._timings, self.use_decoupled_grad))
            if self._fetches_early:
                buckets[-1].fetch_early(self._d2h)
        # What `adopt` has begun to copy.
        self._device.event().synchronize()
        self._host = _Host(allocator.nbytes, allocator.nbytes_by_state, buckets)
        # What the lanes work on must outlast their work. At the program's end nothing is given
        # back, and a lane may wait for a peer that is gone.
        weakref.finalize(
            self, _release, (self._update_lane, self._d2h, self._h2d), self._host
        ).atexit = False
        self._slots = {id(s.parameter): (b, n) for b in buckets for n, s in enumerate(b.link.slots)}

    def _make_device_side(
        self,
        units: Sequence[Unit],
        cls: type[torch.optim.Optimizer],
        options: dict[str, Any],
        fused_options: dict[str, Any],
    ) -> None:
        if not units:
            return
        if is_flat_adam(cls, options):
            cls = FusedAdam
            options = {
                name: value for name, value in options.items() if name in ADAM_OPTIONS
            } | fused_options
        mine = {id(parameter) for unit in units for parameter in unit.parameters}
        known = defaults_of(cls, options)
        groups = [
            {name: value for name, value in group.items() if name in known}
            | {"params": [parameter for parameter in group["params"] if id(parameter) in mine]}
            for group in self.param_groups
        ]
        self._device_optimizer = cls(groups, **options)
        if isinstance(self._device_optimizer, FusedAdam):
            self._device_optimizer.init_state()
        elif any(unit.groups for unit in units):
            fully_shard_optimizer(self._device_optimizer)

    # A step

    def _step_inputs(self) -> StepInputs:
        return StepInputs.of(self.param_groups, self.use_decoupled_grad, self._revision)

    def _wait_until_free(self) -> None:
        """Waits until nobody updates the host side, or reads it."""
        self.synchronize()
        for bucket in self._buckets:
            for read in bucket.take_reads():
                read.synchronize()

    def _check_gradient(self, parameter: nn.Parameter, gradient: torch.Tensor) -> None:
        found = difference(gradient, parameter)
        if found is None and (
            gradient.layout is not torch.strided or not gradient.is_floating_point()
        ):
            found = Difference(
                "a dense, floating-point tensor", f"{gradient.layout}, {gradient.dtype}"
            )
        if found is None and gradient.device != parameter.device:
            found = Difference(str(parameter.device), str(gradient.device))
        if found is None and id(parameter) in self._slots:
            # A gradient that travelled in a narrower dtype than it has would be another one.
            accepted = self._slots[id(parameter)][0].link.accepted_grad_dtypes
            if gradient.dtype not in accepted:
                found = Difference(" or ".join(map(str, accepted)), str(gradient.dtype))
        if found is not None:
            raise ValueError(
                f"Expected a gradient of {found.expected} for a parameter of shape "
                f"{tuple(parameter.shape)}, got "
                f"{found.got}."
            )

    def _begin(
        self, step: _BucketStep, grad_scale: float, now: Event, timings: StepTimings | None
    ) -> Event:
        """Queues a bucket's step. Answers the event after which its gradients have been read."""
        bucket, prepared, gradients = step
        link, arrays = bucket.link, bucket.arrays
        slots = [slot for slot, _ in gradients]

        def fetch() -> None:
            link.keep_main_weight(arrays.main_weight, slots)
            link.fetch(arrays.grad, gradients)

        prepared.begin()
        reads = bucket.take_reads()
        # Main weights that are not the parameters themselves may be taken over from these, and so
        # written to.
        before_fetch = [now] if isinstance(link, GroupLink) else [now, *reads]
        fetched = bucket.fetch(self._d2h, _timed(timings, D2H, fetch), before_fetch)
        h2d = self._h2d
        work = _timed(timings, HOST, partial(prepared.work, grad_scale), prepared.nbytes)
        send = _timed(timings, H2D, lambda: link.send(arrays.weight, slots))

        def update() -> Event:
            work()
            # Only after the backward, which has used the weights that are now written over.
            return h2d.enqueue(send, after=[now])

        bucket.sent = relay(self._update_lane, update, after=[fetched, *reads])
        if isinstance(link, GroupLink):
            if timings is None:
                link.group.delivery.announce(bucket.sent)
            else:
                link.group.delivery.announce(
                    timings.awaited(bucket.sent), before_use=partial(timings.wait, bucket.sent)
                )
        return fetched

    def _plan_on_device(self) -> FusedStep | None:
        optimizer = self._device_optimizer
        if optimizer is None:
            return None
        for own, group in zip(optimizer.param_groups, self.param_groups, strict=True):
            # FusedAdam refuses options that it cannot honour; other classes share groups with
            # options of the host's.
            names = group if isinstance(optimizer, FusedAdam) else own
            own.update(
                {name: group[name] for name in names if name not in IDENTITIES and name in group}
            )
        return optimizer.plan_step() if isinstance(optimizer, FusedAdam) else None

    def _step_on_device(self, grad_scale: float, planned: FusedStep | None) -> None:
        optimizer = self._device_optimizer
        if optimizer is None:
            return
        if isinstance(optimizer, FusedAdam):
            optimizer.step(grad_scale=grad_scale, planned=planned)
            return
        if grad_scale != 1:
            parameters = [
                parameter for group in optimizer.param_groups for parameter in group["params"]
            ]
            scale_grads(parameters, torch.tensor(grad_scale, dtype=torch.float64))
        optimizer.step()

    # States

    def _collect_states(self) -> None:
        # A state of nothing says that there is an optimizer to PyTorch's helpers, which would step
        # one that has none.
        states: dict[torch.Tensor, Any] = {
            slot.parameter: bucket.update.states(index)
            for bucket in self._buckets
            for index, slot in enumerate(bucket.link.slots)
        }
        if self._device_optimizer is not None:
            states.update(self._device_optimizer.state)
        for parameter in set(self._state).difference(states):
            del self._state[parameter]
        self._state.update(states)

    def _load_fused_states(
        self, optimizer: FusedAdam, saved: Mapping[torch.Tensor, Mapping[str, Any]]
    ) -> None:
        packed: list[dict[str, Any]] = optimizer.state_dict()["param_groups"]
        numbers = {
            parameter: number
            for group, own in zip(optimizer.param_groups, packed, strict=True)
            for parameter, number in zip(group["params"], own["params"], strict=True)
        }
        states = {
            numbers[parameter]: value
            for parameter, value in saved.items()
            if value and parameter in numbers
        }
        optimizer.load_state_dict({"state": states, "param_groups": packed})


def _release(lanes: Sequence[Lane], host: _Host) -> None:
    """Lets go of the host side once the lanes have done their work, in whichever thread the
    optimizer was let go of.
    """
    if is_lane_thread():
        threading.Thread(target=_close_all, args=(lanes, host), daemon=True).start()
    else:
        _close_all(lanes, host)


def _close_all(lanes: Sequence[Lane], host: _Host) -> None:
    for lane in lanes:
        lane.close()
    del host  # until here


def _timed(
    timings: StepTimings | None, lane: str, work: Callable[[], object], host_bytes: int = 0
) -> Callable[[], object]:
    return work if timings is None else timings.timed(lane, work, host_bytes)


def _plan_bucket(bucket: _Bucket, options: Mapping[int, Options]) -> _BucketStep | None:
    """A bucket's step, if one of its parameters has a gradient."""
    stepped = bucket.stepped()
    if not stepped:
        return None
    slots = [(index, slot) for index, slot, _ in stepped]
    prepared = bucket.update.prepare(slots, lambda parameter: options[id(parameter)])
    return _BucketStep(bucket, prepared, [(slot, gradient) for _, slot, gradient in stepped])
