"""`GroupPlan`: what decides about a parameter group's buffers, and the bytes that they take.

    buffer            placements   bytes at rest                       more in use
    compute weights   parameter    parameter x weight dtype, and the   in_use x weight dtype, where
                                   scales of codes                     they are gathered
    main weights      optimizer    optimizer x main dtype, or none:    none
                                   see `has_own_main`
    gradients         optimizer    optimizer x gradient dtype, from    in_use x sent dtype, and the
                                   the backward until they are         sums of a deferred reduction
                                   cleared

Every rank's piece of a buffer is as long as any other's, so the sizes hold for each rank of the
mesh. A plan needs neither memory nor process groups. `FsdpParameterGroup` makes its buffers of one,
and callers that need the sizes before use one, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.distributed.tensor import Partial
from torch.distributed.tensor.placement_types import Placement

from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.placement import Placements, sharded_axes
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy, known
from megatron.core.low_precision.recipes import Recipe
from megatron.core.low_precision.scaling import WeightQuantizer

THE_MODEL = "the model"  # the name of the unit that has no path


@dataclass(frozen=True)
class ParameterPlan:
    """One physical parameter of a group.

    Attributes:
        fqns: its names, from the module of its unit; a tied parameter has several.
        matrix_rows: rows of one expert's matrix, of a parameter with those of several; None: it is
            one matrix.
    """

    fqns: tuple[str, ...]
    shape: tuple[int, ...]
    matrix_rows: int | None = None


@dataclass(frozen=True)
class GroupPlan:
    """Parameters that share buffers, and what decides about these.

    Attributes:
        parameters: in the order of the layout's tensors.
        mesh_shape: ranks along each axis of `placements`.
        policy: resolved.
        grad_divisor: divides gradients after they have been averaged over the ranks.
        adds_on_device: whether an accelerator's backend adds gradients up over ranks, in the dtype
            in which it gets them. On the CPU this engine does, in fp32.
        offload: whether the main weights start in host memory, unless they are frozen.
        recipe: of the layers whose weights are kept and gathered as codes; None: compute weights
            have their own dtype.
    """

    parameters: tuple[ParameterPlan, ...]
    layout: GlobalLayout
    placements: Placements
    mesh_shape: tuple[int, ...]
    policy: MixedPrecisionPolicy
    requires_grad: bool
    grad_divisor: float
    offload: OffloadPolicy
    adds_on_device: bool = False
    recipe: Recipe | None = None

    @property
    def is_on_host(self) -> bool:
        """Whether the main weights start in host memory."""
        return self.offload.main_weights_on_host and self.requires_grad

    @property
    def dtype(self) -> torch.dtype:
        """Of the compute weights."""
        return known(self.policy.compute_dtype)

    @property
    def weight_dtype(self) -> torch.dtype:
        """Of the buffers of compute weights: that of their codes, if they are kept as codes."""
        return self.dtype if self.recipe is None else self.recipe.weight.format.dtype

    @property
    def weights_per_element(self) -> int:
        """Of the buffers of compute weights: codes of four bits are two in a byte."""
        return 1 if self.recipe is None else self.recipe.weight.format.per_byte

    @cached_property
    def weight_layout(self) -> GlobalLayout:
        """Of the buffers of compute weights."""
        num = self.weights_per_element
        return self.layout if num == 1 else self.layout.packed(num)

    def weight_numel(self, numel: int) -> int:
        """Elements of a buffer of so many compute weights."""
        return numel // self.weights_per_element

    @property
    def main_dtype(self) -> torch.dtype:
        """Of the main weights."""
        policy, is_trained = self.policy, self.requires_grad
        return known(policy.main_params_dtype if is_trained else policy.frozen_params_dtype)

    @property
    def grad_dtype(self) -> torch.dtype:
        """Of the gradients that the optimizer reads."""
        return known(self.policy.main_grads_dtype)

    @property
    def comm_dtype(self) -> torch.dtype:
        """In which ranks add gradients up."""
        return known(self.policy.grad_comm_dtype)

    @cached_property
    def skips_reduction(self) -> bool:
        """Whether autograd's gradients are added to the main ones as they are: no other rank has
        gradients to add, and they are not rounded to a narrower dtype.
        """
        axes = zip(self.mesh_shape, self.placements.is_kept, strict=True)
        is_alone = all(is_kept or size == 1 for size, is_kept in axes)
        widest = max(self.dtype.itemsize, self.grad_dtype.itemsize)
        return is_alone and self.comm_dtype.itemsize >= widest

    @property
    def sent_dtype(self) -> torch.dtype:
        """Of whole gradients. Where a device adds them up, autograd's are cast as they are
        collected. Elsewhere it is the narrower dtype, for widening would only send more.
        """
        if self.adds_on_device:
            return self.comm_dtype
        return self.comm_dtype if self.comm_dtype.itemsize < self.dtype.itemsize else self.dtype

    @property
    def sent_sums_dtype(self) -> torch.dtype:
        """Of partial sums, where a reduction over some axes is deferred."""
        is_narrower = self.comm_dtype.itemsize < self.grad_dtype.itemsize
        return self.comm_dtype if self.adds_on_device or is_narrower else self.grad_dtype

    @property
    def has_own_main(self) -> bool:
        """Whether main weights have memory apart from that of the compute weights."""
        return self.is_on_host or self.main_dtype != self.weight_dtype

    @property
    def is_gathered(self) -> bool:
        """Whether compute weights in use are another buffer than the weights at rest."""
        return self._numel(self.placements.parameter) < self.layout.block_numel

    @property
    def optimizer_numel(self) -> int:
        """Elements of each buffer that the optimizer works on, padding included."""
        return self._numel(self.placements.optimizer)

    # At rest

    @property
    def compute_nbytes(self) -> int:
        """Of the compute weights between uses."""
        numel = self._numel(self.placements.parameter)
        return self.weight_numel(numel) * self.weight_dtype.itemsize + self.scales_nbytes

    @cached_property
    def quantizers(self) -> tuple[WeightQuantizer, ...]:
        """Of each weight; without codes none."""
        if self.recipe is None:
            return ()
        return tuple(self.recipe.weight_quantizer(own.matrix_rows) for own in self.parameters)

    @cached_property
    def maxima_shapes(self) -> tuple[tuple[int, int], ...]:
        """The shapes of the maxima of each weight in use; without codes none."""
        return tuple(
            quantizer.maxima_shape(self.shape_in_use(index))
            for index, quantizer in enumerate(self.quantizers)
        )

    def shape_in_use(self, index: int) -> tuple[int, int]:
        """The shape of a matrix as the modules of a rank use it."""
        return self.layout.block_rows(index), self.layout.tensor_shapes[index][1]

    @cached_property
    def scales_nbytes(self) -> int:
        """Of the scales of all codes, which every rank has, and of maxima for histories."""
        pairs = zip(self.quantizers, self.maxima_shapes, strict=True)
        maxima = [(own, torch.empty(shape, device="meta")) for own, shape in pairs]
        has_history = self.recipe is not None and self.recipe.history is not None
        return sum(own.scales_of(m)[1].nbytes + has_history * m.nbytes for own, m in maxima)

    @property
    def main_nbytes(self) -> int:
        """Of the main weights, apart from compute weights, on either side."""
        return self.optimizer_numel * self.main_dtype.itemsize if self.has_own_main else 0

    @property
    def grad_nbytes(self) -> int:
        """Of the gradients that the optimizer reads."""
        return self.optimizer_numel * self.grad_dtype.itemsize if self.requires_grad else 0

    # In use

    @property
    def whole_weights_nbytes(self) -> int:
        """Of the weights in use, where they are another buffer than the weights at rest."""
        if not self.is_gathered:
            return 0
        numel = self.weight_numel(self._numel(self.placements.in_use))
        return numel * self.weight_dtype.itemsize

    @property
    def whole_grads_nbytes(self) -> int:
        """Of the gradients as a backward leaves them."""
        if not self.requires_grad:
            return 0
        return self._numel(self.placements.in_use) * self.sent_dtype.itemsize

    @property
    def partial_grads_nbytes(self) -> int:
        """Of the sums over microbatches that wait for a deferred reduction."""
        if not self.requires_grad or not self.defers_reduction:
            return 0
        return self._numel(self.placements.gradient) * self.grad_dtype.itemsize

    @property
    def reduction_nbytes(self) -> int:
        """Of temporary copies in the last reduction of a step: partial sums, cast to the dtype in
        which they are sent.
        """
        if not self.partial_grads_nbytes or self.sent_sums_dtype == self.grad_dtype:
            return 0
        return self._numel(self.placements.gradient) * self.sent_sums_dtype.itemsize

    @property
    def defers_reduction(self) -> bool:
        """Whether gradients are reduced over some axis only after the last microbatch."""
        return self.placements.defers_reduction and not self.skips_reduction

    @property
    def defers_all_axes(self) -> bool:
        """Whether a microbatch's gradients are reduced over no axis before the last one's."""
        return all(
            is_kept or isinstance(placement, Partial)
            for placement, is_kept in zip(
                self.placements.gradient, self.placements.is_kept, strict=True
            )
        )

    # Over the wire

    @property
    def gathered_nbytes(self) -> int:
        """That this rank receives where the weights are gathered once: at every use if they are
        `is_gathered`, otherwise at the first use after a step.
        """
        begin = self.placements.parameter if self.is_gathered else self.placements.optimizer
        whole = self._numel(self.placements.in_use)
        return self.weight_numel(whole - self._numel(begin)) * self.weight_dtype.itemsize

    @property
    def maxima_numel(self) -> int:
        """Elements of the maxima of all weights, padded so that the ranks can divide them."""
        numel, ranks = sum(map(math.prod, self.maxima_shapes)), math.prod(self.mesh_shape)
        return -(-numel // ranks) * ranks

    @cached_property
    def divided_axes(self) -> list[int]:
        """The mesh axes along which ranks update different rows of a weight in use, and reduce the
        maxima of codes.
        """
        cuts = zip(
            sharded_axes(self.placements.optimizer),
            self.placements.is_kept,
            self.mesh_shape,
            strict=True,
        )
        return [
            axis
            for axis, (cut, is_kept, size) in enumerate(cuts)
            if cut and not is_kept and size > 1
        ]

    @property
    def maxima_nbytes(self) -> int:
        """That this rank sends once a step, for the maxima of codes."""
        numel, sizes = self.maxima_numel, [self.mesh_shape[axis] for axis in self.divided_axes]
        return sum(2 * numel * torch.float32.itemsize * (size - 1) // size for size in sizes)

    @property
    def reduced_nbytes(self) -> int:
        """That this rank sends where the gradients of one microbatch are reduced."""
        sent = self.sent_dtype.itemsize
        ranks = self._num_ranks(is_deferred=False)
        whole = self._numel(self.placements.in_use)
        return whole * (ranks - 1) // ranks * sent if self.requires_grad else 0

    @property
    def reduced_last_nbytes(self) -> int:
        """That this rank sends once a step, over the axes whose reduction is deferred."""
        if not self.partial_grads_nbytes:
            return 0
        ranks = self._num_ranks(is_deferred=True)
        # A replicated result travels twice: reduced in parts, which are then gathered.
        is_cut = self.optimizer_numel < self._numel(self.placements.gradient)
        numel = self._numel(self.placements.gradient)
        times = 1 if is_cut else 2
        return times * numel * self.sent_sums_dtype.itemsize * (ranks - 1) // ranks

    def _num_ranks(self, *, is_deferred: bool) -> int:
        """Along the axes that are reduced over, in each microbatch or after the last one."""
        axes = zip(self.mesh_shape, self.placements.is_kept, self.placements.gradient, strict=True)
        return math.prod(
            size
            for size, is_kept, placement in axes
            if not is_kept and isinstance(placement, Partial) == is_deferred
        )

    def local_numel(self, tensor: int, coordinate: tuple[int, ...]) -> int:
        """Elements of one tensor that the rank at `coordinate` updates, without padding."""
        is_sharded = sharded_axes(self.placements.optimizer)
        piece = self.layout.local_range(self.mesh_shape, is_sharded, coordinate)
        rows = sum(chunk.num_rows for chunk in self.layout.chunks(piece) if chunk.tensor == tensor)
        shape = self.layout.tensor_shapes[tensor]
        return rows * (self.layout.numel(tensor) // shape[0])

    def rows_by_place(self, coordinate: Sequence[int]) -> list[tuple[range, ...]]:
        """For each parameter the rows that each rank along `divided_axes` updates, the last axis
        running fastest.

        Args:
            coordinate: of one of these ranks.
        """
        is_sharded, axes = sharded_axes(self.placements.optimizer), self.divided_axes
        pieces = []
        for places in itertools.product(*(range(self.mesh_shape[axis]) for axis in axes)):
            own = dict(zip(axes, places, strict=True))
            at = [own.get(axis, place) for axis, place in enumerate(coordinate)]
            pieces.append(self.layout.local_range(self.mesh_shape, is_sharded, at))
        found = []
        for tensor in range(len(self.parameters)):
            chunks = [self.layout.chunk(tensor, piece) for piece in pieces]
            found.append(
                tuple(range(each.first_row, each.first_row + each.num_rows) for each in chunks)
            )
        return found

    def _numel(self, placements: Iterable[Placement]) -> int:
        """Elements of this rank's piece."""
        first = (0,) * len(self.mesh_shape)
        return self.layout.local_range(self.mesh_shape, sharded_axes(placements), first).numel
