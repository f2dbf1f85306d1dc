"""Shared code of the benchmarks of training steps: a GPT, the sides that train it, and the timing
of their steps.
"""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.helpers import report
from benchmarks.helpers.models import SEED, on_meta
from megatron.core.device import Device
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The model's size, the batch's and how long to measure."""
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--vocabulary", type=int, default=8192)
    parser.add_argument("--micro-batch", type=int, default=2)
    parser.add_argument("--sequence", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=20)


def model_on_meta(arguments: argparse.Namespace) -> GPTModel:
    """A GPT of the given size, without memory."""
    config = TransformerConfig(
        num_layers=arguments.layers,
        hidden_size=arguments.hidden,
        num_attention_heads=arguments.hidden // 64,
        normalization="RMSNorm",
        attention_dropout=0.0,
        hidden_dropout=0.0,
    )
    return on_meta(config, arguments.vocabulary)


def batch_of(
    arguments: argparse.Namespace, rank: int, device: Device
) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens and labels: [micro batch, sequence], int64."""
    generator = torch.Generator().manual_seed(rank)
    shape = (arguments.micro_batch, arguments.sequence + 1)
    text = torch.randint(arguments.vocabulary, shape, generator=generator).to(device.torch_device)
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


class Side:
    """A side of the comparison: a model, its optimizer if it has one, and its training step."""

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


class Steps(NamedTuple):
    """Measurements of each side's steps."""

    milliseconds: dict[str, list[float]]
    losses: dict[str, list[float]]  # of warming up, too


def measure(
    sides: dict[str, Side], batch: tuple[torch.Tensor, torch.Tensor], num_rounds: int
) -> Steps:
    """Each side's steps. The first two rounds warm up and are not timed."""
    losses: dict[str, list[float]] = {name: [] for name in sides}

    def timed(name: str) -> float:
        dist.barrier()
        start = time.perf_counter()
        loss = sides[name].step(*batch)
        synchronize()
        elapsed = time.perf_counter() - start
        losses[name].append(float(loss))
        return elapsed * 1e3

    works = {name: partial(timed, name) for name in sides}
    return Steps(report.interleaved(works, num_rounds, warm_up=2, seed=SEED), losses)


def mean_parts(
    side: Side,
    batch: tuple[torch.Tensor, torch.Tensor],
    num_steps: int,
    parts: Sequence[tuple[Any, str, str]],
) -> dict[str, float]:
    """Mean milliseconds a step of parts of it, and of the whole "step".

    Args:
        parts: (owner, function, name of the part); parts of one name are added up.
    """
    watch = Stopwatch()
    wrapped = [watch.wrap(*part) for part in parts]
    dist.barrier()
    for _ in range(num_steps):
        with watch.timing("step"):
            side.step(*batch)
    for undo in wrapped:
        undo()
    return {name: total / num_steps for name, total in watch.totals.items()}


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
