"""Random generators: one seed for each rank, and their states as tensors for the checkpoint."""

from __future__ import annotations

import math
import random

import numpy as np
import torch

from megatron.core.device import Device

# A prime, so that the ranks' seeds of neighbouring runs do not coincide.
_SEED_STRIDE = 1009

_NUM_WORDS = 624  # of a Mersenne Twister's state, which all three generators on the CPU are
_PYTHON_VERSION = 3  # of what random.getstate() gives; the same since Python 3.2


def seed_all(seed: int, rank: int) -> None:
    """Seeds torch (every device), numpy and Python, differently on every rank: each draws its own
    dropout masks.
    """
    own = seed + _SEED_STRIDE * rank
    torch.manual_seed(own)
    # The legacy generator is the one that a user's code may call.
    np.random.seed(own % 2**32)  # noqa: NPY002
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
    """Takes back what `rng_state` gave, and `check_rng_state` has found to be that."""
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


def check_rng_state(states: dict[str, torch.Tensor], own: dict[str, torch.Tensor]) -> None:
    """Proves that states which were read from somewhere are what `rng_state` can give.

    Changes no generator. numpy in particular believes the position that it is given, and reads
    outside of its state there, which may end the process.

    Args:
        own: what `rng_state` gives here.

    Raises:
        ValueError: with the state's name, the expected and the given value.
    """
    _check(states.keys() == own.keys(), "the random states", ", ".join(own), ", ".join(states))
    for name, like in own.items():
        expected = f"{like.dtype} of shape {tuple(like.shape)}"
        got = f"{states[name].dtype} of shape {tuple(states[name].shape)}"
        _check(expected == got, name, expected, got)

    _check_torch(states["torch"])

    *words, position, has_gauss = states["numpy"].tolist()
    _check_words("numpy", words)
    _check(0 <= position <= _NUM_WORDS, "numpy", f"a position of at most {_NUM_WORDS}", position)
    _check(has_gauss in (0, 1), "numpy", "0 or 1 for whether a value is cached", has_gauss)
    gauss = float(states["numpy_gauss"])
    _check(math.isfinite(gauss), "numpy_gauss", "a finite number", gauss)

    version, *words, position = states["python"].tolist()
    _check(version == _PYTHON_VERSION, "python", f"version {_PYTHON_VERSION}", version)
    _check_words("python", words)
    _check(0 <= position <= _NUM_WORDS, "python", f"a position of at most {_NUM_WORDS}", position)
    has_gauss, gauss = states["python_gauss"].tolist()
    is_gauss = has_gauss in (0.0, 1.0) and math.isfinite(gauss)
    _check(is_gauss, "python_gauss", "0 or 1 and a finite number", [has_gauss, gauss])


def _check_torch(state: torch.Tensor) -> None:
    try:
        torch.Generator().set_state(state)
    except RuntimeError as error:
        reason = str(error).split("\n")[0]
        raise ValueError(
            f"Expected torch to be the state of a generator, got one that torch rejects: {reason}"
        ) from None

    # torch has looked at how many words are left and at which one comes next, but not at their sum
    # (ATen/core/MT19937RNGEngine.h). A fresh generator has one left, and draws a new block after
    # it.
    left = int(state[8:12].view(torch.int32))
    following = int(state[16:24].view(torch.int64))
    is_consistent = (left, following) == (1, 0) or left + following == _NUM_WORDS + 1
    _check(is_consistent, "torch", f"{_NUM_WORDS + 1 - left} as the next of its words", following)


def _check_words(name: str, words: list[int]) -> None:
    is_within = all(0 <= word < 2**32 for word in words)
    _check(is_within, name, "words of 32 bits", f"{min(words)} to {max(words)}")
    # From there all that it ever draws is zero.
    _check(any(words), name, "a word that is not 0", "none")


def _check(is_met: bool, name: str, expected: str, got: object) -> None:
    if not is_met:
        raise ValueError(f"Expected {name} to be {expected}, got {got}.")
