"""Tokenizers that end processes. Importing them in a worker is fast."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from megatron.training.tokenizer import ByteTokenizer


class KilledTokenizer(ByteTokenizer):
    """Kills its worker, as the system does when memory runs out."""

    def tokenize(self, text: str) -> list[int]:
        if text == "fatal":
            os.kill(os.getpid(), signal.SIGKILL)
        return super().tokenize(text)


class InterruptedTokenizer(ByteTokenizer):
    """Interrupts all processes of the terminal, once, when two workers are at work."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def tokenize(self, text: str) -> list[int]:
        (self.folder / f"{os.getpid()}.worker").touch()
        deadline = time.monotonic() + 60
        while len(list(self.folder.glob("*.worker"))) < 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        try:
            (self.folder / "interrupted").touch(exist_ok=False)
        except FileExistsError:
            pass
        else:
            os.killpg(os.getpgrp(), signal.SIGINT)
            (self.folder / "unharmed").touch()
        return super().tokenize(text)
