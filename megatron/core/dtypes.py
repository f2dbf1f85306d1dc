"""The dtypes of weights, gradients and optimizer states, and their names in flags."""

from __future__ import annotations

from collections.abc import Collection

import torch

DTYPES = {
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp8": torch.float8_e4m3fn,
}
# Of weights and gradients.
FLOAT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Of optimizer states. Those in fp16 and fp8 have a scale for each tensor. The host's flat arrays
# keep no scales, and the kernels read none.
STATE_DTYPES = (*FLOAT_DTYPES, torch.float8_e4m3fn)
UNSCALED_STATE_DTYPES = (torch.float32, torch.bfloat16)
# Of the main weights that an optimizer keeps next to 16-bit parameters.
MASTER_DTYPES = (torch.float32, torch.float16)


def names_of(dtypes: Collection[torch.dtype]) -> tuple[str, ...]:
    """The names of dtypes in flags."""
    return tuple(name for name, dtype in DTYPES.items() if dtype in dtypes)
