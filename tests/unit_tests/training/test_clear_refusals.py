"""Settings that no machine can honour, and calls that are easily written wrongly: one clear line
each.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from megatron.core.device import Device
from megatron.core.dist_checkpointing.store import open_store
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.mesh import build_mesh
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import ConfigError, options_of
from megatron.training.arguments import parse_config
from megatron.training.config import EngineConfig
from megatron.training.engines import MegatronEngine
from megatron_hybrid import pretrain_gpt
from tests.helpers.ranks import on_ranks, run_ranks

MINIMAL = [
    *("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data").split(),
    *"--tokenizer-type NullTokenizer --vocab-size 31 --num-workers 0 --eval-iters 0".split(),
    *"--micro-batch-size 1 --train-iters 1 --lr 0.1".split(),
]


def refusal(*flags: str) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config([*MINIMAL, *flags], world_size=1)
    return str(error.value)


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("--hidden-size", "1e30", "an integer >= 1, got '1e30'"),
        ("--hidden-size", str(2**62), f"an integer >= 1 and <= 16777216, got {2**62}"),
        ("--seq-length", str(2**62), f"an integer >= 1 and <= 67108864, got {2**62}"),
        ("--train-iters", str(2**62), f"an integer >= 1 and <= 4294967296, got {2**62}"),
        ("--distributed-timeout-minutes", "1e30", "a number > 0 and <= 525600.0, got 1e+30"),
        ("--hang-timeout-seconds", "1e30", "a number > 0 and <= 31536000.0, got 1e+30"),
        ("--host-threads", str(2**62), f"an integer >= 1 and <= 4096, got {2**62}"),
        ("--num-workers", str(2**62), f"an integer >= 0 and <= 1024, got {2**62}"),
        ("--lr", "1e999", "a number >= 0, got inf"),
    ],
)
def test_values_out_of_range_are_rejected_with_the_bound(flag, value, expected):
    assert refusal(flag, value) == f"{flag}: expected {expected}."


def test_every_timeout_has_a_bound_that_clocks_can_hold():
    names = [
        field.option.ceiling
        for _, section in parse_config(MINIMAL, 1).sections()
        for field in options_of(type(section))
        if "timeout" in field.name
    ]
    assert len(names) == 3
    assert None not in names


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        (
            "s3://bucket/run",
            "expected the package that fsspec needs for s3://bucket/run, got none (",
        ),
        ("nosuch://bucket/run", "expected a protocol of fsspec, got nosuch://bucket/run."),
        (
            "simplecache::nosuch://run",
            "expected a protocol of fsspec, got simplecache::nosuch://run.",
        ),
    ],
)
def test_a_url_that_fsspec_cannot_open_is_rejected_before_the_run(monkeypatch, url, reason):
    def no_package(protocol: str) -> None:
        if protocol == "s3":
            raise ImportError("Install s3fs to access S3")
        if protocol == "nosuch":
            raise ValueError("Protocol not known: nosuch")

    monkeypatch.setattr("fsspec.get_filesystem_class", no_package)
    assert refusal("--save", url).startswith(f"--save: {reason}")
    assert refusal("--load", url).startswith(f"--load: {reason}")
    with pytest.raises(ConfigError) as error:
        open_store(url)
    assert str(error.value).startswith(reason)


@pytest.mark.parametrize(
    ("flag", "expected"),
    [
        ("--tensorboard-dir", "a writable directory"),
        ("--events-dir", "a writable directory"),
        ("--metrics-jsonl", "a file that can be written"),
        ("--save", "a writable directory"),
    ],
)
def test_an_unwritable_path_ends_the_run_at_its_start(tmp_path, flag, expected):
    """Not even root can make a directory below a file, below a dangling link, or with a name
    that is too long.
    """
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "unmounted")
    behind = [tmp_path / name / "folder" for name in ("file", "link", "x" * 300)]

    def refused() -> list[str]:
        messages = []
        for place in behind:
            with pytest.raises(ConfigError) as caught:
                pretrain_gpt.run([*MINIMAL, flag, str(place)])
            messages.append(str(caught.value))
        return messages

    (messages,) = run_ranks(1, refused)
    link = f"{tmp_path}/link is a symbolic link to {tmp_path}/unmounted, which does not exist"
    reasons = ("Not a directory", link, "File name too long")
    for place, message, reason in zip(behind, messages, reasons, strict=True):
        assert message == f"{flag}: expected {expected}, got {place} ({reason})."


def engine_config(compute_dtype: str = "fp32") -> EngineConfig:
    return EngineConfig(
        OptimizerConfig(), LRScheduleConfig(lr=0.1), DataParallelConfig(), 4, compute_dtype
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", torch.bfloat16, None])
def test_unknown_names_of_compute_dtypes_are_rejected(dtype):
    with pytest.raises(ConfigError, match="compute_dtype: expected one of fp32, bf16, fp16, got"):
        engine_config(dtype)


@on_ranks(1)
def test_microbatches_other_than_dicts_of_tensors_are_rejected():
    engine = MegatronEngine(engine_config(), Device("cpu"), build_mesh("cpu", 1))
    engine.initialize(nn.Linear(4, 4))
    tensor = torch.ones(2, 4)
    for microbatches, got in (
        ([[tensor]], "a list"),
        ([tensor], "a Tensor"),
        ([(tensor, tensor)], "a tuple"),
        ([{"x": [1.0]}], "a dict of other values"),
    ):
        for run in (engine.train_batch, engine.eval_batch):
            with pytest.raises(TypeError, match=f"each a dict of tensors, got {got}\\."):
                run(microbatches, lambda model, batch: model(batch["x"]).mean())

    # The engine is still usable.
    engine.train_batch([{"x": tensor}], lambda model, batch: model(batch["x"]).mean())
    assert engine.step_info().iteration == 1


@pytest.mark.parametrize(
    ("rank", "local_rank", "waited"),
    [("0", "0", []), ("1", "1", [10.0]), ("8", "0", [10.0]), ("9", "1", [20.0])],
)
def test_rank_0_prints_the_error_and_other_ranks_wait(
    monkeypatch, capsys, rank, local_rank, waited
):
    """The others wait to be ended by their launcher: on another machine, too."""
    found: list[float] = []
    monkeypatch.setenv("RANK", rank)
    monkeypatch.setenv("LOCAL_RANK", local_rank)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    monkeypatch.setattr(pretrain_gpt, "time", SimpleNamespace(sleep=found.append))
    assert pretrain_gpt.main([*MINIMAL, "--lr", "-1", "--use-mup"]) == 2
    assert found == waited
    assert capsys.readouterr().err == (
        "pretrain_gpt.py: 2 settings cannot be used:\n"
        "  Not supported here (remove, or stay with Megatron-LM):\n"
        "    --use-mup  This variant of the model is not offered.\n"
        "  Unknown, or wrong in itself:\n"
        "    --lr: expected a number >= 0, got -1.0.\n"
    )
