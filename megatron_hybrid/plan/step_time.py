"""The time of a training step, from its operations and transfers and a machine's rates.

    forward     gathers overlap with it; in the first microbatch, so does the host's pass over the
                last step's gradients, which cannot start before their norm is known
    backward    gathers and reductions overlap with it; in the last microbatch, so do gradient
                copies to the host
    step        the device's pass over the states on the device; then the remaining work of the
                host, unless it overlaps with the next forward

On a CPU device nothing overlaps, and times add up. Does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megatron.core.optimizer.config import Overlap
from megatron.core.optimizer.pass_times import PassTimes


@dataclass(frozen=True)
class Machine:
    """Rates per second of one rank while all ranks of its machine work.

    Attributes:
        flops: FLOP of forward and backward.
        device_bytes: bytes that the optimizer's pass on the device reads and writes.
        link_bytes: bytes copied between device and host, each way.
        host_bytes: bytes that the optimizer's pass in host memory reads and writes.
        interconnect_bytes: bytes that a rank sends or receives in collectives; None: not counted.
        collective_seconds: the latency of a collective.
        device_is_host: whether the device is the CPU, so that nothing overlaps.
    """

    flops: float
    device_bytes: float
    link_bytes: float
    host_bytes: float
    interconnect_bytes: float | None = None
    collective_seconds: float = 0.0
    device_is_host: bool = False


@dataclass(frozen=True)
class Work:
    """One step of one rank.

    Attributes:
        forward_flops, backward_flops: FLOP of one microbatch.
        host_pass: bytes that the optimizer reads and writes in host memory.
        device_pass: bytes that it reads and writes on the device.
        down, up: bytes of gradients copied to the host, and of weights copied back.
        states: bytes of the main weights and states in host memory.
        update_on_device: the share of them that passes through the device, which updates it, one
            way at a time; None: the share with the shortest step.
        activations: bytes copied to the host in each forward, and back in its backward.
        hides_activations: whether only as many are copied as the computation hides.
        gathered_forward, gathered_backward, reduced: bytes that the rank receives or sends in each
            microbatch.
        gathered_once, reduced_once: bytes that it receives or sends once a step.
        exchanged: bytes of tokens sent to experts and back in each microbatch, which never overlap.
        collectives_forward, collectives_backward, exchanges: numbers per microbatch.
    """

    forward_flops: float
    backward_flops: float
    num_microbatches: int
    host_pass: float = 0.0
    device_pass: float = 0.0
    down: float = 0.0
    up: float = 0.0
    states: float = 0.0
    update_on_device: float | None = 0.0
    activations: float = 0.0
    hides_activations: bool = False
    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    reduced: float = 0.0
    gathered_once: float = 0.0
    reduced_once: float = 0.0
    exchanged: float = 0.0
    collectives_forward: int = 0
    collectives_backward: int = 0
    exchanges: int = 0
    overlap: Overlap = Overlap.ALL


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step.

    Attributes:
        compute: forward and backward of all microbatches.
        device_pass, host_pass, down, up, collectives: the time of each without overlap.
        update_on_device: the share of the states in host memory that the device updates.
        forward: the forward of one microbatch.
        activations: copies of one microbatch's activations, one way.
        exposed_host: the computation's wait for the host's pass, or for weight copies if longer.
        exposed_link: the computation's wait for gradient copies.
        exposed_activations: its wait for activation copies.
        exposed_collectives: the computation's wait for other ranks.
    """

    compute: float
    device_pass: float
    host_pass: float
    down: float
    up: float
    update_on_device: float
    collectives: float
    forward: float
    activations: float
    exposed_host: float
    exposed_link: float
    exposed_activations: float
    exposed_collectives: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """The parts of the step's seconds, by name."""
        is_of_link = self.up > self.host_pass
        return {
            "compute": self.compute,
            "host pass": 0.0 if is_of_link else self.exposed_host,
            "link": self.exposed_link
            + self.exposed_activations
            + (self.exposed_host if is_of_link else 0.0),
            "device pass": self.device_pass,
            "interconnect": self.exposed_collectives,
        }

    @property
    def bound(self) -> str:
        """The longest part."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])

    @property
    def hides_offloading(self) -> bool:
        """Whether the computation never waits because the optimizer is offloaded."""
        return self.exposed_host == 0.0 and self.exposed_link == 0.0


def step_time(work: Work, machine: Machine, *, compute: float | None = None) -> StepTime:
    """Returns the time of a step.

    Args:
        compute: measured seconds of forward and backward of the whole step.
    """
    flops = (work.forward_flops + work.backward_flops) * work.num_microbatches
    compute = flops / machine.flops if compute is None else compute
    microbatch = compute / work.num_microbatches
    total = work.forward_flops + work.backward_flops
    forward = microbatch * (work.forward_flops / total if total else 0.0)
    backward = microbatch - forward

    device_pass, states = work.device_pass, work.states / machine.link_bytes
    whole = PassTimes(
        work.host_pass / machine.host_bytes, work.up / machine.link_bytes, states, states
    )
    # On the device, the passes of streamed states are part of their way.
    share = work.update_on_device
    if share is None:
        share = 0.0 if machine.device_is_host else whole.balanced()
    host_pass, down = whole.host * (1 - share), work.down / machine.link_bytes * (1 - share)
    up = whole.weights_up * (1 - share) + states * share
    # One way at a time, and gradients and weights the other way.
    activations = work.activations / machine.link_bytes
    exposed_activations = max(0.0, activations - forward) + max(0.0, activations - backward)
    if machine.device_is_host:
        exposed_activations = 2 * activations
    elif work.hides_activations:
        exposed_activations = 0.0
    collectives = _Collectives.of(work, machine)
    first = max(forward, collectives.first_forward)
    last = max(backward, collectives.last_backward)
    exposed_host, exposed_link = _exposed_offload(
        Overlap.NONE if machine.device_is_host else work.overlap, host_pass, down, up, first, last
    )
    return StepTime(
        compute=compute,
        device_pass=device_pass / machine.device_bytes,
        host_pass=host_pass,
        down=down,
        up=up,
        update_on_device=share,
        collectives=collectives.seconds(work.num_microbatches),
        exposed_host=exposed_host,
        forward=forward,
        activations=activations,
        exposed_link=exposed_link,
        exposed_activations=work.num_microbatches * exposed_activations,
        exposed_collectives=collectives.exposed(
            work.num_microbatches, forward, backward, device_is_host=machine.device_is_host
        ),
    )


def _exposed_offload(
    overlap: Overlap, host_pass: float, down: float, up: float, first: float, last: float
) -> tuple[float, float]:
    """Returns the computation's waits for the host's pass or weight copies, and for gradients.

    Args:
        first: seconds of the first forward, with its waits for collectives.
        last: seconds of the last backward, with its waits for collectives.
    """
    if not overlap.has_lanes:
        return host_pass, down + up
    # A group's weights are copied while the next one is updated.
    after_the_norm = max(host_pass, up)
    if overlap.in_forward:
        after_the_norm = max(0.0, after_the_norm - first)
    return after_the_norm, max(0.0, down - last) if overlap.in_backward else down


class _Collectives(NamedTuple):
    """Seconds of collectives without overlap.

    Weights that are gathered once a step are gathered in the first forward. Gradients that are
    reduced once are reduced in the last backward.
    """

    forward: float
    backward: float
    first_forward: float
    last_backward: float
    exchange: float  # of tokens in all microbatches

    @classmethod
    def of(cls, work: Work, machine: Machine) -> _Collectives:
        rate = machine.interconnect_bytes
        if rate is None:
            return cls(0.0, 0.0, 0.0, 0.0, 0.0)
        each = machine.collective_seconds
        forward = work.gathered_forward / rate + each * work.collectives_forward
        moved = work.gathered_backward + work.reduced
        backward = moved / rate + each * work.collectives_backward
        exchange = work.exchanged / rate + each * work.exchanges
        return cls(
            forward,
            backward,
            forward + work.gathered_once / rate,
            backward + work.reduced_once / rate,
            work.num_microbatches * exchange,
        )

    def seconds(self, num_microbatches: int) -> float:
        """Returns the seconds of a step."""
        others = (num_microbatches - 1) * (self.forward + self.backward)
        return others + self.first_forward + self.last_backward + self.exchange

    def exposed(
        self, num_microbatches: int, forward: float, backward: float, *, device_is_host: bool
    ) -> float:
        """Returns the computation's waits for them in a step."""
        if device_is_host:
            return self.seconds(num_microbatches)
        others = max(0.0, self.forward - forward) + max(0.0, self.backward - backward)
        exposed = (num_microbatches - 1) * others + self.exchange
        exposed += max(0.0, self.first_forward - forward)
        return exposed + max(0.0, self.last_backward - backward)
