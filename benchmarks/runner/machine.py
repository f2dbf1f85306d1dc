"""What a result was measured on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from megatron.core.device import Device, kind_of
from megatron.core.local_ranks import lines_of, num_usable_cores


def machine() -> dict[str, Any]:
    """Its processor with the instructions that PyTorch uses, as many cores and as much memory as it
    has for us, and its accelerator.
    """
    models = (line for line in lines_of(Path("/proc/cpuinfo")) if line.startswith("model name"))
    model = next(models, "").partition(":")[2].strip()
    device = Device(kind_of())
    return {
        "cpu": f"{model or platform.processor()}, {torch.backends.cpu.get_cpu_capability()}",
        "cores": num_usable_cores(),
        "memory_gib": round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30, 1),
        "platform": platform.platform(terse=True),
        "accelerator": device.description if device.is_accelerator else None,
    }
