"""How long a step should take and how much memory it should need, from bandwidths alone. See
docs/gpu.md.

    python3 -m tools.gpu_check.prediction       prints the tables of that page

Standard library only, as the stages that compare runs are. The time of a step is that of
the planner; here are the model that the stages train and the machine that is expected.
Bytes an element are those of docs/offload.md, for bf16 compute with bf16 main gradients.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron_hybrid.plan.step_time import Machine as AnyMachine
from megatron_hybrid.plan.step_time import StepTime, Work, step_time

# Bytes an element of what stays on the device between steps.
_REST_ON_DEVICE = 16  # compute weight, gradient, main weight, two moments
_REST_OFFLOADED = 4  # compute weight, gradient
_DEVICE_PASS = 28  # bytes that a pass of Adam reads and writes an element, on either side
HOST_PASS = {"fp32": 28, "bf16": 20}  # by the dtype of the moments
_LINK = 2  # each way
MOST_TIME, MOST_MEMORY = 1.15, 0.55  # of everything on the device


@dataclass(frozen=True)
class Shape:
    """A GPT with SwiGLU and RMSNorm, without biases, its embeddings tied."""

    num_layers: int
    hidden: int
    ffn: int
    vocabulary: int
    sequence: int
    micro_batch: int
    num_microbatches: int

    @property
    def layer_numel(self) -> int:
        """The elements of one layer's weights."""
        return 4 * self.hidden**2 + 3 * self.hidden * self.ffn + 2 * self.hidden

    @property
    def numel(self) -> int:
        """The elements of all weights."""
        return self.num_layers * self.layer_numel + self.vocabulary * self.hidden + self.hidden

    @property
    def tokens(self) -> int:
        """The tokens of one step."""
        return self.sequence * self.micro_batch * self.num_microbatches

    @property
    def flops(self) -> float:
        """Of one step, as in docs/gpu.md: backward is twice forward, causal scores are half."""
        products = 4 * self.hidden**2 + 3 * self.hidden * self.ffn
        layer = 2 * products + 2 * self.sequence * self.hidden
        return 3.0 * self.tokens * (self.num_layers * layer + 2 * self.hidden * self.vocabulary)

    @property
    def activation_bytes(self) -> float:
        """Of one microbatch in bf16, kept for its backward.

        A layer keeps nine tensors of the hidden size (the residual stream twice, two norms'
        results, query, key, value and the attention's result twice) and four of the MLP's (gate,
        up, silu, product). The logits are there in bf16.
        """
        tokens = self.sequence * self.micro_batch
        layer = 9 * self.hidden + 4 * self.ffn
        return 2.0 * tokens * (self.num_layers * layer + self.vocabulary)


@dataclass(frozen=True)
class Machine(AnyMachine):
    """What a training step is expected to reach, a second, on an H200."""

    flops: float = 400e12  # half of what an H200's matrix products reach alone
    device_bytes: float = 4.3e12  # read and written
    link_bytes: float = 50e9  # each way, PCIe 5 x16
    host_bytes: float = 150e9  # read and written by the Adam pass, on 16 cores


@dataclass(frozen=True)
class Prediction:
    """The cost of one step with a share of the optimizer in host memory."""

    time: StepTime
    peak_bytes: float

    @property
    def seconds(self) -> float:
        return self.time.seconds

    @property
    def exposed(self) -> float:
        """What the computation waits for offloading."""
        return self.time.exposed_host + self.time.exposed_link


def compute_seconds(shape: Shape, machine: Machine) -> float:
    """Forward and backward of a step."""
    return shape.flops / machine.flops


def predict(
    shape: Shape,
    machine: Machine,
    fraction: float,
    *,
    moments: str = "fp32",
    compute: float | None = None,
) -> Prediction:
    """A step with `fraction` of the elements in host memory, updated during the next forward.

    Args:
        moments: dtype of those in host memory.
        compute: seconds of forward and backward, where that was measured.
    """
    on_host = fraction * shape.numel
    microbatch = shape.flops / shape.num_microbatches
    work = Work(
        forward_flops=microbatch / 3,
        backward_flops=microbatch * 2 / 3,
        num_microbatches=shape.num_microbatches,
        host_pass=HOST_PASS[moments] * on_host,
        device_pass=_DEVICE_PASS * (shape.numel - on_host),
        down=_LINK * on_host,
        up=_LINK * on_host,
    )
    time = step_time(work, machine, compute=compute)
    return Prediction(time, peak_bytes(shape, fraction))


def peak_bytes(shape: Shape, fraction: float) -> float:
    """Device memory at its peak: what rests there, two whole layers, the embedding, activations."""
    whole = 2 * (2 + 2) * shape.layer_numel + (2 + 2) * shape.vocabulary * shape.hidden
    return rest_bytes(shape, fraction) + whole + shape.activation_bytes


def rest_bytes(shape: Shape, fraction: float) -> float:
    """What is on the device between steps."""
    return (_REST_ON_DEVICE - (_REST_ON_DEVICE - _REST_OFFLOADED) * fraction) * shape.numel


def least_fraction(shape: Shape) -> float:
    """The smallest share in host memory that meets the bar of memory."""
    at_none, at_all = peak_bytes(shape, 0.0), peak_bytes(shape, 1.0)
    return max(0.0, (1 - MOST_MEMORY) * at_none / (at_none - at_all))


def needed_host_bytes(
    shape: Shape, machine: Machine, fraction: float, moments: str = "fp32"
) -> float:
    """The host bandwidth, bytes a second, that meets the bar of time."""
    compute = compute_seconds(shape, machine)
    allowed = MOST_TIME * predict(shape, machine, 0.0).seconds
    device_pass = _DEVICE_PASS * (1 - fraction) * shape.numel / machine.device_bytes
    hidden = compute / shape.num_microbatches / 3
    return HOST_PASS[moments] * fraction * shape.numel / (allowed - compute - device_pass + hidden)


THREE_BILLION = Shape(
    num_layers=26,
    hidden=3072,
    ffn=8192,
    vocabulary=32000,
    sequence=4096,
    micro_batch=1,
    num_microbatches=12,
)


def main() -> None:
    """Prints the tables of docs/gpu.md."""
    shape, machine = THREE_BILLION, Machine()
    device = predict(shape, machine, 0.0)
    print(
        f"{shape.numel / 1e9:.2f} billion elements, {shape.tokens} tokens and "
        f"{shape.flops / 1e15:.2f} PFLOP a step,"
    )
    print(
        f"{shape.activation_bytes / 1e9:.1f} GB of activations; everything on the device: "
        f"{device.seconds:.2f} s"
    )
    print(
        "\n| fraction | moments | host pass | link, each way | exposed | step | of the device's | "
        "memory |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for fraction, moments in (
        (0.0, "fp32"),
        (0.5, "fp32"),
        (0.75, "fp32"),
        (1.0, "fp32"),
        (1.0, "bf16"),
    ):
        found = predict(shape, machine, fraction, moments=moments)
        print(
            f"| {fraction:g} | {moments} | {found.time.host_pass:.2f} s | {found.time.up:.2f} s | "
            f"{found.exposed:.2f} s "
            f"| {found.seconds:.2f} s | {found.seconds / device.seconds:.2f}x "
            f"| {found.peak_bytes / 1e9:.0f} GB, {found.peak_bytes / device.peak_bytes:.0%} |"
        )
    print(f"\nthe smallest fraction that meets the bar of memory: {least_fraction(shape):.2f}")
    for fraction, moments in ((least_fraction(shape), "fp32"), (1.0, "fp32"), (1.0, "bf16")):
        needed = needed_host_bytes(shape, machine, fraction, moments)
        print(
            f"host bandwidth for the bar of time at {fraction:.2f}, {moments} moments: "
            f"{needed / 1e9:.0f} GB/s"
        )


if __name__ == "__main__":
    main()
