"""How long a training step takes: from what it moves and computes, and a machine's rates.

    forward     layer by layer; gathers run beside it, and so does the host's pass over the last
                step's gradients in the first microbatch's forward, which is all that can hide it:
                the pass begins when the norm is known
    backward    gathers and reductions beside it; in the last microbatch's, gradients go down
    step        the device's pass over what is not in host memory; then, unless the next forward
                begins at once, everything that is still under way on the host

Where the device is the host's own cores nothing runs beside anything else, and times add up.
Standard library only.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple


class Overlap(enum.Enum):
    """What runs beside the computation of an offloaded optimizer's work."""

    NONE = "nothing"
    TRANSFERS = "transfers"  # --overlap-cpu-optimizer-d2h-h2d
    FORWARD = "transfers and the next forward"  # --overlap-optimizer-with-forward too


@dataclass(frozen=True)
class Machine:
    """What one rank reaches, a second, while the other ranks of its machine do the same.

    Attributes:
        flops: in forward and backward.
        device_bytes: read and written by the optimizer's pass on the device.
        link_bytes: between device and host, each way.
        host_bytes: read and written by the optimizer's pass in host memory.
        interconnect_bytes: that a rank sends, or receives, in collectives; None: these are not
            counted.
        collective_seconds: what a collective takes besides its bytes.
        device_is_host: whether the device is the host's own cores, so that nothing is hidden.
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
        forward_flops, backward_flops: of one microbatch.
        host_pass: bytes that the optimizer reads and writes in host memory.
        device_pass: the same on the device.
        down, up: bytes of gradients on their way to the host, and of weights back.
        gathered_forward, gathered_backward, reduced: bytes that the rank receives or sends in each
            microbatch.
        gathered_once, reduced_once: the same once a step.
        exchanged: bytes of tokens that travel to experts and back in each microbatch, for which the
            computation waits.
        collectives_forward, collectives_backward, exchanges: how many of each there are in a
            microbatch.
    """

    forward_flops: float
    backward_flops: float
    num_microbatches: int
    host_pass: float = 0.0
    device_pass: float = 0.0
    down: float = 0.0
    up: float = 0.0
    gathered_forward: float = 0.0
    gathered_backward: float = 0.0
    reduced: float = 0.0
    gathered_once: float = 0.0
    reduced_once: float = 0.0
    exchanged: float = 0.0
    collectives_forward: int = 0
    collectives_backward: int = 0
    exchanges: int = 0
    overlap: Overlap = Overlap.FORWARD


@dataclass(frozen=True)
class StepTime:
    """The seconds of a step, and what they consist of.

    Attributes:
        compute: forward and backward of all microbatches.
        device_pass, host_pass, down, up, collectives: how long each takes by itself.
        exposed_host: what the computation waits for the host's pass, and for weights on their way
            up where these take longer.
        exposed_link: what it waits for gradients on their way down.
        exposed_collectives: what it waits for other ranks' weights and gradients.
    """

    compute: float
    device_pass: float
    host_pass: float
    down: float
    up: float
    collectives: float
    exposed_host: float
    exposed_link: float
    exposed_collectives: float

    @property
    def seconds(self) -> float:
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, float]:
        """What the step's seconds add up from, by name."""
        is_of_link = self.up > self.host_pass
        return {
            "compute": self.compute,
            "host pass": 0.0 if is_of_link else self.exposed_host,
            "link": self.exposed_link + (self.exposed_host if is_of_link else 0.0),
            "device pass": self.device_pass,
            "interconnect": self.exposed_collectives,
        }

    @property
    def bound(self) -> str:
        """The part that takes most of the step."""
        parts = self.parts
        return max(parts, key=lambda name: parts[name])

    @property
    def hides_offloading(self) -> bool:
        """Whether the computation waits for nothing that is there only because of offloading."""
        return self.exposed_host == 0.0 and self.exposed_link == 0.0


def step_time(work: Work, machine: Machine, *, compute: float | None = None) -> StepTime:
    """The time of a step.

    Args:
        compute: seconds of forward and backward of the whole step, where they were measured.
    """
    flops = (work.forward_flops + work.backward_flops) * work.num_microbatches
    compute = flops / machine.flops if compute is None else compute
    microbatch = compute / work.num_microbatches
    total = work.forward_flops + work.backward_flops
    forward = microbatch * (work.forward_flops / total if total else 0.0)
    backward = microbatch - forward

    host_pass, device_pass = work.host_pass / machine.host_bytes, work.device_pass
    down, up = work.down / machine.link_bytes, work.up / machine.link_bytes
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
        collectives=collectives.seconds(work.num_microbatches),
        exposed_host=exposed_host,
        exposed_link=exposed_link,
        exposed_collectives=collectives.exposed(
            work.num_microbatches, forward, backward, device_is_host=machine.device_is_host
        ),
    )


def _exposed_offload(
    overlap: Overlap, host_pass: float, down: float, up: float, first: float, last: float
) -> tuple[float, float]:
    """What the computation waits for the host's pass and weights on their way up, and for gradients
    on their way down.

    Args:
        first: seconds of the first forward, with what it waits for in collectives.
        last: of the last backward, likewise.
    """
    if overlap is Overlap.NONE:
        return host_pass, down + up
    # A group's weights go up while the next one is updated.
    after_the_norm = max(host_pass, up)
    if overlap is Overlap.FORWARD:
        after_the_norm = max(0.0, after_the_norm - first)
    return after_the_norm, max(0.0, down - last)


class _Collectives(NamedTuple):
    """Seconds of collectives by themselves, in what they run beside.

    Weights that are gathered once a step are so in the first forward, and gradients that are
    reduced once in the last backward.
    """

    forward: float
    backward: float
    first_forward: float
    last_backward: float
    exchange: float  # of tokens, of all microbatches

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
        """Of a step."""
        others = (num_microbatches - 1) * (self.forward + self.backward)
        return others + self.first_forward + self.last_backward + self.exchange

    def exposed(
        self, num_microbatches: int, forward: float, backward: float, *, device_is_host: bool
    ) -> float:
        """What the computation waits for them in a step."""
        if device_is_host:
            return self.seconds(num_microbatches)
        others = max(0.0, self.forward - forward) + max(0.0, self.backward - backward)
        exposed = (num_microbatches - 1) * others + self.exchange
        exposed += max(0.0, self.first_forward - forward)
        return exposed + max(0.0, self.last_backward - backward)
