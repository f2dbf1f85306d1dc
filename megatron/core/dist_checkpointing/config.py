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
        for name in ("ckpt_step", "finetune", "exit_on_missing_checkpoint"):
            if getattr(self, name) not in (None, False):
                expect(
                    self.load is not None, "--load", f"a folder, since --{name.replace('_', '-')} is given", self.load
                )
        expect(
            self.save_interval is None or self.save is not None,
            "--save",
            "a folder, since --save-interval is given",
            self.save,
        )
