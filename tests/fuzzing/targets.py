"""Prepared files as runs and tools read them. In the worker's process.

A target makes its intact files with the code that a run makes them with, and reads them through the
entrance that a run uses. Its result is a digest of the loaded bits.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from megatron.core.datasets.builder import build_gpt_datasets
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.datasets.data_files import IndexedDatasetError
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.device import Device
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.dist_checkpointing.save.manager import CheckpointManager
from megatron.core.dist_checkpointing.store import LocalStore, track
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.dtensors import local_tensor
from megatron.core.mesh import build_mesh
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training.arguments import parse_config
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from megatron.training.checkpoint.loading import load_run
from megatron.training.checkpoint.run_state import RunState, save_torch_dcp
from megatron.training.config import EngineConfig
from megatron.training.engines import build_engine
from megatron.training.health.events import (
    METRICS_FILE,
    EarlierFindings,
    EventLog,
    read_events,
    read_heartbeat,
)
from megatron.training.health.jsonl import JsonLines
from megatron.training.rng import rng_state, seed_all
from megatron.training.tokenizer import (
    HuggingFaceTokenizer,
    TokenizerConfig,
    build_tokenizer,
    padded_vocab_size,
    train_bpe,
)
from megatron_hybrid import run_status
from megatron_hybrid.checkpoint import command as checkpoint_tool
from megatron_hybrid.report.page import RunPage
from tests.fuzzing.target import Target

ITERATION = 3
NAME = checkpoint_name(ITERATION)
CPU = Device("cpu")
SCHEDULE = LRScheduleConfig(
    lr=1e-2, lr_decay_style="cosine", use_checkpoint_opt_param_scheduler=True
)
POISON = 7.0  # every number before a load


def start() -> None:
    """Once in the process, before anything is limited."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def digest(value: object) -> str:
    """Of plain data and tensors, in order."""
    state = hashlib.sha256()
    _update(state, value)
    return state.hexdigest()[:32]


def _update(state: Any, value: object) -> None:
    if isinstance(value, torch.Tensor):
        state.update(f"{value.dtype}{tuple(value.shape)}".encode())
        flat = value.detach().clone(memory_format=torch.contiguous_format).reshape(-1)
        state.update(flat.view(torch.uint8).numpy().tobytes())
    elif isinstance(value, Mapping):
        for key, item in value.items():
            state.update(repr(key).encode())
            _update(state, item)
    elif isinstance(value, list | tuple):
        state.update(str(len(value)).encode())
        for item in value:
            _update(state, item)
    else:
        state.update(repr(value).encode())


# Checkpoints of a run.


class Net(nn.Module):
    """Matrices and vectors: two groups of the optimizer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.body = nn.Linear(6, 10)
        self.head = nn.Linear(10, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


class Run(Target):
    """`--load` of a directory of checkpoints."""

    errors = (CheckpointError, ConfigError)

    def __init__(self, name: str, ckpt_format: str, **flags: Any) -> None:
        super().__init__(name)
        self._format = ckpt_format
        self._flags = flags

    @functools.cached_property
    def _state(self) -> RunState:
        parallel = DataParallelConfig(use_torch_fsdp2=self._format == "torch_dcp")
        config = EngineConfig(OptimizerConfig(), SCHEDULE, parallel, train_iters=8)
        engine = build_engine(config, CPU, build_mesh("cpu", 1))
        engine.initialize(Net())
        x = torch.arange(24, dtype=torch.float32).reshape(4, 6) / 24
        seed_all(3, 0)

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            return F.mse_loss(model(batch["x"]), batch["x"].sum(1, keepdim=True))

        for _ in range(ITERATION):
            engine.train_batch([{"x": x}], loss)
        # Kept, since an engine does not show it after a load that broke off.
        return engine.state

    def prepare(self) -> None:
        _ = self._state

    def make(self, folder: Path) -> None:
        state = self._state
        if self._format == "torch_dcp":
            save_torch_dcp(str(folder), state, CPU, state.info(), with_optim=True)
            return
        store = LocalStore(folder)
        with CheckpointManager(store, CPU, 0, 1, "0123456789abcdef") as manager:
            manager.save(ITERATION, state.contents(CPU, with_optim=True), state.info().to_plain())
            manager.finish()
        track(store, ITERATION)

    def reset(self) -> None:
        state = self._state
        for tensor in self._tensors().values():
            with torch.no_grad():
                tensor.fill_(POISON)
        for group in state.optimizer.optimizer.param_groups:
            group["weight_decay"], group["betas"], group["eps"] = 0.25, (0.7, 0.9), 1e-6
        vars(state.step_info).update(dict.fromkeys(vars(state.step_info), 70))
        seed_all(99, 0)

    def _tensors(self) -> dict[str, torch.Tensor]:
        """Of the model and the optimizer, as they lie in memory."""
        state, found = self._state, {}
        for name, parameter in state.model.named_parameters():
            found[name] = local_tensor(parameter)
            for kind, value in state.optimizer.optimizer.state[parameter].items():
                if isinstance(value, torch.Tensor):
                    found[f"{name}.{kind}"] = local_tensor(value)
        return found

    def read(self, folder: Path) -> Any:
        config = CheckpointConfig(load=str(folder), **self._flags)
        loaded = load_run(config, SCHEDULE, self._state, CPU)
        if loaded is None:
            return {"nothing": True}
        info = None if loaded.info is None else digest(loaded.info.to_plain())
        return {"state": self.left(), "info": info, "path": Path(loaded.path).name}

    def left(self) -> str:
        state = self._state
        groups = state.optimizer.optimizer.param_groups
        options = [{**group, "params": None} for group in groups]
        counters, schedule = vars(state.step_info), state.schedule.state()
        return digest([self._tensors(), rng_state(CPU), options, counters, schedule])


class CheckpointTool(Target):
    """Each command of the program checkpoint on the same files."""

    def __init__(self, name: str, ckpt_format: str) -> None:
        super().__init__(name)
        self._run = Run(name, ckpt_format)
        self._format = ckpt_format

    def prepare(self) -> None:
        self._run.prepare()

    def make(self, folder: Path) -> None:
        self._run.make(folder)

    def read(self, folder: Path) -> Any:
        checkpoint = str(folder / NAME)
        commands = [["show", checkpoint], ["list", str(folder)], ["diff", checkpoint, checkpoint]]
        if self._format == "fsdp_dtensor":
            commands += [["verify", checkpoint]]
        return {command[0]: called(checkpoint_tool, command) for command in commands}


def called(tool: Any, arguments: list[str]) -> int:
    """The exit code of a tool: 2 with one line on stderr, or another with none."""
    err = io.StringIO()
    with contextlib.redirect_stderr(err):
        code: int = tool.main(arguments)
    lines = err.getvalue().splitlines()
    assert len(lines) == (code == 2), f"one line for exit code 2, got {code} and {lines}"
    assert all(line.isprintable() for line in lines), lines
    return code


class Weights(Target):
    """Weights as the transformers library keeps them: two files, their index and config.json."""

    errors = (CheckpointError, ConfigError)

    @functools.cached_property
    def _model(self) -> GPTModel:
        config = TransformerConfig(
            num_layers=1,
            hidden_size=8,
            num_attention_heads=2,
            ffn_hidden_size=16,
            normalization="RMSNorm",
            swiglu=True,
            add_bias_linear=False,
            qk_layernorm=True,
        )
        model = GPTModel(config, 11)
        generator = torch.Generator().manual_seed(2)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model

    def prepare(self) -> None:
        _ = self._model

    def make(self, folder: Path) -> None:
        exact = torch.float32
        save_hf(self._model, folder / "weights", CPU, dtype=exact, max_shard_bytes=2000)

    def reset(self) -> None:
        with torch.no_grad():
            for parameter in self._model.parameters():
                parameter.fill_(POISON)

    def read(self, folder: Path) -> Any:
        load_hf(self._model, folder / "weights")
        return {"state": self.left()}

    def left(self) -> str:
        return digest(dict(self._model.named_parameters()))


# Data.


class DataSet(Target):
    """Every sample of a data set: `.idx`, `.bin` and the cache of the sample index."""

    errors = (IndexedDatasetError, ConfigError)

    def make(self, folder: Path) -> None:
        generator = np.random.default_rng(0)
        with IndexedDatasetBuilder(folder / "tokens", np.uint16) as builder:
            for _ in range(40):
                length = generator.integers(0, 30)
                builder.add_document(generator.integers(0, 50, size=length).tolist())
        for path in folder.iterdir():
            os.utime(path, (1_700_000_000, 1_700_000_000))  # part of the name of the cache
        self.read(folder)

    def read(self, folder: Path) -> Any:
        prefix = str(folder / "tokens")
        config = GPTDatasetConfig(seq_length=8, data_path=(prefix,), split="90,10,0")
        datasets = build_gpt_datasets(config, (90, 5, 0), 50, seed=1)
        samples = [datasets.train[number] for number in range(90)]
        samples += [datasets.valid[number] for number in range(5)]
        for sample in samples:
            for tokens in sample.values():
                assert tokens.shape == (8,), "tokens of a sample"
                assert 0 <= int(tokens.min()) <= int(tokens.max()) < 50, "ids of the vocabulary"
        return {"samples": digest(samples)}


TEXT = "def spam(eggs):\n    return eggs + 1  # \u00e9t\u00e9 \U0001f40d <|endoftext|>\n"


class TokenizerFiles(Target):
    """A tokenizer.json and the tokenizer_config.json beside it."""

    errors = (ConfigError,)

    def make(self, folder: Path) -> None:
        train_bpe([TEXT * 20], 280, folder / "tokenizer.json")
        content = {"eos_token": "<|endoftext|>", "model_max_length": 10**30}
        (folder / "tokenizer_config.json").write_text(json.dumps(content))

    def read(self, folder: Path) -> Any:
        config = TokenizerConfig(tokenizer_model=str(folder))
        tokenizer = build_tokenizer(config)
        rows = padded_vocab_size(config, tokenizer)
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        assert 0 <= tokenizer.eod < tokenizer.vocab_size <= rows, "ids have rows"
        try:
            ids = tokenizer.tokenize(TEXT)
        except ValueError as error:  # documented: a text that it has no tokens for
            return {"rows": rows, "text": str(error)[:50]}
        assert all(0 <= each < rows for each in ids), "ids have rows"
        return {"rows": rows, "ids": digest(ids), "text": digest(tokenizer.detokenize(ids))}


class Settings(Target):
    """The YAML file of `--config`."""

    errors = (ConfigError,)

    def make(self, folder: Path) -> None:
        (folder / "run.yaml").write_text(
            "# A run.\n"
            "mock-data: true\n"
            "seq-length: 64\n"
            "num-layers: 2\n"
            "hidden-size: 64\n"
            "num-attention-heads: 4\n"
            "micro-batch-size: 2\n"
            "global-batch-size: 4\n"
            "train-iters: 10\n"
            "lr: 1.0e-3\n"
            'split: "90,10"\n'
            "load: /nowhere\n"
            "load-skip-keys: [a.*, 'b.*']\n"
            "tokenizer-type: ByteTokenizer\n"
            "async_save: no\n"
            "eval-interval: null\n"
        )

    def read(self, folder: Path) -> Any:
        config = parse_config(["--config", str(folder / "run.yaml")], world_size=1)
        return {"values": digest(config.values())}


# Status files of a run.


class Events(Target):
    """`events.jsonl`, `heartbeat.json` and `metrics.jsonl`, as a relaunch, the program status and
    its page read them.
    """

    errors = (CheckpointError, OSError)  # the latter of `read_events`

    def make(self, folder: Path) -> None:
        moments = iter(range(1_700_000_000, 1_800_000_000))
        for restart in (0, 1):
            log = EventLog(folder, restart=restart, clock=lambda: float(next(moments)))
            log.write("start", pid=1, host="elsewhere", max_restarts=3)
            log.write("resume", iteration=10 * restart, world_size=2)
            log.write(
                "damaged",
                checkpoint="/runs/iter_0000020",
                reason="Expected it to be whole, got half.",
            )
            log.write("save_begun", iteration=12)
            log.write("save_published", iteration=12, checkpoint="/runs/iter_0000012", seconds=0.25)
            log.write("nan", iteration=13)
            log.write("signal", signal="SIGTERM")
            log.write(
                "exit",
                code=5,
                name="HANG",
                reason="nothing happened",
                iteration=14,
                train_iters=500,
            )
        known = {"pid": 1, "host": "elsewhere", "iteration": 14, "phase": "forward"}
        log.beat(**known, loss=2.5, ms_per_iteration=10.0)

        metrics = JsonLines(folder / METRICS_FILE)
        for iteration in (11, 12, 13, 12):
            values = {"loss": 2.5, "grad_norm": 0.5, "expert_load_cv_by_layer": [0.5, 0.25]}
            metrics.append({"kind": "train", "iteration": iteration, **values})
        metrics.append({"kind": "eval", "iteration": 12, "split": "validation", "loss": 2.75})
        metrics.append({"kind": "timing", "iteration": 12, "host_ms": 1.5})

    def read(self, folder: Path) -> Any:
        commands = ([str(folder)], [str(folder), "--json"])
        status: dict[str, Any] = {"codes": [called(run_status, command) for command in commands]}
        memory = EarlierFindings.read(folder)
        sent = json.loads(json.dumps(vars(memory)))
        assert EarlierFindings(**sent) == memory, "what other ranks get"
        status["memory"] = digest(vars(memory))
        status["events"] = digest([read_events(folder), read_heartbeat(folder)])
        status["scripts"] = _scripts_of_page(folder)
        return status


def _scripts_of_page(folder: Path) -> int:
    """Writes the page; the content of files adds no element that executes."""
    found = run_status.run_status(folder, now=1_800_000_000.0)
    if found is None:
        return 0
    page = RunPage(folder, 10.0).html(found, run_status.lines_of(found), 1_800_000_000.0)
    scripts = page.count("<script")
    assert scripts == page.count("<figure") + 1, "the numbers of each chart, and the script"
    return scripts


_TARGETS: list[Target] = [
    Run("run", "fsdp_dtensor"),
    Run("run without verification", "fsdp_dtensor", verify_checkpoint=False),
    Run("torch_dcp", "torch_dcp"),
    Run("torch_dcp without verification", "torch_dcp", verify_checkpoint=False),
    Run("torch_dcp weights", "torch_dcp", finetune=True),
    CheckpointTool("tool", "fsdp_dtensor"),
    CheckpointTool("tool on torch_dcp", "torch_dcp"),
    Weights("weights"),
    DataSet("data set"),
    TokenizerFiles("tokenizer"),
    Settings("settings"),
    Events("events"),
]
TARGETS = {target.name: target for target in _TARGETS}
