"""Exports and `generate`: from a run's checkpoint to the transformers library and to text."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from megatron.training.tokenizer import HuggingFaceTokenizer, train_bpe
from megatron_hybrid import generate, pretrain_gpt
from megatron_hybrid.checkpoint import command as checkpoint
from tests.helpers.ranks import run_ranks
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parents[3]
TEXT = "def main():\n    return the_answer(to=everything)\n" * 20
SETTINGS = (
    "--num-layers 1 --hidden-size 32 --num-attention-heads 2 --seq-length 16 --normalization "
    "RMSNorm --swiglu --ffn-hidden-size 48 --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --mock-data --num-workers 0 --micro-batch-size 2 --train-iters 2 --lr 1e-2 "
    "--lr-decay-style constant --eval-iters 0 --bf16 --tokenizer-model data/tokenizer.json --save "
    "runs/mine --save-interval 1"
).split()
ASKED = ["--prompt", "def main", "--max-new-tokens", "4", "--temperature", "0"]
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def train(project: str, argv: list[str]) -> None:
    """Trains in the directory `project`."""
    before = Path.cwd()
    os.chdir(project)
    try:
        pretrain_gpt.run(argv)
    finally:
        os.chdir(before)


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory in which two ranks trained with relative paths."""
    folder = tmp_path_factory.mktemp("project")
    train_bpe([TEXT], 300, folder / "data" / "tokenizer.json")
    run_ranks(2, train, str(folder), SETTINGS)
    return folder


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Another directory, which is the current one during the test."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(capsys: pytest.CaptureFixture[str], *flags: str | Path) -> str:
    assert generate.main([*map(str, flags), *ASKED]) == 0
    return capsys.readouterr().out


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """Returns the line that the checkpoint program prints before it exits with 2."""
    assert checkpoint.main(list(map(str, argv))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_transformers_computes_the_same_logits_from_an_exported_run(project, elsewhere, capsys):
    transformers = pytest.importorskip("transformers")
    run = project / "runs" / "mine"
    exported = ["export", str(run), "gpt", "--dtype", "fp32"]
    assert checkpoint.main(exported) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("gpt: LlamaForCausalLM, 11 tensors of ")
    assert printed.endswith(f" in float32, of {run.resolve()}/iter_0000002\n")

    ours, tokenizer, seq_length = generate.load_model(str(run), None)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(elsewhere / "gpt").eval()
    assert theirs.config.max_position_embeddings == seq_length == 16
    loaded = transformers.AutoTokenizer.from_pretrained(elsewhere / "gpt")
    ids = tokenizer.tokenize(TEXT)[:seq_length]
    assert loaded(TEXT)["input_ids"][:seq_length] == ids
    with torch.no_grad():
        logits = ours(torch.tensor([ids]))
        torch.testing.assert_close(logits, theirs(torch.tensor([ids])).logits, rtol=1e-5, atol=1e-5)


TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
    "{% endfor %}"
)
TALK = [{"role": "user", "content": "1+1?"}, {"role": "assistant", "content": "2"}]


def chat_tokenizer(folder: Path) -> Path:
    folder.mkdir()
    make_tokenizer(folder, ["<|im_start|>", "<|im_end|>", "<s>", "<pad>"])
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}
    config |= {"eos_token": "<|im_end|>", "pad_token": "<pad>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools: " + TEMPLATE)
    return folder


def test_exports_of_a_run_from_scratch_have_its_chat_template_and_special_tokens(elsewhere):
    transformers = pytest.importorskip("transformers")
    source = chat_tokenizer(elsewhere / "chat")
    settings = [word if word != "data/tokenizer.json" else "chat" for word in SETTINGS]
    run_ranks(1, train, str(elsewhere), [*settings, "--save-hf-weights"])
    assert checkpoint.main(["export", "runs/mine", "gpt"]) == 0

    before = transformers.AutoTokenizer.from_pretrained(source)
    for folder in ("gpt", "runs/mine/iter_0000002/hf"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        for template in (None, "tool_use"):
            texts = [
                each.apply_chat_template(TALK, chat_template=template, tokenize=False)
                for each in (tokenizer, before)
            ]
            assert texts[0] == texts[1]
            assert texts[0].startswith("tools: <s>" if template else "<s>")
        assert tokenizer.special_tokens_map == before.special_tokens_map
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for config in (model.config, model.generation_config):
            found = config.bos_token_id, config.eos_token_id, config.pad_token_id
            assert found == (258, 257, 259)
        for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
            assert Path(folder, name).read_bytes() == (source / name).read_bytes()


def test_a_run_its_checkpoint_and_its_export_generate_the_same_text(project, elsewhere, capsys):
    run = project / "runs" / "mine"
    text = written(capsys, "--load", run)
    assert text.startswith("--- prompt: 'def main'\ndef main")
    assert written(capsys, "--load", run / "iter_0000002") == text
    exported = ["export", str(run / "iter_0000002"), "gpt", "--json"]
    assert checkpoint.main([*exported, "--dtype", "fp32"]) == 0
    whole = json.loads(capsys.readouterr().out)
    assert (whole["architecture"], whole["dtype"]) == ("LlamaForCausalLM", "float32")
    assert written(capsys, "--load", "gpt") == text

    assert checkpoint.main([*exported[:2], "shards", "--max-shard-size", "20KB"]) == 0
    assert (elsewhere / "shards" / "model.safetensors.index.json").exists()
    capsys.readouterr()

    # The default dtype is bf16, half as many bytes.
    exported[2] = "half"
    assert checkpoint.main(exported) == 0
    half = json.loads(capsys.readouterr().out)
    assert (half["num_bytes"] * 2, half["dtype"]) == (whole["num_bytes"], "bfloat16")

    # The export does not depend on its location.
    (elsewhere / "gpt").rename(elsewhere / "moved")
    assert written(capsys, "--load", "moved") == text
    (elsewhere / "moved" / "tokenizer.json").rename("tokenizer.json")
    (elsewhere / "moved" / "tokenizer_config.json").unlink()
    assert written(capsys, "--load", "moved", "--tokenizer-model", "tokenizer.json") == text
    assert generate.main(["--load", "moved"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "Expected a tokenizer in moved, got none: name a tokenizer by --tokenizer-model" in line


def test_a_moved_checkpoint_needs_the_path_of_its_tokenizer(project, elsewhere, capsys):
    run = project / "runs" / "mine"
    text = written(capsys, "--load", run)
    (elsewhere / "copy").symlink_to(run)  # paths are relative to the link's target
    assert written(capsys, "--load", "copy") == text
    (elsewhere / "copy").unlink()

    moved = elsewhere / "iter_0000002"
    (run / "iter_0000002").rename(moved)
    try:
        assert generate.main(["--load", str(moved)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("generate: --tokenizer-model: expected an existing tokenizer.json")
        assert line.endswith("got 'data/tokenizer.json'.")
        tokenizer = project / "data" / "tokenizer.json"
        assert written(capsys, "--load", moved, "--tokenizer-model", tokenizer) == text
        # The tokenizer may also be at the same path in the current directory.
        (elsewhere / "data").symlink_to(project / "data")
        assert written(capsys, "--load", moved) == text
    finally:
        moved.rename(run / "iter_0000002")


def test_export_accepts_an_earlier_iteration_and_a_plain_dcp_checkpoint(project, elsewhere, capsys):
    run = project / "runs" / "mine"
    for step, folder in (("1", "first"), ("2", "second")):
        assert checkpoint.main(["export", str(run), folder, "--ckpt-step", step]) == 0
    first, second = (elsewhere / name / "model.safetensors" for name in ("first", "second"))
    assert first.read_bytes() != second.read_bytes()

    # Weights saved by PyTorch need a settings file that describes the model.
    model, _, _ = generate.load_model(str(run), None)
    dcp.save(model.state_dict(), checkpoint_id=elsewhere / "plain", no_dist=True)
    assert "name a YAML file" in refused(capsys, "export", "plain", "gpt")
    settings = {**dataclasses.asdict(model.config), "seq_length": 16}
    settings["tokenizer_model"] = str(project / "data" / "tokenizer.json")
    text = "".join(f"{key}: {value}\n" for key, value in settings.items() if value is not None)
    Path("run.yaml").write_text(text)
    assert checkpoint.main(["export", "plain", "gpt", "--config", "run.yaml"]) == 0
    assert (elsewhere / "gpt" / "model.safetensors").read_bytes() == second.read_bytes()


def change_config(run: Path, **changes: Any) -> None:
    for path in run.glob("*/train_state.json"):
        state = json.loads(path.read_text())
        state["config"] |= changes
        path.write_text(json.dumps(state))


def test_export_errors_are_one_line(project, elsewhere, capsys):
    run = project / "runs" / "mine"
    (elsewhere / "full").mkdir()
    (elsewhere / "full" / "mine").touch()
    line = refused(capsys, "export", run, "full")
    assert line.startswith("checkpoint: Expected a missing or empty directory at ")
    assert "got one that holds mine. Weights are never overwritten." in line
    assert "Expected a checkpoint in none, got none" in refused(capsys, "export", "none", "gpt")

    assert checkpoint.main(["export", str(run), "gpt"]) == 0
    with pytest.raises(SystemExit):
        checkpoint.main(["export", str(run), "again", "--max-shard-size", "5XB"])
    assert "--max-shard-size: expected a size such as" in capsys.readouterr().err
    line = refused(capsys, "export", "gpt", "again")
    assert "Expected a run or its checkpoint, got gpt, which is a Hugging Face" in line
    assert "--ckpt-step: expected a run" in refused(capsys, "export", "gpt", "x", "--ckpt-step=1")
    assert sorted(path.name for path in elsewhere.iterdir()) == ["full", "gpt"]

    # No architecture of the transformers library combines these two. torch_dcp has no digests, so
    # the file can be edited.
    torch_dcp = ["--ckpt-format", "torch_dcp", "--save", "runs/other"]
    run_ranks(2, train, str(project), [*SETTINGS, *torch_dcp])
    change_config(project / "runs" / "other", normalization="LayerNorm", qk_layernorm=True)
    line = refused(capsys, "export", project / "runs" / "other", "x")
    assert line.startswith("checkpoint: --qk-layernorm: expected a GPT that an architecture")
    assert not (elsewhere / "x").exists()


def test_the_tokenizer_of_the_run_takes_precedence_over_the_current_directory(project, elsewhere):
    train_bpe(["other words"], 260, elsewhere / "data" / "tokenizer.json")
    _, tokenizer, _ = generate.load_model(str(project / "runs" / "mine"), None)
    own = HuggingFaceTokenizer(project / "data" / "tokenizer.json")
    assert tokenizer.tokenize(TEXT) == own.tokenize(TEXT)


def test_scripts_of_a_clone_run_in_any_directory(elsewhere):
    """The scripts import the clone that contains them. With `-S` they have no installed packages,
    including this project, so they may fail at a missing third-party package.
    """
    for script in ("checkpoint", "generate", "preprocess_data", "run_status"):
        command = [sys.executable, "-S", str(ROOT / "tools" / f"{script}.py"), "--help"]
        environment = {key: text for key, text in os.environ.items() if key != "PYTHONPATH"}
        done = subprocess.run(
            command, capture_output=True, text=True, cwd=elsewhere, env=environment, timeout=600
        )
        last = done.stderr.rstrip("\n").rpartition("\n")[2]
        assert done.returncode == 0 or "megatron" not in last, done.stderr
