"""Samples of a synthetic language, for runs without data: a model can predict it, and no file is
read.
"""

from __future__ import annotations

import numpy as np
import torch

from megatron.core.datasets.permutation import derive_key, mix64
from megatron.core.datasets.sample_dataset import NumberedDataset

_ALPHABET = 512  # tokens in use at most: few, so that each is seen often in a short run
_NUM_STRIDES = 8
_NOISE = 1 / 32  # share of tokens drawn at random


class MockGPTDataset(NumberedDataset):
    """Noisy arithmetic progressions: each token follows the one before by the sample's stride.

    A sample counts through the first min(vocab_size, 512) tokens in steps of one size, 1 to 8, and
    now and then jumps to a random token and counts on from there. The steps a token may be followed
    by are soon learnt, the stride of the sample at hand only from its context; the jumps cannot be
    predicted.

    Args:
        vocab_size: token ids are below it; at least 2.
        seq_length: tokens of a sample, and as many labels.
        num_samples: length of the dataset; the content of a sample does not depend on it.
        seed: another seed gives other samples of the same language.
    """

    def __init__(self, vocab_size: int, seq_length: int, num_samples: int, seed: int) -> None:
        if vocab_size < 2:
            raise ValueError(f"Expected a vocabulary of at least 2 tokens, got {vocab_size}.")
        self.num_samples = num_samples
        self.seq_length = seq_length
        self.seed = seed
        self._alphabet = min(vocab_size, _ALPHABET)

    def _sample(self, index: int) -> dict[str, torch.Tensor]:
        """Sample `index`: two views of one window."""
        num_tokens = self.seq_length + 1
        key = derive_key(self.seed, "mock", index)
        # Two random numbers per token, and one for the stride, of 53 bits: exact as floats.
        numbers = np.arange(2 * num_tokens + 1, dtype=np.uint64)
        draws = mix64(numbers, key) >> np.uint64(11)
        stride = 1 + int(draws[-1]) % _NUM_STRIDES
        is_jump = draws[:num_tokens] < np.uint64(_NOISE * (1 << 53))
        is_jump[0] = True
        targets = (draws[num_tokens:-1] % np.uint64(self._alphabet)).astype(np.int64)

        places = np.arange(num_tokens)
        last_jump = np.maximum.accumulate(np.where(is_jump, places, 0))
        window = torch.from_numpy(
            (targets[last_jump] + stride * (places - last_jump)) % self._alphabet
        )
        return {"tokens": window[:-1], "labels": window[1:]}
