"""Samples whose documents are kept apart: after an end of document comes another one."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron.core.datasets.config import Boundaries
from megatron.core.datasets.sample_dataset import NumberedDataset, SampleDataset, collate_rows


class DelimitedDataset(NumberedDataset):
    """The samples of a dataset with their documents' places, for models and losses.

    A document ends with its end-of-document token, which belongs to it. The
    document of a sample's last token ends with the sample.

    Args:
        samples: of "tokens" and "labels", [seq_length] int64 each.
        eod: the token that ends a document.
    """

    # Lengths are of no fixed number.
    collate = staticmethod(collate_rows)

    def __init__(self, samples: SampleDataset, eod: int, boundaries: Boundaries) -> None:
        self.samples = samples
        self.num_samples = len(samples)
        self.eod = eod
        self.boundaries = boundaries

    def _sample(self, index: int) -> dict[str, Any]:
        """Sample `index`.

        Returns:
            "tokens" and "labels" as they are. With --reset-attention-mask "lengths": of the
            documents, a tuple. With --reset-position-ids "positions": [seq_length] int64. With
            --eod-mask-loss "loss_mask": [seq_length] fp32, 1 where the label is to be learned.
        """
        sample = dict(self.samples[index])
        tokens: Tensor = sample["tokens"]
        is_end = tokens == self.eod
        if self.boundaries.eod_mask_loss:
            sample["loss_mask"] = (~is_end).float()

        begins = torch.cat((torch.zeros(1, dtype=torch.int64), is_end.nonzero().squeeze(1) + 1))
        begins = begins[begins < len(tokens)]
        lengths = begins.diff(append=torch.tensor([len(tokens)]))
        if self.boundaries.reset_attention_mask:
            sample["lengths"] = tuple(lengths.tolist())
        if self.boundaries.reset_position_ids:
            sample["positions"] = torch.arange(len(tokens)) - begins.repeat_interleave(lengths)
        return sample
