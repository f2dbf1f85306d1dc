"""Trains by transformers' `Trainer`."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import Dataset
from transformers import Trainer, TrainerCallback, TrainingArguments

from tests.peers.helpers.accelerate_job import allow_fsdp_on_cpu, forget_accelerators
from tests.peers.helpers.peer_rank import (
    LENGTH,
    NUM_STEPS,
    OPTIMIZERS,
    SAVED_AFTER,
    VOCABULARY,
    common_directory,
    serve,
    tiny_llama,
    use_engine,
)

MakeTrainer = Callable[[TrainingArguments, "Numbers"], Trainer]


class Numbers(TrainerCallback):
    """Collects losses and norms of the gradients."""

    def __init__(self) -> None:
        self.numbers: list[float] = []

    def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
        if "loss" in logs:
            self.numbers += [float(logs["loss"]), float(logs["grad_norm"])]


class _Tokens(Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(index)
        tokens = torch.randint(0, VOCABULARY, (LENGTH,), generator=generator)
        return {"input_ids": tokens, "labels": tokens}


def add_adapters(model: nn.Module) -> nn.Module:
    torch.manual_seed(5)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))


def run_trainers(
    arguments: type[TrainingArguments],
    make: MakeTrainer,
    fsdp: dict[str, Any] | None,
    is_resumed: bool,
    **options: Any,
) -> list[float]:
    """Losses and norms of each step; with `is_resumed`, of a run up to a checkpoint and of one that
    continues there.
    """
    forget_accelerators()
    directory = common_directory()

    def numbers_of(max_steps: int, checkpoint: Path | None) -> list[float]:
        settings = arguments(
            directory,
            use_cpu=True,
            fsdp=fsdp is not None,
            fsdp_config=fsdp,
            per_device_train_batch_size=2,
            max_steps=NUM_STEPS,
            logging_steps=1,
            save_strategy="steps" if is_resumed else "no",
            save_steps=SAVED_AFTER,
            report_to=[],
            disable_tqdm=True,
            learning_rate=1e-2,
            lr_scheduler_type="constant",
            max_grad_norm=0.5,
            seed=0,
            **options,
        )
        if fsdp is not None:
            allow_fsdp_on_cpu()  # now: the arguments start accelerate's state anew
        collected = Numbers()
        trainer = make(settings, collected)
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
        return collected.numbers[: 2 * max_steps]

    if not is_resumed:
        return numbers_of(NUM_STEPS, None)
    before = numbers_of(SAVED_AFTER, None)
    checkpoint = Path(directory) / f"checkpoint-{SAVED_AFTER}"
    return before + numbers_of(NUM_STEPS - SAVED_AFTER, checkpoint)


def train(
    engine: str,
    optimizer: str,
    fsdp: dict[str, Any] | None,
    has_adapters: bool = False,
    is_resumed: bool = False,
    **options: Any,
) -> list[float]:
    """Losses and norms of each step."""
    use_engine(engine)

    def make(arguments: TrainingArguments, collected: Numbers) -> Trainer:
        model = tiny_llama()
        return Trainer(
            add_adapters(model) if has_adapters else model,
            arguments,
            train_dataset=_Tokens(),
            # Its `optimizers` argument is not for FSDP.
            optimizer_cls_and_kwargs=OPTIMIZERS[optimizer],
            callbacks=[collected],
        )

    return run_trainers(TrainingArguments, make, fsdp, is_resumed, **options)


if __name__ == "__main__":
    serve(train)
