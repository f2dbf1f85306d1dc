"""The names of dtypes in flags. Flags are made from config classes, which must not import torch."""

from __future__ import annotations

FLOAT_NAMES = ("fp32", "bf16", "fp16")  # of weights and gradients
# Of optimizer states. fp16 and fp8 states have a scale for each tensor. The host's flat arrays
# keep no scales, and the kernels read none.
STATE_NAMES = (*FLOAT_NAMES, "fp8")
UNSCALED_STATE_NAMES = ("fp32", "bf16")
