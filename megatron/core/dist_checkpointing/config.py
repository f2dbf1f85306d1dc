"""The options of saving and loading checkpoints."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fsspec
from fsspec.implementations.local import LocalFileSystem

from megatron.core.options import YEAR_SECONDS, ConfigError, check_options, expect, option

MAX_SHARD_BYTES = 5 * 10**9  # default limit of the tensors in one file of an export
FSDP_DTENSOR, TORCH_DCP = "fsdp_dtensor", "torch_dcp"
# Megatron's names: keys are unexpected that the model expects but the checkpoint lacks.
STRICTNESS = ("raise_all", "raise_unexpected")
_OUR_FORMAT = {"ckpt_format": FSDP_DTENSOR}
_LOADS = ("load", "save")  # a run may resume from either


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading. Names and defaults are Megatron's."""

    save: str | None = option(
        None,
        "directory or URL to save checkpoints in (default: save none)",
        metavar="DIR",
        noun="a directory",
        may_change=True,
    )
    save_interval: int | None = option(
        None,
        "iterations between checkpoints; a run also saves at its end (default: only at the end)",
        more_than=0,
        requires="save",
        may_change=True,
    )
    save_interval_seconds: float | None = option(
        None,
        "seconds between checkpoints, in addition to --save-interval (default: none)",
        more_than=0,
        requires="save",
        may_change=True,
    )
    save_interval_epochs: float | None = option(
        None,
        "epochs (passes through the training data) between checkpoints, in addition to "
        "--save-interval (default: none)",
        more_than=0,
        requires="save",
        may_change=True,
    )
    async_save: bool = option(
        False,
        "write checkpoints in the background while training continues",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
        may_change=True,
    )
    async_save_busy: str = option(
        "wait",
        "if a save is due while the previous one is still being written: wait for it, or skip "
        "this one",
        choices=("wait", "skip"),
        no_effect_unless="async_save",
    )
    save_staging_share: float = option(
        0.5,
        "share of the free host memory, below 1, to which --async-save copies a GPU's states so"
        " that training does not wait for the disk",
        at_least=0,
        less_than=1,
        requires="save",
        no_effect_unless="async_save",
    )
    save_keep_last: int | None = option(
        None,
        "how many of the newest checkpoints to keep (default: all; 1 with --save-retain-interval)",
        at_least=1,
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    save_retain_interval: int | None = option(
        None,
        "keep checkpoints of iterations divisible by this, in addition to the newest (default: "
        "all)",
        at_least=1,
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    save_timeout_minutes: float = option(
        10.0,
        "minutes that ranks wait for each other's files in a save",
        more_than=0,
        ceiling=YEAR_SECONDS / 60,
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    exit_on_save_failure: bool = option(
        False,
        "end the run if a checkpoint cannot be saved, instead of continuing without it",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    save_hf_weights: str | None = option(
        None,
        "also save each checkpoint in Hugging Face's format, in its directory hf/, with weights"
        " of this dtype; bf16 if none is named (default: not saved)",
        choices=("bf16", "fp32"),
        bare="bf16",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
        may_change=True,
    )
    save_hf_interval: int = option(
        1,
        "write hf/ in every N-th save; the save at the end of a run always has it",
        at_least=1,
        requires="save_hf_weights",
        may_change=True,
    )
    save_optim: bool = option(True, "save the optimizer's states", requires="save")
    load: str | None = option(
        None,
        "directory or URL of checkpoints, of which the newest is loaded; if it has no checkpoint, "
        "the run starts from scratch",
        metavar="DIR",
        noun="a directory",
        may_change=True,
    )
    load_optim: bool = option(True, "load the optimizer's states", requires=_LOADS)
    load_rng: bool = option(
        True, "load the states of the random number generators", requires=_LOADS
    )
    finetune: bool = option(
        False, "load only the weights, and start at iteration 0", requires="load"
    )
    exit_on_missing_checkpoint: bool = option(
        False, "end the run if --load has no checkpoint", requires="load"
    )
    ckpt_step: int | None = option(
        None,
        "iteration of the checkpoint to load (default: the newest)",
        at_least=0,
        requires="load",
    )
    verify_checkpoint: bool = option(
        True, "check loaded data against the checksums saved with it", requires=_LOADS
    )
    dist_ckpt_strictness: str = option(
        "raise_all",
        "raise_all: the checkpoint must have the model's keys and no others; raise_unexpected: "
        "it may have others",
        choices=STRICTNESS,
        requires=_LOADS,
    )
    load_skip_keys: tuple[str, ...] = option(
        (),
        "patterns of checkpoint keys, as in a shell, that are not loaded and may be missing "
        "(default: none)",
        metavar="PATTERN",
        requires=_LOADS,
    )
    hf_model: str | None = option(
        None,
        "directory of a Hugging Face model: sets architecture and tokenizer, and gives the "
        "initial weights of a run that loads no checkpoint",
        metavar="DIR",
        noun="a directory",
        may_change=True,
    )
    hf_init_random: bool = option(
        False, "initialize the weights at random instead of from --hf-model", requires="hf_model"
    )
    load_dcp: str | None = option(
        None,
        "directory that another program saved with torch.distributed.checkpoint: gives the "
        "initial weights, and moments if it has them, of a run that loads no checkpoint",
        metavar="DIR",
        noun="a directory",
        requires="dcp_key_map",
        may_change=True,
    )
    dcp_key_map: str | None = option(
        None,
        "YAML file that maps the tensors of --load-dcp to this model's",
        metavar="FILE",
        noun="a table",
        requires="load_dcp",
        may_change=True,
    )
    ckpt_format: str | None = option(
        None,
        "format of saved checkpoints: fsdp_dtensor is written without communication, torch_dcp "
        "by PyTorch; both can be loaded (default: fsdp_dtensor; torch_dcp with "
        "--use-torch-fsdp2)",
        choices=(FSDP_DTENSOR, TORCH_DCP),
        may_change=True,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def resolve(self, default_format: str) -> CheckpointConfig:
        """With the format chosen, if none was named. ConfigError for a flag or a directory that
        this format cannot honour.
        """
        config = replace(self, ckpt_format=self.ckpt_format or default_format)
        save = config.save
        places = (("--save", save), ("--load", config.load), ("--load-dcp", config.load_dcp))
        for flag, place in places:
            check_protocol(place or "", f"{flag}: ")

        is_folder = save is None or local_folder(save) is not None
        expect(
            is_folder or config.ckpt_format != TORCH_DCP,
            "--save",
            f"a directory of a file system with --ckpt-format {TORCH_DCP}",
            save,
        )
        expect(
            is_folder or config.save_hf_weights is None,
            "--save",
            "a directory of a file system with --save-hf-weights, since ranks write at offsets "
            "within one file; `python -m megatron_hybrid checkpoint export` converts checkpoints "
            "of remote stores",
            save,
        )
        return config


def local_folder(place: str) -> str | None:
    """The path of a directory in the file system; None if `place` is the URL of a remote store."""
    if "://" not in place:
        return place
    file_system, path = fsspec.url_to_fs(place)
    return path if isinstance(file_system, LocalFileSystem) else None


def check_protocol(place: str, prefix: str = "") -> None:
    """ConfigError for a URL whose protocol is unknown to fsspec, or lacks a package.

    Args:
        place: a directory, or an fsspec URL; "simplecache::s3://bucket/run" has two protocols.
        prefix: of the message.
    """
    if "://" not in place:
        return
    for part in place.split("::"):
        protocol = part.partition("://")[0]
        try:
            fsspec.get_filesystem_class(protocol)
        except ImportError as error:
            raise ConfigError(
                f"{prefix}expected the package that fsspec needs for {place}, got none ({error})."
            ) from None
        except ValueError:
            raise ConfigError(f"{prefix}expected a protocol of fsspec, got {place}.") from None
