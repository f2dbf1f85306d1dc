"""The optimizer's settings."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, option


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

    def __post_init__(self) -> None:
        check_options(self)
