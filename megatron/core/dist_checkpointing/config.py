"""Where checkpoints are written and read, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

import fsspec

from megatron.core.options import YEAR_SECONDS, ConfigError, check_options, expect, option

FSDP_DTENSOR, TORCH_DCP = "fsdp_dtensor", "torch_dcp"
# Megatron's names: keys are unexpected that the model expects but the checkpoint lacks.
STRICTNESS = ("raise_all", "raise_unexpected")
_OUR_FORMAT = {"ckpt_format": FSDP_DTENSOR}
_LOADS = ("load", "save")  # a run may resume from either


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading. Names and defaults are Megatron's."""

    save: str | None = option(
        None, "folder to save checkpoints in", noun="a folder", may_change=True
    )
    save_interval: int | None = option(
        None,
        "iterations between checkpoints; the end of a run always saves",
        more_than=0,
        requires="save",
        may_change=True,
    )
    save_interval_seconds: float | None = option(
        None,
        "seconds between checkpoints, besides --save-interval: whichever comes first",
        more_than=0,
        requires="save",
        may_change=True,
    )
    save_interval_epochs: float | None = option(
        None,
        "passes through the training data between checkpoints, besides the others",
        more_than=0,
        requires="save",
        may_change=True,
    )
    async_save: bool = option(
        False,
        "write checkpoints while training goes on",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
        may_change=True,
    )
    async_save_busy: str = option(
        "wait",
        "when a save is due and the one before is still being written: wait, or skip",
        choices=("wait", "skip"),
        no_effect_unless="async_save",
    )
    save_staging_share: float = option(
        0.5,
        "share of the free host memory to which --async-save copies a GPU's states, so that "
        "training waits for no disk",
        at_least=0,
        less_than=1,
        requires="save",
        no_effect_unless="async_save",
    )
    save_keep_last: int | None = option(
        None,
        "published checkpoints to keep, the newest; default: all, or one with "
        "--save-retain-interval",
        at_least=1,
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of the iterations divisible by this, besides the newest",
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
        "end the run when a checkpoint could not be saved",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
    )
    save_hf_weights: str | None = option(
        None,
        "save a folder hf/ in each checkpoint, for from_pretrained; its weights in bf16, or fp32",
        choices=("bf16", "fp32"),
        bare="bf16",
        requires="save",
        no_effect_unless=_OUR_FORMAT,
        may_change=True,
    )
    save_hf_interval: int = option(
        1,
        "of how many saves one has hf/; the one at the end of a run always has it",
        at_least=1,
        requires="save_hf_weights",
        may_change=True,
    )
    save_optim: bool = option(True, "save the optimizer's state", requires="save")
    load: str | None = option(
        None,
        "folder to load the newest checkpoint from; fresh start if it holds none",
        noun="a folder",
        may_change=True,
    )
    load_optim: bool = option(True, "load the optimizer's state", requires=_LOADS)
    load_rng: bool = option(True, "load the state of the random generators", requires=_LOADS)
    finetune: bool = option(False, "load weights only, and begin at iteration 0", requires="load")
    exit_on_missing_checkpoint: bool = option(
        False, "end the run if --load holds no checkpoint", requires="load"
    )
    ckpt_step: int | None = option(
        None, "iteration to load instead of the newest", at_least=0, requires="load"
    )
    verify_checkpoint: bool = option(
        True, "hold what is loaded against the digests that were saved with it", requires=_LOADS
    )
    dist_ckpt_strictness: str = option(
        "raise_all",
        "raise_all: the checkpoint has the model's keys and no others; raise_unexpected: it may "
        "have others",
        choices=STRICTNESS,
        requires=_LOADS,
    )
    load_skip_keys: tuple[str, ...] = option(
        (), "patterns of keys that are neither loaded nor missed", requires=_LOADS
    )
    hf_model: str | None = option(
        None,
        "folder of a Hugging Face model: its architecture and tokenizer, and the weights that a "
        "run without a checkpoint begins with",
        noun="a folder",
        may_change=True,
    )
    hf_init_random: bool = option(
        False, "draw the initial weights instead of taking those of --hf-model", requires="hf_model"
    )
    load_dcp: str | None = option(
        None,
        "folder that another program wrote with torch.distributed.checkpoint: the weights, and "
        "moments if there are any, that a run without a checkpoint begins with",
        noun="a folder",
        requires="dcp_key_map",
        may_change=True,
    )
    dcp_key_map: str | None = option(
        None,
        "YAML file that says which tensors of --load-dcp are this model's",
        noun="a table",
        requires="load_dcp",
        may_change=True,
    )
    ckpt_format: str | None = option(
        None,
        "fsdp_dtensor: written without communication; torch_dcp: by PyTorch; default: "
        "fsdp_dtensor, torch_dcp with --use-torch-fsdp2. What is loaded may have either",
        choices=(FSDP_DTENSOR, TORCH_DCP),
        may_change=True,
    )

    def __post_init__(self) -> None:
        check_options(self)

    def resolve(self, default_format: str) -> CheckpointConfig:
        """With the format chosen, if none was named. ConfigError for a flag or a folder that this
        format cannot honour.
        """
        config = replace(self, ckpt_format=self.ckpt_format or default_format)
        save = config.save
        is_folder = save is None or "://" not in save or save.startswith("file://")
        expect(
            is_folder or config.ckpt_format != TORCH_DCP,
            "--save",
            f"a folder of a file system with --ckpt-format {TORCH_DCP}",
            save,
        )
        expect(
            is_folder or config.save_hf_weights is None,
            "--save",
            "a folder of a file system with --save-hf-weights, since ranks write at offsets within "
            "one file; `python -m tools.checkpoint export` makes such a folder of any checkpoint",
            save,
        )
        places = (("--save", save), ("--load", config.load), ("--load-dcp", config.load_dcp))
        for flag, place in places:
            check_protocol(place or "", f"{flag}: ")
        return config


def check_protocol(place: str, prefix: str = "") -> None:
    """ConfigError for a URL whose protocol fsspec does not know, or lacks the package for.

    Args:
        place: a folder, or an fsspec URL; "simplecache::s3://bucket/run" has two protocols.
        prefix: what the message begins with.
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
            raise ConfigError(
                f"{prefix}expected a protocol that fsspec knows, got {place}."
            ) from None
