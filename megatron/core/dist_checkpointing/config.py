"""Where checkpoints are written and read, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron.core.options import check_options, expect, option

FSDP_DTENSOR, TORCH_DCP = "fsdp_dtensor", "torch_dcp"
# Megatron's names: keys are unexpected that the model expects but the checkpoint lacks.
STRICTNESS = ("raise_all", "raise_unexpected")


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading. Names and defaults are Megatron's."""

    save: str | None = option(None, "folder to save checkpoints in")
    save_interval: int | None = option(
        None, "iterations between checkpoints; the end of a run always saves", more_than=0
    )
    save_interval_seconds: float | None = option(
        None,
        "seconds between checkpoints, besides --save-interval: whichever comes first",
        more_than=0,
    )
    save_interval_epochs: float | None = option(
        None,
        "passes through the training data between checkpoints, besides the others",
        more_than=0,
    )
    async_save: bool = option(False, "write checkpoints while training goes on")
    async_save_busy: str = option(
        "wait",
        "when a save is due and the one before is still being written: wait, or skip",
        choices=("wait", "skip"),
    )
    save_staging_share: float = option(
        0.5,
        "share of the free host memory to which --async-save copies a GPU's states, so that "
        "training waits for no disk",
        at_least=0,
        less_than=1,
    )
    save_keep_last: int | None = option(
        None,
        "published checkpoints to keep, the newest; default: all, or one with "
        "--save-retain-interval",
        at_least=1,
    )
    save_retain_interval: int | None = option(
        None,
        "keep the checkpoints of the iterations divisible by this, besides the newest",
        at_least=1,
    )
    save_timeout_minutes: float = option(
        10.0, "minutes that ranks wait for each other's files in a save", more_than=0
    )
    exit_on_save_failure: bool = option(False, "end the run when a checkpoint could not be saved")
    save_optim: bool = option(True, "save the optimizer's state")
    load: str | None = option(
        None, "folder to load the newest checkpoint from; fresh start if it holds none"
    )
    load_optim: bool = option(True, "load the optimizer's state")
    load_rng: bool = option(True, "load the state of the random generators")
    finetune: bool = option(False, "load weights only, and begin at iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "end the run if --load holds no checkpoint")
    ckpt_step: int | None = option(None, "iteration to load instead of the newest", at_least=0)
    verify_checkpoint: bool = option(
        True, "hold what is loaded against the digests that were saved with it"
    )
    dist_ckpt_strictness: str = option(
        "raise_all",
        "raise_all: the checkpoint has the model's keys and no others; raise_unexpected: it may "
        "have others",
        choices=STRICTNESS,
    )
    load_skip_keys: tuple[str, ...] = option(
        (), "patterns of keys that are neither loaded nor missed"
    )
    ckpt_format: str | None = option(
        None,
        "fsdp_dtensor: written without communication; torch_dcp: by PyTorch; default: "
        "fsdp_dtensor, torch_dcp with "
        "--use-torch-fsdp2. What is loaded may have either",
        choices=(FSDP_DTENSOR, TORCH_DCP),
    )

    def __post_init__(self) -> None:
        check_options(self)
        self._expect_folder(
            "load",
            {
                "--ckpt-step": self.ckpt_step is not None,
                "--finetune": self.finetune,
                "--exit-on-missing-checkpoint": self.exit_on_missing_checkpoint,
                "--no-load-optim": not self.load_optim,
                "--no-load-rng": not self.load_rng,
                "--no-verify-checkpoint": not self.verify_checkpoint,
                "--dist-ckpt-strictness": self.dist_ckpt_strictness != "raise_all",
                "--load-skip-keys": bool(self.load_skip_keys),
            },
        )
        self._expect_folder(
            "save",
            {
                "--save-interval": self.save_interval is not None,
                "--save-interval-seconds": self.save_interval_seconds is not None,
                "--save-interval-epochs": self.save_interval_epochs is not None,
                "--no-save-optim": not self.save_optim,
                "--async-save": self.async_save,
                "--save-staging-share": self.save_staging_share != 0.5,
                "--save-keep-last": self.save_keep_last is not None,
                "--save-retain-interval": self.save_retain_interval is not None,
                "--save-timeout-minutes": self.save_timeout_minutes != 10.0,
                "--exit-on-save-failure": self.exit_on_save_failure,
            },
        )
        expect(
            self.async_save or self.async_save_busy == "wait",
            "--async-save-busy",
            "--async-save",
            self.async_save_busy,
        )
        is_default = self.save_staging_share == 0.5
        expect(
            self.async_save or is_default,
            "--save-staging-share",
            "--async-save",
            self.save_staging_share,
        )

    def resolve(self, default_format: str) -> CheckpointConfig:
        """With the format chosen, if none was named. ConfigError for flags that it does not
        honour.
        """
        config = replace(self, ckpt_format=self.ckpt_format or default_format)
        if config.ckpt_format == TORCH_DCP:
            is_folder = (
                self.save is None or "://" not in self.save or self.save.startswith("file://")
            )
            expect(
                is_folder,
                "--save",
                f"a folder of a file system with --ckpt-format {TORCH_DCP}",
                self.save,
            )
            for flag, is_given in (
                ("--async-save", self.async_save),
                ("--save-keep-last", self.save_keep_last is not None),
                ("--save-retain-interval", self.save_retain_interval is not None),
                ("--save-timeout-minutes", self.save_timeout_minutes != 10.0),
                ("--exit-on-save-failure", self.exit_on_save_failure),
            ):
                expect(not is_given, flag, f"--ckpt-format {FSDP_DTENSOR}", config.ckpt_format)
        return config

    def _expect_folder(self, name: str, flags: dict[str, bool]) -> None:
        """ConfigError if one of `flags` is given (true) without the folder that it says something
        about.
        """
        for flag, is_given in flags.items():
            folder = getattr(self, name)
            expect(
                folder is not None or not is_given,
                f"--{name}",
                f"a folder, since {flag} is given",
                folder,
            )
