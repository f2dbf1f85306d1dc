"""Which data to train on, how it is split, and how it is cut into samples."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from megatron.core.options import ConfigError, check_options, expect, option, shown


class BlendPart(NamedTuple):
    """One dataset of a blend."""

    weight: float  # only proportions count
    prefix: str


@dataclass(frozen=True)
class Boundaries:
    """The effects of an end of document, as Megatron's flags have it.

    Attributes:
        reset_attention_mask: tokens see their own document only.
        reset_position_ids: positions are counted from the beginning of each document.
        eod_mask_loss: what follows an end of document is not learned.
    """

    reset_attention_mask: bool = False
    reset_position_ids: bool = False
    eod_mask_loss: bool = False

    def __bool__(self) -> bool:
        return self.reset_attention_mask or self.reset_position_ids or self.eod_mask_loss


@dataclass(frozen=True)
class GPTDatasetConfig:
    """Data of a run. Raises ConfigError for anything that cannot be honoured, files that do not
    exist included.
    """

    seq_length: int = option(help="tokens per training sample", at_least=1, ceiling=2**26)
    data_path: tuple[str, ...] | None = option(
        None,
        "token files PREFIX.bin and PREFIX.idx, or a blend: WEIGHT PREFIX WEIGHT PREFIX ...",
        metavar="PREFIX",
    )
    split: str = option(
        "969,30,1",
        "shares of the documents for training, validation and test, in any unit; omitted shares"
        " are 0",
        metavar="A,B,C",
    )
    data_cache_path: str | None = option(
        None,
        "directory for sample indices (default: cache/GPTDataset_indices next to the data)",
        metavar="DIR",
    )
    mock_data: bool = option(False, "train on generated text instead of --data-path")
    reset_attention_mask: bool = option(
        False,
        "let tokens attend to their own document only; an end-of-document token ends one",
    )
    reset_position_ids: bool = option(False, "count positions from the start of each document")
    eod_mask_loss: bool = option(
        False, "leave the prediction of the token after an end-of-document token out of the loss"
    )
    sft: bool = option(
        False,
        "train on conversations tokenized by `preprocess --chat`: the loss has the assistant's "
        "tokens only, and conversations that share a row do not attend to each other",
    )
    sft_truncate: bool = option(
        False,
        "truncate conversations that are longer than --seq-length, instead of raising an error; "
        "conversations without the assistant's tokens after truncation are dropped",
        requires="sft",
    )
    num_workers: int = option(
        2,
        "processes per rank that read samples ahead; 0: the training process reads them",
        at_least=0,
        ceiling=2**10,
    )

    def __post_init__(self) -> None:
        check_options(self)
        # Launch scripts that keep `--split '99,1,0'` in an array of bash pass the quotes on.
        object.__setattr__(self, "split", self.split.strip("'\""))
        self._check_source()
        _ = self.split_fractions

        for part in self.blend:
            # Text with images has other files, and a description that is written last.
            if os.path.isfile(f"{part.prefix}.json"):  # noqa: PTH113
                continue
            for path in missing_files(part.prefix):
                expected = "a PREFIX with files PREFIX.bin and PREFIX.idx"
                expect(False, "--data-path", expected, str(path))

    def _check_source(self) -> None:
        if self.mock_data and self.data_path is not None:
            got = shown(" ".join(self.data_path))
            raise ConfigError(f"--data-path: expected no path with --mock-data, got {got}.")
        expect(
            self.mock_data or bool(self.data_path),
            "--data-path",
            "a PREFIX, or --mock-data",
            self.data_path,
        )
        expect(
            not (self.mock_data and self.boundaries),
            "--mock-data",
            "--data-path, whose documents end, with "
            "--reset-attention-mask, --reset-position-ids and --eod-mask-loss",
            "made-up text",
        )
        expect(not (self.mock_data and self.sft), "--sft", "--data-path", "made-up text")
        expect(
            not (self.sft and self.boundaries),
            "--sft",
            "none of --reset-attention-mask, --reset-position-ids and --eod-mask-loss, since "
            "conversations never attend to each other",
            "at least one",
        )

    @property
    def boundaries(self) -> Boundaries:
        """The effects of an end of document."""
        return Boundaries(self.reset_attention_mask, self.reset_position_ids, self.eod_mask_loss)

    @property
    def split_fractions(self) -> tuple[float, float, float]:
        """Shares of training, validation and test; they add up to 1. Missing ones are 0, as in
        Megatron.
        """
        expected = "up to three non-negative numbers with a positive sum"
        try:
            shares = [float(share) for share in self.split.split(",")]
        except ValueError:
            shares = []

        # The sum of finite numbers may be infinite, and no share of that is more than 0.
        is_split = (
            len(shares) <= 3 and all(share >= 0 for share in shares) and 0 < sum(shares) < math.inf
        )
        expect(is_split, "--split", expected, self.split)
        train, valid, test = (share / sum(shares) for share in [*shares, 0.0, 0.0][:3])
        return train, valid, test

    @property
    def blend(self) -> list[BlendPart]:
        """The datasets with their weights; one of weight 1 for a single PREFIX, none for mock
        data. A dataset that is given several times is one, with the sum of the weights: it would
        give each of its samples as often in a row.
        """
        given = self.data_path or ()
        if len(given) <= 1:
            return [BlendPart(1.0, prefix) for prefix in given]
        expect(len(given) % 2 == 0, "--data-path", "pairs of WEIGHT and PREFIX", " ".join(given))
        parts: dict[str, BlendPart] = {}
        for text, prefix in zip(given[::2], given[1::2], strict=True):
            place, weight = os.path.realpath(prefix), _parse_weight(text)
            first = parts.setdefault(place, BlendPart(0.0, prefix))
            parts[place] = BlendPart(first.weight + weight, first.prefix)
        return list(parts.values())


def bin_path(prefix: str | Path) -> Path:
    """The file of tokens."""
    return Path(f"{prefix}.bin")


def idx_path(prefix: str | Path) -> Path:
    """The file with the place of each sequence."""
    return Path(f"{prefix}.idx")


def missing_files(prefix: str) -> list[Path]:
    """The files of a dataset's tokens that are not there."""
    paths = (bin_path(prefix), idx_path(prefix))
    # Unlike Path.is_file, it is false where a name is too long or a directory is closed.
    return [path for path in paths if not os.path.isfile(path)]  # noqa: PTH113


def _parse_weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = math.nan
    expect(
        math.isfinite(weight) and weight > 0, "--data-path", "a WEIGHT > 0 before each PREFIX", text
    )
    return weight
