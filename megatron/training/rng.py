"""Random generators: one seed for each rank, and their states as tensors for the checkpoint."""

from __future__ import annotations

import random

import numpy as np
import torch

from megatron.core.device import Device

# A prime, so that the ranks' seeds of neighbouring runs do not coincide.
_SEED_STRIDE = 1009


def seed_all(seed: int, rank: int) -> None:
    """Seeds torch (every device), numpy and Python, differently on every rank: each draws its own dropout masks."""
    own = seed + _SEED_STRIDE * rank
    torch.manual_seed(own)
    np.random.seed(own % 2**32)  # noqa: NPY002  the legacy generator is the one that a user's code may call
    random.seed(own)


def rng_state(device: Device) -> dict[str, torch.Tensor]:
    """The states of all generators of this process, as CPU tensors of fixed shapes."""
    _, keys, position, has_gauss, cached_gauss = np.random.get_state()  # noqa: NPY002
    version, words, gauss = random.getstate()
    states = {
        "torch": torch.get_rng_state(),  # uint8
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)]),  # [626] int64
        "numpy_gauss": torch.tensor(float(cached_gauss), dtype=torch.float64),
        "python": torch.tensor([version, *words]),  # [626] int64
        "python_gauss": torch.tensor([gauss is not None, gauss or 0.0], dtype=torch.float64),  # [2]
    }
    own = device.rng_state()
    return states if own is None else {**states, "device": own}


def set_rng_state(device: Device, states: dict[str, torch.Tensor]) -> None:
    """Takes back what `rng_state` gave."""
    torch.set_rng_state(states["torch"])
    *keys, position, has_gauss = states["numpy"].tolist()
    words_of_numpy = np.array(keys, dtype=np.uint32)
    np.random.set_state(  # noqa: NPY002
        ("MT19937", words_of_numpy, position, has_gauss, float(states["numpy_gauss"]))
    )
    version, *words = states["python"].tolist()
    has_python_gauss, gauss = states["python_gauss"].tolist()
    random.setstate((version, tuple(words), gauss if has_python_gauss else None))
    if "device" in states:
        device.set_rng_state(states["device"])
