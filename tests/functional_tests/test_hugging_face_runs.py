"""From a model of the transformers library to a run, and from the run to a model of the library."""

from __future__ import annotations

import contextlib
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import pretrain_gpt
from megatron.core.datasets.builder import build_gpt_datasets
from megatron.core.device import Device
from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.dist_checkpointing.format.names import checkpoint_name
from megatron.core.models.description import ModelDescription
from megatron.core.models.hugging_face import hf_config
from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config
from megatron.training.checkpoint.hf_files import WEIGHTS_FILE
from megatron.training.checkpoint.hf_weights import save_hf
from megatron.training.checkpoint.resume import Resumer
from megatron.training.tokenizer import build_tokenizer
from megatron_hybrid import generate
from megatron_hybrid.checkpoint import command as checkpoint
from tests.functional_tests.helpers.runs import losses, published
from tests.helpers.hf_models import FAMILIES, VOCAB, save_model
from tests.helpers.ranks import run_ranks
from tests.unit_tests.training.helpers.hf_folders import digests

SETTINGS = (
    "--seq-length 16 --mock-data --num-workers 0 --micro-batch-size 2 --global-batch-size 4 "
    "--train-iters 3 --eval-iters 0 --lr 1e-3 --lr-decay-style constant"
).split()
OFFLOADED = ["--optimizer-cpu-offload"]
# Unit tests compare the weights and logits of the other families.
SHOWN = ("qwen3_5_text", "deepseek_v3", "gpt_oss")
ENGINES = {
    "offloaded": ["--bf16", *OFFLOADED],
    "torch_fsdp2": ["--use-torch-fsdp2"],
    "unsharded": ["--no-use-megatron-fsdp"],
}


def run(argv: list[str], begun: str | None = None) -> str:
    """A run on this rank; returns its log.

    Args:
        begun: a directory to save the weights in that the run starts with, in fp32.
    """
    log, load = io.StringIO(), Resumer.load

    def load_and_save(self: Resumer, engine: Any, kept: None) -> Any:
        loaded = load(self, engine, kept)
        if begun is not None:
            save_hf(engine.model, begun, Device("cpu"), dtype=torch.float32)
        return loaded

    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(log):
        patch.setattr(Resumer, "load", load_and_save)
        pretrain_gpt.run(argv)
    return log.getvalue()


def flags(folder: Path, *others: object) -> list[str]:
    return ["--hf-model", str(folder), *SETTINGS, *map(str, others)]


def cross_entropy(transformers: Any, folder: Path) -> float:
    """The library's loss for a run's first global batch."""
    config = parse_config(flags(folder), world_size=1)
    tokens = build_tokenizer(config.tokenizer).vocab_size
    data = build_gpt_datasets(config.data, (4, 0, 0), tokens, config.training.seed).train
    assert data is not None
    batch = {name: torch.stack([data[i][name] for i in range(4)]) for name in data[0]}
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        logits = model(batch["tokens"]).logits
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With tensors of which several of ours are rows."""
    return save_model(tmp_path_factory.mktemp("models") / "qwen3_5", "qwen3_5_text")


@pytest.mark.parametrize(
    "family",
    [name if name in SHOWN else pytest.param(name, marks=pytest.mark.wide) for name in FAMILIES],
)
def test_a_model_is_trained_and_exported_as_one_that_transformers_computes(
    transformers, tmp_path, family
):
    folder, runs = tmp_path / "model", tmp_path / "runs"
    save_model(folder, family)
    metrics = tmp_path / "metrics.jsonl"
    run_ranks(2, run, flags(folder, "--save", runs, "--metrics-jsonl", metrics, *OFFLOADED))
    trained = losses(metrics)
    assert trained[1] == pytest.approx(cross_entropy(transformers, folder), abs=1e-4)
    assert len(set(trained.values())) == 3

    out = tmp_path / "out"
    assert checkpoint.main(["export", str(runs), str(out), "--dtype", "fp32"]) == 0
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report.values())
    ours, tokenizer, _ = generate.load_model(str(runs), None)
    tokens = torch.randint(
        0, tokenizer.vocab_size, (2, 40), generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        logits, before = theirs.eval()(tokens).logits, ours(tokens)
        torch.testing.assert_close(before, logits, rtol=1e-4, atol=1e-4)
        first = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert not torch.allclose(first(tokens).logits, logits, rtol=1e-2, atol=1e-2)


def test_checkpoints_of_a_run_open_in_transformers_as_they_stand(transformers, folder, tmp_path):
    runs, out = tmp_path / "runs", tmp_path / "out"
    saves = ["--save", runs, "--save-interval", 1, "--async-save"]
    run_ranks(2, run, flags(folder, *saves, "--save-hf-weights", "fp32", "--save-hf-interval", 2))
    assert [(runs / checkpoint_name(number) / "hf").is_dir() for number in (1, 2, 3)] == [
        *(False, True),
        True,  # the last one of a run has it in any case
    ]

    # As an export writes it: the directory's tokenizer and generation config, too.
    assert checkpoint.main(["export", str(runs), str(out), "--dtype", "fp32"]) == 0
    hf = runs / checkpoint_name(3) / "hf"
    assert digests(hf) == digests(out)
    assert {"tokenizer.json", "config.json"} <= digests(hf).keys()
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        hf, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report.values())
    ours, tokenizer, _ = generate.load_model(str(hf), None)
    tokens = torch.arange(40).view(2, 20) % tokenizer.vocab_size
    with torch.no_grad():
        torch.testing.assert_close(
            ours(tokens).float(), theirs.eval()(tokens).logits, rtol=1e-4, atol=1e-4
        )
        resumed, _, _ = generate.load_model(str(runs), None)
        assert torch.equal(resumed(tokens), ours(tokens))


def test_rows_that_a_run_adds_to_the_vocabulary_are_trained_saved_and_exported(
    transformers, folder, tmp_path
):
    runs, begun, out = tmp_path / "runs", tmp_path / "begun", tmp_path / "out"
    more = flags(folder, *ENGINES["offloaded"], "--vocab-size", VOCAB + 5, "--save", runs)
    run_ranks(2, run, [*more, "--exit-interval", "2"], str(begun))
    run_ranks(2, run, more)
    assert checkpoint.main(["export", str(runs), str(out), "--dtype", "fp32"]) == 0
    there, first = load_file(folder / WEIGHTS_FILE), load_file(begun / WEIGHTS_FILE)
    trained = transformers.AutoModelForCausalLM.from_pretrained(out).state_dict()
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert torch.equal(first[name][:VOCAB], there[name])
        mean = there[name].mean(0).expand(5, -1)
        torch.testing.assert_close(first[name][VOCAB:], mean, rtol=1e-6, atol=1e-7)
        assert trained[name].shape == first[name].shape
    # The softmax moves each row of the output, whether its token occurs or not.
    assert not torch.equal(trained["lm_head.weight"][VOCAB:], first["lm_head.weight"][VOCAB:])


def test_hf_of_a_model_that_no_architecture_computes_is_rejected_before_the_first_step(tmp_path):
    model = "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --apply-layernorm-1p"
    argv = [*model.split(), "--tokenizer-type", "ByteTokenizer", *SETTINGS]
    argv += ["--save", str(tmp_path / "run"), "--metrics-jsonl", str(tmp_path / "metrics.jsonl")]
    config = parse_config(argv, world_size=1).model
    with pytest.raises(ConfigError) as refusal:
        hf_config(ModelDescription(config, 257))

    def refused() -> str:
        with pytest.raises(ConfigError) as failure:
            run([*argv, "--save-hf-weights"])
        return str(failure.value)

    assert run_ranks(1, refused) == [str(refusal.value)]
    assert published(tmp_path / "run") == []
    assert not losses(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("engine", "world_size"), [("offloaded", 2), ("torch_fsdp2", 2), ("unsharded", 1)]
)
def test_a_run_starts_from_the_directorys_weights_bit_for_bit(
    transformers, folder, tmp_path, engine, world_size
):
    metrics, begun = tmp_path / "metrics.jsonl", tmp_path / "begun"
    argv = flags(folder, "--metrics-jsonl", metrics, *ENGINES[engine])
    run_ranks(world_size, run, argv, str(begun))
    expected, found = load_file(folder / WEIGHTS_FILE), load_file(begun / WEIGHTS_FILE)
    assert expected.keys() == found.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    tolerance = 0.05 if engine == "offloaded" else 1e-4  # bf16 rounds
    entropy = cross_entropy(transformers, folder)
    assert losses(metrics)[1] == pytest.approx(entropy, abs=tolerance)


def test_weights_are_read_at_the_start_of_a_fresh_run_alone(tmp_path):
    moved, runs = tmp_path / "model", tmp_path / "runs"
    save_model(moved)
    argv = flags(moved, "--save", runs, "--save-interval", 2, *OFFLOADED)
    whole = [*argv, "--metrics-jsonl", str(tmp_path / "whole.jsonl")]
    log = run_ranks(2, run, whole)[0]
    assert f"loaded weights from {moved}" in log
    for iteration in (2, 3):  # as if the run had died, and its last checkpoint were lost
        (runs / f"iter_000000{iteration}").rename(tmp_path / f"iter_000000{iteration}")
    (runs / "latest_checkpointed_iteration.txt").unlink()

    # A relaunch before there is a checkpoint starts in the same way.
    again = [*argv, "--metrics-jsonl", str(tmp_path / "again.jsonl")]
    assert f"loaded weights from {moved}" in run_ranks(2, run, again)[0]
    assert losses(tmp_path / "again.jsonl") == losses(tmp_path / "whole.jsonl")

    # One that resumes needs no weights of the directory, on another number of ranks either.
    (moved / WEIGHTS_FILE).unlink()
    (runs / "iter_0000003").rename(tmp_path / "lost")
    (runs / "latest_checkpointed_iteration.txt").write_text("2\n")
    resumed = [*argv, "--metrics-jsonl", str(tmp_path / "resumed.jsonl")]
    log = run_ranks(2, run, resumed)[0]
    assert "loaded weights from" not in log
    assert losses(tmp_path / "resumed.jsonl") == {3: losses(tmp_path / "whole.jsonl")[3]}
    assert published(runs) == ["iter_0000002", "iter_0000003"]

    # Nor does one that draws its weights, or takes them from a checkpoint.
    run_ranks(1, run, flags(moved, "--hf-init-random"))
    run_ranks(1, run, flags(moved, "--load", runs, "--finetune"))

    def fail(argv: list[str]) -> None:
        with pytest.raises(CheckpointError, match=f"Expected {WEIGHTS_FILE} or .*, got neither"):
            run(argv)

    run_ranks(2, fail, flags(moved))


def test_the_checkpoint_alone_defines_the_model_once_the_run_has_started(
    tmp_path, monkeypatch, capsys
):
    """From any directory, and relative paths are those of the run. The directory's config.json and
    weights may be gone; its tokenizer is the run's.
    """
    project, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    save_model(project / "model")
    elsewhere.mkdir()

    def run_there(argv: list[str]) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(project)
            run(argv)

    run_ranks(1, run_there, flags(Path("model"), "--save", "runs/mine"))
    (project / "model" / "config.json").unlink()
    (project / "model" / WEIGHTS_FILE).unlink()

    monkeypatch.chdir(elsewhere)
    runs = str(project / "runs" / "mine")
    model, tokenizer, seq_length = generate.load_model(runs, None)
    assert (model.config.num_layers, model.vocab_size, seq_length) == (2, 301, 16)
    assert tokenizer.vocab_size <= 301
    assert checkpoint.main(["export", runs, "out"]) == 0
    own = (project / "model" / "tokenizer.json").read_bytes()
    assert (elsewhere / "out" / "tokenizer.json").read_bytes() == own
    assert (elsewhere / "out" / "generation_config.json").exists()

    # The tokenizer may have moved.
    (project / "model").rename(elsewhere / "moved")
    capsys.readouterr()
    assert checkpoint.main(["export", runs, "again"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "expected the tokenizer in 'model'" in line
    assert checkpoint.main(["export", runs, "again", "--tokenizer-model", "moved"]) == 0
    assert capsys.readouterr().err.startswith("export: model, the base model of")
    assert (elsewhere / "again" / "tokenizer.json").read_bytes() == own
