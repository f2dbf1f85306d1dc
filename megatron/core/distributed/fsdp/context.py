"""`FsdpContext`: state shared by the sharded modules of one model: lanes, the order in which
modules run, reductions in flight.

Modules belong to the model. The context refers to them weakly, so deleting the model frees them.
"""

from __future__ import annotations

import itertools
import weakref
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch._compile import _disable_dynamo
from torch.autograd import Variable

from megatron.core.device import Device
from megatron.core.distributed.fsdp.collective_history import CollectiveHistory, compare, digest_of
from megatron.core.distributed.fsdp.optimizer_hooks import follow_optimizers
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.issued_collectives import issuing
from megatron.core.lanes import Event, Lane
from megatron.core.timeline import AnyTimeline


class ScheduledModule(Protocol):
    """The interface of modules that a context needs."""

    parameter_groups: tuple[FsdpParameterGroup, ...]

    @property
    def expects_backward(self) -> bool:
        """Whether a backward of the module is expected."""

    def finish_backward(self) -> None:
        """Frees full weights that a backward has left, and reduces its gradients."""

    def abandon_backward(self) -> None:
        """Forgets a backward that has failed, and its gradients."""


class _InFlight(NamedTuple):
    """A reduction in flight."""

    groups: Sequence[FsdpParameterGroup]
    event: Event


class _Backward:
    """A running backward.

    Autograd holds the only reference, as a callback at the end of the backward. If the object is
    freed without having been called, the backward has failed.
    """

    def __init__(self, context: FsdpContext) -> None:
        self._context = weakref.ref(context)

    @_disable_dynamo  # `backward()` may be called inside of a compiled function
    def finish(self) -> None:
        context = self._context()
        if context is not None:
            context.finish_backward()


class FsdpContext:
    """State shared by the modules of one model. Made by `fully_shard_context`, passed to
    `microbatch`.

    Attributes:
        device: of the compute weights.
        gather_lane, reduce_lane: where collectives run; the same lane on the CPU, and with
            `unify_communication_stream`.
        is_last_microbatch: whether gradients are reduced over deferred axes too; see `microbatch`.
        is_open: whether modules may still join and the first forward ends that, since no
            `fully_shard_context` marks the last sharded module.
        is_finalized: whether all modules are known.
        num_passes: how often a root has started its forward.
        num_backwards: how many backwards have reached a module.
        histories: of the collectives of this model, and of others over the same process groups.
        lanes_issue_at_once: whether queueing work on a lane blocks until the work before it has
            been issued.
    """

    def __init__(
        self, device: Device, unify_communication_stream: bool, *, is_open: bool = False
    ) -> None:
        self.device = device
        # Now, since the first forward may be inside of an optimizer's step, in its closure.
        follow_optimizers(self)
        self.is_open = is_open
        self.is_finalized = False
        self.is_last_microbatch = True
        self.num_passes = self.num_backwards = 0
        self.lanes_issue_at_once = device.is_accelerator
        self.gather_lane = self.reduce_lane = self._lane("fsdp communication")
        if device.runs_collectives_side_by_side and not unify_communication_stream:
            self.reduce_lane = self._lane("fsdp reduction")

        self._modules: list[weakref.ref[Any]] = []  # in the order of their construction
        self._groups: list[weakref.ref[FsdpParameterGroup]] = []
        # Also of groups that this rank's garbage collector has freed: ranks collect at other times.
        self.histories: list[CollectiveHistory] = []
        self._forward_order: list[weakref.ref[Any]] = []
        self._backward_order: list[weakref.ref[Any]] = []
        self._places: dict[int, tuple[int, int]] = {}  # by id: in the two orders
        self._roots: set[int] = set()  # by id

        self._guessed: list[weakref.ref[Any]] = []  # gathered or kept, to be used next
        self._recomputed: weakref.ref[Any] | None = None
        self._in_flight: deque[_InFlight] = deque()
        self._backward: weakref.ref[_Backward] | None = None

    # Construction

    def _lane(self, name: str) -> Lane:
        # Shared with other contexts, whose collectives run over the same process groups and must
        # keep one order. Urgent, since the next kernels of the computation wait for them and they
        # leave most of the device to concurrent kernels.
        return self.device.lane(name, is_shared=True, is_urgent=True)

    @property
    def forward_order(self) -> list[Any]:
        """The modules in the order in which forward is expected to enter them."""
        return _alive(self._forward_order)

    @property
    def backward_order(self) -> list[Any]:
        """The modules in the order in which backward is expected to enter them."""
        return _alive(self._backward_order)

    def add_module(self, module: nn.Module) -> None:
        """Takes a module that has just been sharded."""
        self._modules.append(weakref.ref(module))

    def add_group(self, group: FsdpParameterGroup) -> None:
        """Takes a new group."""
        self._groups.append(weakref.ref(group))
        self._add_histories(group.histories)
        if self.reduce_lane is not self.gather_lane and group.gradients is not None:
            group.gradients.reduce_alongside_gathers()

    def absorb(self, other: FsdpContext) -> None:
        """Takes over another open context, once a module that contains the modules of both is
        sharded.
        """
        for module in _alive(other._modules):
            module.context = self
            self.add_module(module)
        self._groups += other._groups
        self._add_histories(other.histories)

    def _add_histories(self, others: Iterable[CollectiveHistory]) -> None:
        self.histories = list(dict.fromkeys([*self.histories, *others]))

    def finalize(self) -> None:
        """Fixes the order in which modules run, once all are sharded.

        ValueError, on all ranks, if ranks that replicate main weights hold different ones, or
        shards of different ones.
        """
        modules = _alive(self._modules)
        managed = {id(module) for module in modules}
        roots = _roots_of(modules)
        self._roots = {id(root) for root in roots}
        for module in modules:
            if module.reshard_after_forward is None:
                module.reshard_after_forward = not self.is_root(module)

        forward = [module for root in roots for module in root.modules() if id(module) in managed]
        backward = [module for root in reversed(roots) for module in _backward_order(root, managed)]
        self._forward_order = [weakref.ref(module) for module in forward]
        self._backward_order = [weakref.ref(module) for module in backward]
        backward_places = {id(module): place for place, module in enumerate(backward)}
        self._places = {
            id(module): (place, backward_places[id(module)]) for place, module in enumerate(forward)
        }

        self.name_groups()
        _check_replicas(_alive(self._groups))
        self.is_finalized = True

    def name_groups(self) -> None:
        """Names groups and their parameters from the outermost modules that have been sharded."""
        modules = _alive(self._modules)
        _name_groups(_roots_of(modules), {id(module) for module in modules})

    def is_root(self, module: nn.Module) -> bool:
        """Whether no other module of the context contains this one; known once all are sharded."""
        return id(module) in self._roots

    # Weights

    def enter_forward(self, module: Any) -> None:
        """A module is about to run, not as part of a backward.

        RuntimeError inside the `fully_shard_context`.
        """
        self.require_complete()
        # A backward that ended well has removed itself, so this one has failed.
        if self._backward is not None:
            self.abandon_backward()
        self.num_passes += self.is_root(module)

    def require_complete(self) -> None:
        """Ends the construction of an open context.

        RuntimeError inside the `fully_shard_context`.
        """
        if self.is_open and not self.is_finalized:
            self.finalize()
        if not self.is_finalized:
            raise RuntimeError(
                "Expected forward after the last fully_shard. Exit fully_shard_context first."
            )

    def unshard_for_forward(self, module: Any) -> None:
        """Gathers the full weights of a module and starts to gather the weights of the next one, or
        of the modules in its `forward_prefetch`.
        """
        place = self._places[id(module)][0] + 1
        guess = self._forward_order[place : place + 1]
        self._unshard(module, guess, module.forward_prefetch)

    def unshard_for_backward(self, module: Any) -> None:
        """As `unshard_for_forward`. Modules that expect no backward are not next: in a loss that
        uses a part of the model, their weights would be gathered in vain.
        """
        expecting = (
            reference
            for reference in self._backward_order[self._places[id(module)][1] + 1 :]
            if (other := reference()) is not None
            and other.expects_backward
            and other.unshard_in_backward
        )
        guess = itertools.islice(expecting, 1)
        self._unshard(module, guess, module.backward_prefetch, module.unshard_in_backward)

    def unshard_for_recomputation(self, module: Any) -> None:
        """Gathers the full weights of a module that runs again as part of a backward."""
        if self._recomputed is not None and self._recomputed() is not module:
            self.reshard_recomputed()
        self._unshard(module, [])

    def keep_for_next(self, module: Any) -> None:
        """Keeps the full weights of a module, which most likely runs again before any other."""
        self._guessed.append(weakref.ref(module))

    def keep_recomputed(self, module: Any) -> None:
        """Keeps the full weights of a recomputed module, whose backward most likely comes next."""
        self._recomputed = weakref.ref(module)

    def reshard_recomputed(self) -> None:
        """Frees weights that were kept for a backward which did not come next, unless it is under
        way.
        """
        reference, self._recomputed = self._recomputed, None
        module = None if reference is None else reference()
        if module is not None and module.is_resting:
            reshard(module)

    def _unshard(
        self,
        module: Any,
        guess: Iterable[weakref.ref[Any]],
        told: Sequence[weakref.ref[Any]] = (),
        is_needed: bool = True,
    ) -> None:
        if is_needed:
            self.gather(module.parameter_groups)

        # The memory of a wrong guess is freed before more is taken.
        guessed, self._guessed = self._guessed, []
        for wrong in _alive(guessed):
            if wrong is not module and wrong.is_resting:
                reshard(wrong)

        for reference in told or guess:
            other = reference()
            if other is not None and not other.is_unsharded:
                self._prefetch(other.parameter_groups)
                if not told:
                    self._guessed.append(reference)

        # Last: the prefetch is queued by now, and runs while this thread waits and computes.
        if is_needed:
            for group in module.parameter_groups:
                group.wait_unsharded()

    def gather(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Starts to gather the full weights of a unit's groups, together."""
        if groups:
            groups[0].unshard(self.gather_lane, groups[1:])

    def _prefetch(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """Starts to gather the full weights of groups that are used after the module about to run.

        [Note: deliveries] Weights that an optimizer updates in host memory are delivered by work
        that the host has yet to issue, and a stream can wait only for work that has been issued.
        Issuing such a gather now would block this thread, so the kernels of the module about to run
        would come late and the device would idle. The gather is issued when its own module is
        reached instead, right after these kernels. Its memory is taken now, and with it the event
        after which the gather may start, so on the device it still overlaps with them.

        Why not look whether the delivery is done? That differs from rank to rank, and so would the
        order in which ranks issue their collectives. Whether there is one is the same everywhere.
        """
        is_late = self.lanes_issue_at_once and any(g.delivery.is_announced for g in groups)
        for group in groups if is_late else ():
            group.reserve()
        if not is_late:
            self.gather(groups)

    # Gradients

    def enter_backward(self) -> None:
        """A backward has reached a module. At its end, the context cleans up."""
        if self._backward is not None and self._backward() is None:
            self.abandon_backward()  # an earlier one, which failed
        if self._backward is None:
            backward = _Backward(self)
            self._backward = weakref.ref(backward)
            self.num_backwards += 1
            Variable._execution_engine.queue_callback(backward.finish)

    def make_room(self, group: FsdpParameterGroup) -> None:
        """Waits until a group may collect: its last reduction is done, and at most one other unit's
        is in flight, which bounds the memory of whole gradients.
        """
        while len(self._in_flight) > 1 or any(
            group in in_flight.groups for in_flight in self._in_flight
        ):
            self._finish_oldest()

    def reduce(self, groups: Sequence[FsdpParameterGroup], syncs: bool) -> None:
        """Starts to reduce the gradients that a unit's groups have collected, if any, together.

        Args:
            syncs: over deferred axes too, if this is a last microbatch.
        """
        if not groups:
            return
        for group in groups:
            if group.reduction_takes_memory:
                self.make_room(group)
        is_last = self.is_last_microbatch and syncs
        event = groups[0].reduce(self.reduce_lane, is_last, groups[1:])
        self._in_flight.append(_InFlight(groups, event))

    def _finish_oldest(self) -> None:
        groups, event = self._in_flight[0]
        groups[0].wait_reduced(event)
        self._in_flight.popleft()
        for group in groups:
            group.release_gradients()

    def finish_backward(self) -> None:
        """Cleans up at the end of a backward, until only reduced gradients are left of it."""
        for module in self.backward_order:
            module.finish_backward()
        while self._in_flight:
            self._finish_oldest()
        self._forget_backward()

    def abandon_backward(self) -> None:
        """Drops the gradients of a backward that has raised: they are incomplete."""
        while self._in_flight:
            self._finish_oldest()
        for module in self.backward_order:
            module.abandon_backward()
        self._forget_backward()

    def _forget_backward(self) -> None:
        self._recomputed = self._backward = None
        self._guessed = []

    def record_to(self, timeline: AnyTimeline) -> None:
        """From now on, shows a timeline gathers, reductions, and waits for them."""
        for group in _alive(self._groups):
            group.timeline = timeline

    # Agreement

    def check_agreement(self) -> None:
        """RuntimeError, on all ranks, unless all have issued the same collectives, of the same
        gradients, since the last comparison. All ranks of the model call it together.

        Norms of gradients and every optimizer's step do it for the parameters that they read. Call
        it yourself where weights are updated in another way, and for a frozen model over a mesh
        that no optimizer's parameters use.
        """
        compare(self.histories, of_all=True)

    @property
    def digest(self) -> int:
        """See `digest_of`."""
        return digest_of(self.histories)

    def compare_digests(self, digests: Sequence[float]) -> None:
        """As `check_agreement`, from the digests of all ranks, which cost no collective if they are
        the same.
        """
        if len(set(digests)) > 1:
            self.check_agreement()
        for history in self.histories:
            history.forget()

    def check_replicas(self, groups: Sequence[FsdpParameterGroup]) -> None:
        """ValueError, on all ranks, if ranks that replicate main weights have different ones."""
        check = partial(_check_replicas, groups)
        self.gather_lane.enqueue(check, [self.device.event()]).wait()


def reshard(module: ScheduledModule) -> None:
    """Frees the full weights of a module."""
    for group in module.parameter_groups:
        group.reshard()


def is_backward_running() -> bool:
    """Whether this thread runs inside a backward."""
    return torch._C._current_graph_task_id() != -1


def _check_replicas(groups: Sequence[FsdpParameterGroup]) -> None:
    """ValueError unless ranks along axes that do not cut main weights hold the same ones, and the
    others have shards of the same initial ones, as far as that is known.
    """
    axes = {
        (group.mesh, axis): [other for other in groups if other.mesh == group.mesh]
        for group in groups
        for axis in range(group.mesh.ndim)
        if group.mesh.size(axis) > 1
    }
    differs = torch.zeros(len(groups), dtype=torch.int32)
    for (mesh, axis), compared in axes.items():
        sums = torch.stack(
            [
                group.checksum() if group.is_replicated(axis) else group.initial_checksum()
                for group in compared
            ]
        )
        all_sums = [torch.empty_like(sums) for _ in range(mesh.size(axis))]
        with issuing("all-gather of the weights' checksums", sums):
            dist.all_gather(all_sums, sums, group=mesh.get_group(axis))

        for group, values in zip(compared, torch.stack(all_sums, dim=1).tolist(), strict=True):
            is_known = group.is_replicated(axis) or 0 not in values
            if is_known and len(set(values)) > 1:
                differs[groups.index(group)] = 1

    # Along one of several axes only some ranks see it.
    for mesh, axis in axes if len(axes) > 1 else ():
        differs = differs.to(sums.device)
        with issuing("all-reduce of whether weights differ", differs):
            dist.all_reduce(differs, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    for group, has_others in zip(groups, differs.tolist(), strict=True):
        if has_others:
            raise ValueError(
                "Expected the same weights on every rank, got different ones for "
                f"{group.name or 'the model'}: seed all ranks alike, or load one rank's weights on "
                "the others."
            )


def _roots_of(modules: Sequence[Any]) -> list[Any]:
    """The modules that no other one of them contains."""
    inner = {id(child) for module in modules for child in module.modules() if child is not module}
    return [module for module in modules if id(module) not in inner]


def _name_groups(roots: Sequence[Any], managed: set[int]) -> None:
    """Names groups and their parameters; with several roots, after the root's class and number."""
    for number, root in enumerate(roots):
        sharded = type(root).__mro__[root._orig_cls_mro_index]
        prefix = "" if len(roots) == 1 else f"{sharded.__name__}[{number}]"
        names = {id(module): name for name, module in root.named_modules(prefix=prefix)}
        for module in root.modules():
            for group in module.parameter_groups if id(module) in managed else ():
                group.name = names[id(module)]
                for index, parameter in enumerate(group.fsdp_parameters):
                    owner, name = parameter.owners[0]
                    path = names.get(id(owner()))
                    group.names[index] = f"{path}.{name}" if path else name


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [module for reference in references if (module := reference()) is not None]


def _backward_order(root: nn.Module, managed: set[int]) -> Iterator[nn.Module]:
    """The root, then the modules in it, last child first."""
    if id(root) in managed:
        yield root
    for child in reversed(list(root.children())):
        yield from _backward_order(child, managed)
