"""The optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, expect, option

_MOMENT_DTYPES = ("fp32", "bf16")


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer updates the weights, and its constants. Names and defaults are Megatron's."""

    optimizer: str = option("adam", "adam is AdamW: weight decay is decoupled", choices=("adam", "sgd"))
    weight_decay: float = option(0.01, "weight decay of matrices; biases and norms have none", at_least=0)
    adam_beta1: float = option(0.9, "decay of Adam's first moment", at_least=0, less_than=1)
    adam_beta2: float = option(0.999, "decay of Adam's second moment", at_least=0, less_than=1)
    adam_eps: float = option(1e-8, "term added to Adam's denominator", more_than=0)
    sgd_momentum: float = option(0.9, "momentum of SGD", at_least=0, less_than=1)
    clip_grad: float = option(1.0, "global norm to which gradients are clipped; 0 clips nothing", at_least=0)
    gpu_optimizer: str = option(
        "auto",
        "whose Adam steps what is on the device: native is ours, auto takes it; TransformerEngine's and Apex's need "
        "their packages and a GPU",
        choices=("auto", "native", "te", "apex", "torch"),
    )
    exp_avg_dtype: str = option("fp32", "dtype of Adam's first moments", choices=_MOMENT_DTYPES)
    exp_avg_sq_dtype: str = option("fp32", "dtype of Adam's second moments", choices=_MOMENT_DTYPES)
    optimizer_cpu_offload: bool = option(False, "keep optimizer states and main weights in host memory, updated there")
    optimizer_offload_fraction: float = option(
        1.0, "share of the elements that is offloaded, in whole layers from the network's end", at_least=0, at_most=1
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        False, "move gradients down during backward, and weights up, beside the update of others"
    )
    overlap_optimizer_with_forward: bool = option(
        False, "begin the next forward at once; each layer waits for its own weights"
    )
    pin_cpu_grads: bool = option(
        True, "page-locked host memory for gradients on their way down", off_flag="--no-pin-cpu-grads"
    )
    pin_cpu_params: bool = option(
        True, "page-locked host memory for states and weights", off_flag="--no-pin-cpu-params"
    )
    cpu_optimizer_threads: int | None = option(
        None, "threads that step Adam on the CPU; default: a rank's share of the cores", at_least=1
    )

    def __post_init__(self) -> None:
        check_options(self)
        for name, default, flag in (
            ("optimizer_offload_fraction", 1.0, "--optimizer-offload-fraction"),
            ("overlap_cpu_optimizer_d2h_h2d", False, "--overlap-cpu-optimizer-d2h-h2d"),
            ("overlap_optimizer_with_forward", False, "--overlap-optimizer-with-forward"),
            ("pin_cpu_grads", True, "--no-pin-cpu-grads"),
            ("pin_cpu_params", True, "--no-pin-cpu-params"),
        ):
            is_used = self.optimizer_cpu_offload or getattr(self, name) == default
            expect(is_used, flag, "--optimizer-cpu-offload", "--no-optimizer-cpu-offload")
        expect(
            self.overlap_cpu_optimizer_d2h_h2d or not self.overlap_optimizer_with_forward,
            "--overlap-optimizer-with-forward",
            "--overlap-cpu-optimizer-d2h-h2d",
            "--no-overlap-cpu-optimizer-d2h-h2d",
        )
        expect(
            not self.optimizer_cpu_offload or self.gpu_optimizer in ("auto", "native"),
            "--gpu-optimizer",
            "auto or native with --optimizer-cpu-offload, so that both sides give the same bits",
            self.gpu_optimizer,
        )
        expect(
            not self.optimizer_cpu_offload or self.exp_avg_dtype == self.exp_avg_sq_dtype,
            "--exp-avg-sq-dtype",
            f"--exp-avg-dtype's {self.exp_avg_dtype} with --optimizer-cpu-offload",
            self.exp_avg_sq_dtype,
        )
        is_ours = self.optimizer == "adam" and self.gpu_optimizer in ("auto", "native")
        expect(
            is_ours or self.cpu_optimizer_threads is None,
            "--cpu-optimizer-threads",
            "our own Adam, --optimizer adam and --gpu-optimizer native",
            f"{self.optimizer}, {self.gpu_optimizer}",
        )
        if self.optimizer == "sgd":
            expect(
                self.gpu_optimizer in ("auto", "torch"), "--gpu-optimizer", "auto or torch for sgd", self.gpu_optimizer
            )
            dtypes = (self.exp_avg_dtype, self.exp_avg_sq_dtype)
            expect(dtypes == ("fp32", "fp32"), "--exp-avg-dtype", "--optimizer adam, which has moments", "sgd")
        elif self.gpu_optimizer not in ("auto", "native"):
            dtypes = (self.exp_avg_dtype, self.exp_avg_sq_dtype)
            expect(dtypes == ("fp32", "fp32"), "--exp-avg-dtype", "--gpu-optimizer native", self.gpu_optimizer)
