"""What the benchmarks of training steps share: a GPT, the sides that train it, and how their steps
are timed.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers import report
from megatron.core.device import Device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig

SEED = 0


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's size, the batch's and how long to measure."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)


def model_on_meta(arguments: argparse.Namespace) -> GPTModel:
    """A GPT of the size that the arguments say, without memory."""
    config = TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    with torch.device("meta"):
        return GPTModel(config, arguments.vocabulary)


def batch_of(
    arguments: argparse.Namespace, rank: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens and labels: [micro batch, sequence], int64."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    text = torch.randint(arguments.vocabulary, shape, generator=generator).to(device.torch_device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Side:
    """One of the things compared: a model, its optimizer if it has one, and what a step is."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.model = model
        self.optimizer = optimizer

    def step(self, tokens: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Forward, backward and, with an optimizer, its step. Returns the loss, still on the
        device.
        """
        loss = self.model(tokens, labels).mean()
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.model.zero_grad()
        return loss.detach()


def synchronize() -> None:
    """Waits for the device, where there is one to wait for."""
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()


def measure(
    sides: dict[str, Side], batch: tuple[torch.Tensor, torch.Tensor], num_rounds: int
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """(milliseconds of each side's steps, its losses). The first two rounds warm up and are not
    timed.
    """
    times: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number, name in enumerate(report.schedule(list(sides), num_rounds + 2, seed=SEED)):
        dist.barrier()
        start = time.perf_counter()
        loss = sides[name].step(*batch)
        synchronize()
        elapsed = (time.perf_counter() - start) * 1e3
        losses[name].append(float(loss))
        if number >= 2 * len(sides):
            times[name].append(elapsed)
    return times, losses


class Stopwatch:
    """Adds up how long functions take, by name; in whichever thread, with the device waited for."""

    def __init__(self) -> None:
        self.totals: dict[str, float] = {}
        self._lock = threading.Lock()

    @contextmanager
    def timing(self, name: str) -> Iterator[None]:
        synchronize()
        start = time.perf_counter()
        yield
        synchronize()
        with self._lock:
            self.totals[name] = self.totals.get(name, 0.0) + (time.perf_counter() - start) * 1e3

    def wrap(self, owner: Any, function: str, name: str) -> Callable[[], None]:
        """Times every call of `owner.function`; returns what undoes that."""
        original = getattr(owner, function)

        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.timing(name):
                return original(*args, **kwargs)

        setattr(owner, function, timed)
        return lambda: setattr(owner, function, original)
