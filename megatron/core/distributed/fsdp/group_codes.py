"""Compute weights that are kept as codes of a low-precision format (`--fp8-param-gather`,
`--fp4-param-gather`).

    main weights  --round to the compute dtype-->  maxima of own rows  --MAX over ranks-->  scales
                                            `-----------------------------------------.
                                                                    own rows' codes <-'

Ranks exchange the maxima, a number for each block of elements, and send codes through the gather.
Every rank computes all scales from the same maxima, so no scales are sent. Delayed scaling computes
them from its histories, which record the maxima for later steps. Weights are rounded to
the compute dtype before they are quantized, as they are without codes: both give the same bits.

A module's parameter keeps its shape and the compute dtype, in which autograd gives it gradients,
but it has no memory: each of its elements is the same NaN. Its attribute `quantized` has views of
the codes and the scales, which layers with a recipe compute with.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from megatron.core.distributed.fsdp.aliases import apart
from megatron.core.distributed.fsdp.collectives import Label, combine_maxima
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.group_plan import GroupPlan
from megatron.core.distributed.fsdp.group_weights import WeightBuffers
from megatron.core.low_precision.amax_history import AmaxHistory, Slot
from megatron.core.low_precision.scaling import QuantizedWeight, WeightQuantizer

# Elements that are quantized at a time: on the CPU so few that their copies stay in the caches.
_CHUNK_NUMEL, _DEVICE_CHUNK_NUMEL = 1 << 18, 1 << 22


class OwnRows(NamedTuple):
    """Which rows of a weight as modules use it, of this shape, a rank has."""

    quantizer: WeightQuantizer
    first_row: int
    shape: tuple[int, int]


class GroupCodes:
    """The scales of a group's weights, and how its main weights become codes.

    Attributes:
        scales: of each weight as this rank's modules use it, in the recipe's shape and dtype.
        maxima: of each weight, where a history records them, [matrices, 1] fp32; otherwise None.
        shown_tensors: what parameters show as `quantized`.
    """

    def __init__(
        self,
        plan: GroupPlan,
        weights: WeightBuffers,
        mesh: DeviceMesh,
        histories: Sequence[AmaxHistory | None],
    ) -> None:
        """`histories`: of the layers of each weight, with delayed scaling."""
        assert plan.recipe is not None, "the group's weights are kept as codes"
        self._plan = plan
        self._mesh = mesh
        self._unsharded = weights.unsharded
        device = weights.unsharded.device
        # Along kept axes, a weight in use starts at a later row of the parameter.
        indices = range(len(plan.parameters))
        self._begins = [weights.unsharded.chunk(index).first_row for index in indices]
        self.scales = [
            quantizer.scales_of(torch.zeros(shape, device=device))[1]
            for quantizer, shape in zip(plan.quantizers, plan.maxima_shapes, strict=True)
        ]
        self._histories = histories
        self.maxima = [
            None if history is None else torch.zeros(shape, device=device)
            for history, shape in zip(histories, plan.maxima_shapes, strict=True)
        ]
        self.shown_tensors: list[torch.Tensor] = []

    def placeholder(self, index: int) -> torch.Tensor:
        """A weight in the compute dtype without memory for its elements."""
        # Reading it by mistake gives NaN.
        nan = torch.full((), math.nan, dtype=self._plan.dtype, device=self._unsharded.device)
        return nan.expand(self._plan.shape_in_use(index))

    def show(self, index: int, full: nn.Parameter) -> None:
        """Gives a full parameter the views of its codes and scales."""
        codes = apart(self._unsharded.get_local_tensor(index))
        quantized = QuantizedWeight(codes, apart(self.scales[index]), self.maxima[index])
        full.quantized = quantized  # type: ignore[attr-defined]
        self.shown_tensors += [tensor for tensor in quantized if tensor is not None]

    def quantize(self, main: DBuffer, codes: DBuffer, label: Label) -> torch.Tensor:
        """Writes the codes of this rank's rows, on the device of `codes`. All ranks that divide the
        weights call it. Returns the maxima over these ranks: [maxima_numel] fp32.

        Args:
            main: main weights, on any device.
            codes: for as many rows.
        """
        maxima = torch.zeros(self._plan.maxima_numel, device=codes.device)
        quantizers = self._plan.quantizers
        # Rows are rounded twice rather than kept in between, which would take a shard's memory.
        for index, own in enumerate(self.by_weight(maxima)):
            for rows, first_row, _ in self._parts(index, main, codes):
                quantizers[index].add_maxima(rows, first_row, own)
        self.combine(maxima, label)
        for index, own in enumerate(self.by_weight(self.limits(maxima))):
            multipliers, _ = quantizers[index].scales_of(own)
            for rows, first_row, out in self._parts(index, main, codes):
                quantizers[index].quantize_rows(rows, first_row, multipliers, out)
        return maxima

    def combine(self, maxima: torch.Tensor, label: Label) -> None:
        """Raises maxima to those of all ranks that divide the weights, which call it together."""
        for axis in self._plan.divided_axes:
            combine_maxima(maxima, self._mesh.get_group(axis), label)

    def own_rows(self, index: int, main: DBuffer) -> OwnRows:
        """The rows of a weight that a buffer of this rank has."""
        first_row = main.chunk(index).first_row - self._begins[index]
        return OwnRows(self._plan.quantizers[index], first_row, self._plan.shape_in_use(index))

    def by_weight(self, maxima: torch.Tensor) -> list[torch.Tensor]:
        """Views of flat maxima in the shapes of the weights' maxima."""
        shapes = self._plan.maxima_shapes
        sizes = [math.prod(shape) for shape in shapes]
        parts = maxima[: sum(sizes)].split(sizes)
        return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    def limits(self, maxima: torch.Tensor) -> torch.Tensor:
        """The maxima that scales are computed from, given the maxima of the weights; both flat.
        Without histories these are the same tensor.
        """
        if all(history is None for history in self._histories):
            return maxima
        limits = maxima.clone()
        for history, own in zip(self._histories, self.by_weight(limits), strict=True):
            if history is not None:
                own.copy_(history.chosen_or(Slot.WEIGHT, own))
        return limits

    def set_scales(self, maxima: torch.Tensor) -> None:
        """Computes all scales from the maxima that `quantize` has returned."""
        maxima = maxima.to(self._unsharded.device)
        quantizers, limits = self._plan.quantizers, self.by_weight(self.limits(maxima))
        for quantizer, scales, own in zip(quantizers, self.scales, limits, strict=True):
            scales.copy_(quantizer.scales_of(own)[1])
        for kept, found in zip(self.maxima, self.by_weight(maxima), strict=True):
            if kept is not None:
                kept.copy_(found)

    @property
    def history_versions(self) -> int:
        """Counts writes to the histories."""
        return sum(own.maxima._version for own in self._histories if own is not None)

    def _parts(
        self, index: int, main: DBuffer, codes: DBuffer
    ) -> Iterator[tuple[torch.Tensor, int, torch.Tensor]]:
        """This rank's rows of a weight, a few at a time: rounded to the compute dtype, the number
        of the first of them in the weight as modules use it, and the memory for their codes.
        """
        rows, out = main.get_local_tensor(index), codes.get_local_tensor(index)
        numel = _CHUNK_NUMEL if out.device.type == "cpu" else _DEVICE_CHUNK_NUMEL
        num_rows = max(1, numel // rows.shape[1])
        first_row = self.own_rows(index, main).first_row
        for begin in range(0, len(rows), num_rows):
            own = rows[begin : begin + num_rows].to(out.device, self._plan.dtype)
            yield own, first_row + begin, out[begin : begin + num_rows]
