"""The dtypes of weights, gradients and optimizer states, by their names in flags."""

from __future__ import annotations

import torch

from megatron.core.dtype_names import FLOAT_NAMES, STATE_NAMES, UNSCALED_STATE_NAMES

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
FLOAT_DTYPES = tuple(DTYPES[name] for name in FLOAT_NAMES)
STATE_DTYPES = tuple(DTYPES[name] for name in STATE_NAMES)
UNSCALED_STATE_DTYPES = tuple(DTYPES[name] for name in UNSCALED_STATE_NAMES)
# Of the main weights that an optimizer keeps next to 16-bit parameters.
MASTER_DTYPES = (torch.float32, torch.float16)
