"""Where checkpoints are written and read, and what they hold."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, expect, option


@dataclass(frozen=True)
class CheckpointConfig:
    """Saving and loading. Names and defaults are Megatron's."""

    save: str | None = option(None, "folder to save checkpoints in")
    save_interval: int | None = option(
        None, "iterations between checkpoints; the end of a run always saves", more_than=0
    )
    save_optim: bool = option(True, "save the optimizer's state")
    load: str | None = option(None, "folder to load the newest checkpoint from; fresh start if it holds none")
    load_optim: bool = option(True, "load the optimizer's state")
    load_rng: bool = option(True, "load the state of the random generators")
    finetune: bool = option(False, "load weights only, and begin at iteration 0")
    exit_on_missing_checkpoint: bool = option(False, "end the run if --load holds no checkpoint")
    ckpt_step: int | None = option(None, "iteration to load instead of the newest", at_least=0)
    ckpt_format: str = option("torch_dcp", "torch_dcp: PyTorch distributed checkpoints", choices=("torch_dcp",))

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
            },
        )
        self._expect_folder(
            "save", {"--save-interval": self.save_interval is not None, "--no-save-optim": not self.save_optim}
        )

    def _expect_folder(self, name: str, flags: dict[str, bool]) -> None:
        """ConfigError if one of `flags` is given (true) without the folder that it says something about."""
        for flag, is_given in flags.items():
            folder = getattr(self, name)
            expect(folder is not None or not is_given, f"--{name}", f"a folder, since {flag} is given", folder)
