"""The optimizer's settings."""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass
from typing import Literal

from megatron.core.dtype_names import FLOAT_NAMES, STATE_NAMES, UNSCALED_STATE_NAMES
from megatron.core.options import check_options, expect, given_options, option, options_of
from megatron.core.parts import parse_factors

# megatron-core's two: of --optimizer-offload-fraction, and of `HybridDeviceOptimizer`.
DEFAULT_RUN_FRACTION, DEFAULT_OPTIMIZER_FRACTION = 1.0, 0.5
AUTO: Literal["auto"] = "auto"  # a fraction that the engine chooses
_MUON = {"optimizer": "muon"}
_DTYPE_OPTIONS = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")


class Overlap(enum.Enum):
    """What overlaps with the work of an offloaded optimizer; all valid combinations.

    Attributes:
        has_lanes: transfers overlap with the update.
        in_backward: gradients go down during the backward.
        in_forward: the update overlaps with the next forward.
    """

    NONE = (False, False, False)
    TRANSFERS = (True, False, False)
    FETCH = (True, True, False)
    FORWARD = (True, False, True)
    ALL = (True, True, True)

    def __init__(self, has_lanes: bool, in_backward: bool, in_forward: bool) -> None:
        self.has_lanes, self.in_backward, self.in_forward = has_lanes, in_backward, in_forward


@dataclass(frozen=True)
class OptimizerConfig:
    """Which optimizer updates the weights, and its constants. Names and defaults are Megatron's."""

    optimizer: str = option(
        "adam",
        "adam: AdamW, with decoupled weight decay; sgd: SGD with momentum; lion: Lion; muon: Muon "
        "for the matrices of linear layers, and AdamW for all other weights",
        choices=("adam", "sgd", "lion", "muon"),
    )
    weight_decay: float = option(
        0.01,
        "weight decay of matrices; biases and normalization weights have none",
        at_least=0,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    adam_beta1: float = option(
        0.9,
        "decay rate of Adam's first moment",
        at_least=0,
        less_than=1,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    adam_beta2: float = option(
        0.999,
        "decay rate of Adam's second moment",
        at_least=0,
        less_than=1,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    adam_eps: float = option(
        1e-8,
        "epsilon added to Adam's denominator",
        more_than=0,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    sgd_momentum: float = option(
        0.9,
        "momentum of SGD",
        at_least=0,
        less_than=1,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    lion_beta1: float = option(
        0.95,
        "share of the momentum in Lion's update",
        at_least=0,
        less_than=1,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    lion_beta2: float = option(
        0.98,
        "decay rate of Lion's momentum",
        at_least=0,
        less_than=1,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_momentum: float = option(
        0.95,
        "decay rate of Muon's momentum",
        at_least=0,
        less_than=1,
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_nesterov: bool = option(
        True,
        "orthogonalize the gradient mixed with the momentum instead of the momentum",
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_num_ns_steps: int = option(
        5,
        "steps of the Newton-Schulz iteration that orthogonalizes an update",
        at_least=1,
        at_most=99,
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_coefficient_type: str = option(
        "simple",
        "coefficients of the Newton-Schulz iteration: simple, torch.optim.Muon's; quintic, "
        "Megatron-LM's; polar_express, by Amsel et al.",
        choices=("simple", "quintic", "polar_express"),
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_scale_mode: str = option(
        "match_rms_adamw",
        "factor of a matrix's orthogonalized update: match_rms_adamw, 0.2 sqrt(max(rows, "
        "columns)), for AdamW's learning rate; original, sqrt(max(1, rows / columns)); spectral, "
        "sqrt(max(rows, columns))",
        choices=("match_rms_adamw", "original", "spectral"),
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_extra_scale_factor: float = option(
        1.0,
        "further factor of Muon's updates: the ratio of its learning rate to --lr, AdamW's",
        more_than=0,
        no_effect_unless=_MUON,
        overridden_by="use_checkpoint_opt_param_scheduler",
    )
    muon_split_heads: bool = option(
        False,
        "orthogonalize each attention head's queries, keys and values as a separate matrix",
        no_effect_unless=_MUON,
    )
    lr_multipliers: tuple[str, ...] | None = option(
        None,
        "factors of the learning rate of parts of the model: vision, projector or decoder of a "
        "model that reads images, or the start of parameter names (default: none)",
        metavar="NAME=FACTOR",
    )
    clip_grad: float = option(
        1.0, "global norm to which gradients are clipped; 0: no clipping", at_least=0
    )
    log_num_zeros_in_grad: bool = option(
        False, "log the number of zeros among the gradients' elements"
    )
    loss_scale: float | None = option(
        None,
        "constant scale of the loss (default: a dynamic scale)",
        more_than=0,
        no_effect_unless="fp16",
    )
    # Megatron's value: the first steps overflow, and are skipped while the scale comes down.
    initial_loss_scale: float = option(
        2.0**32, "first value of the dynamic loss scale", more_than=0, no_effect_unless="fp16"
    )
    min_loss_scale: float = option(
        1.0,
        "least value of the dynamic loss scale",
        more_than=0,
        no_effect_unless="fp16",
    )
    loss_scale_window: int = option(
        1000,
        "steps in a row without overflow after which the dynamic loss scale is doubled",
        at_least=1,
        no_effect_unless="fp16",
    )
    hysteresis: int = option(
        2,
        "steps with overflow after which the dynamic loss scale is halved; counted anew once it"
        " is doubled",
        at_least=1,
        no_effect_unless="fp16",
    )
    gpu_optimizer: str = option(
        "auto",
        "implementation for states on the device: this project's (auto, native), "
        "TransformerEngine's Adam (te), Apex's (apex), or PyTorch's (torch); te and apex need "
        "their packages and a GPU",
        choices=("auto", "native", "te", "apex", "torch"),
    )
    main_params_dtype: str = option(
        "fp32",
        "dtype of the main weights, which the optimizer updates",
        choices=FLOAT_NAMES,
    )
    exp_avg_dtype: str = option(
        "fp32",
        "dtype of Adam's first moment, and of the momentum of SGD, Lion and Muon",
        choices=STATE_NAMES,
    )
    exp_avg_sq_dtype: str = option("fp32", "dtype of Adam's second moment", choices=STATE_NAMES)
    optimizer_cpu_offload: bool = option(
        False, "keep main weights and optimizer states in host memory, and update them on the CPU"
    )
    optimizer_offload_fraction: float | Literal["auto"] = option(
        DEFAULT_RUN_FRACTION,
        "share of the optimizer's elements to offload, from 0 to 1, in whole layers from the "
        "last one on; auto: the smallest that fits the GPU",
        at_least=0,
        at_most=1,
        no_effect_unless="optimizer_cpu_offload",
    )
    optimizer_offload_experts_first: bool = option(
        False,
        "offload the experts before all other parameters, from the last layer on",
        requires="num_experts",
        no_effect_unless="optimizer_cpu_offload",
    )
    overlap_cpu_optimizer_d2h_h2d: bool = option(
        False,
        "copy gradients to the host during backward, and updated weights back during the update"
        " of others",
        no_effect_unless="optimizer_cpu_offload",
    )
    overlap_optimizer_with_forward: bool = option(
        False,
        "start the next forward during the update; each layer waits for its own weights only",
        no_effect_unless={"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    )
    optimizer_update_on_device: float | Literal["auto"] = option(
        0.0,
        "share of the offloaded elements, from 0 to 1, whose states are copied to the GPU, updated "
        "there and copied back, to relieve the CPU; auto: the share that is the fastest in the "
        "first steps",
        at_least=0,
        at_most=1,
        no_effect_unless={"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    )
    optimizer_early_update_gib: float = option(
        0.0,
        "additional host memory per rank with which the CPU updates weights during the backward, "
        "as soon as their gradients have arrived; repeated where gradients are clipped; 0: none",
        metavar="GIB",
        at_least=0,
        no_effect_unless={"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True},
    )
    pin_cpu_grads: bool = option(
        True,
        "copy gradients to page-locked host memory, which is faster than pageable memory",
        off_flag="--no-pin-cpu-grads",
        no_effect_unless="optimizer_cpu_offload",
    )
    pin_cpu_params: bool = option(
        True,
        "copy weights from page-locked host memory, which is faster than pageable memory",
        off_flag="--no-pin-cpu-params",
        no_effect_unless="optimizer_cpu_offload",
    )
    host_threads: int | None = option(
        None,
        "threads per rank that run Adam on the CPU (default: the rank's share of the cores, "
        "minus two for a GPU's kernel launches)",
        at_least=1,
        ceiling=2**12,
    )

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.lr_factors
        expect(
            not self.optimizer_cpu_offload or self.gpu_optimizer in ("auto", "native"),
            "--gpu-optimizer",
            "auto or native with --optimizer-cpu-offload, so that both sides give the same bits",
            self.gpu_optimizer,
        )

        # All ranks orthogonalize a matrix in the step: none may update a part of it otherwise.
        for field in options_of(OptimizerConfig):
            if field.name in ("optimizer_update_on_device", "optimizer_early_update_gib"):
                given = getattr(self, field.name)
                expect(self.optimizer != "muon" or given == 0, field.flag, "0 with muon", given)

        # TransformerEngine's, Apex's and torch's have neither our threads nor our dtypes.
        expect(
            self.has_rule or self.host_threads is None,
            "--host-threads",
            "our own optimizers, --gpu-optimizer native",
            self.gpu_optimizer,
        )
        implementations = {
            "adam": ("auto", "native", "te", "apex", "torch"),
            "sgd": ("auto", "native", "torch"),
            "lion": ("auto", "native"),
            "muon": ("auto", "native"),
        }[self.optimizer]
        expect(
            self.gpu_optimizer in implementations,
            "--gpu-optimizer",
            f"{' or '.join(implementations)} for {self.optimizer}",
            self.gpu_optimizer,
        )

        self._check_dtypes()
        self._check_loss_scale()

    @property
    def offload_fraction(self) -> float:
        """The offload fraction as a number. ValueError for `auto`, which an engine replaces."""
        if self.optimizer_offload_fraction == AUTO:
            raise ValueError("Expected an offload fraction from 0 to 1, got 'auto'.")
        return self.optimizer_offload_fraction

    @property
    def has_rule(self) -> bool:
        """Whether states on the device are updated by this project's rules."""
        return self.gpu_optimizer in ("auto", "native")

    @property
    def overlap(self) -> Overlap:
        """The overlaps of two flags, of which three combinations exist."""
        # Gradients are not modified between backward and step: clipping is a factor.
        if self.overlap_optimizer_with_forward:
            return Overlap.ALL
        return Overlap.FETCH if self.overlap_cpu_optimizer_d2h_h2d else Overlap.NONE

    @property
    def update_on_device(self) -> float | None:
        """`optimizer_update_on_device` as a number; None for `auto`."""
        given = self.optimizer_update_on_device
        return None if given == AUTO else given

    @property
    def early_update_bytes(self) -> int:
        """`optimizer_early_update_gib` in bytes."""
        return math.ceil(self.optimizer_early_update_gib * 2**30)

    @property
    def pins_states(self) -> bool:
        """Whether main weights and states in host memory travel, and so are pinned where weights
        are.
        """
        return self.update_on_device != 0 and self.pin_cpu_params

    @property
    def lr_factors(self) -> dict[str, float]:
        """Factors of the learning rate by the names of parts. ConfigError for other values."""
        return parse_factors(self.lr_multipliers, "--lr-multipliers")

    def _check_loss_scale(self) -> None:
        others = [
            field.flag
            for field in given_options(self)
            if ("fp16", True) in field.option.no_effect_unless and field.name != "loss_scale"
        ]
        expect(
            self.loss_scale is None or not others,
            "--loss-scale",
            "no flags of a loss scale that adapts",
            ", ".join(others),
        )
        expect(
            self.min_loss_scale <= self.initial_loss_scale,
            "--min-loss-scale",
            f"at most --initial-loss-scale {self.initial_loss_scale}",
            self.min_loss_scale,
        )

    def _check_dtypes(self) -> None:
        for field in options_of(OptimizerConfig):
            if field.name not in _DTYPE_OPTIONS:
                continue
            dtype = getattr(self, field.name)
            expect(
                self.has_rule or dtype == "fp32",
                field.flag,
                "fp32 with another --gpu-optimizer than native",
                dtype,
            )

        expect(
            self.optimizer in ("adam", "muon") or self.exp_avg_sq_dtype == "fp32",
            "--exp-avg-sq-dtype",
            f"fp32 for {self.optimizer}, which has no second moment",
            self.exp_avg_sq_dtype,
        )
        if self.optimizer == "muon":
            expect(
                self.exp_avg_dtype in UNSCALED_STATE_NAMES,
                "--exp-avg-dtype",
                f"{' or '.join(UNSCALED_STATE_NAMES)} for muon",
                self.exp_avg_dtype,
            )
        if self.optimizer_cpu_offload:
            allowed = UNSCALED_STATE_NAMES
            has_one = self.optimizer not in ("adam", "muon")
            is_one = has_one or self.exp_avg_dtype == self.exp_avg_sq_dtype
            expect(
                is_one and self.exp_avg_dtype in allowed,
                "--exp-avg-dtype",
                f"{' or '.join(allowed)}, and for adam and muon the same as --exp-avg-sq-dtype, "
                "with --optimizer-cpu-offload",
                f"{self.exp_avg_dtype} and {self.exp_avg_sq_dtype}",
            )
