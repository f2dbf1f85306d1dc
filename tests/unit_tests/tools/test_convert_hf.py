"""A folder of the transformers library as a checkpoint, and a checkpoint as such a folder."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tokenizers
import torch
from safetensors.torch import load_file, save_file

from megatron.core.dist_checkpointing.formats import open_checkpoint
from megatron.core.dist_checkpointing.load.checkpoint import PublishedCheckpoint
from megatron.core.dist_checkpointing.store import LocalStore
from megatron_hybrid import convert_hf, generate
from megatron_hybrid.checkpoint import command as checkpoint
from tests.helpers.hf_models import FAMILIES, TEXT, VOCAB, save_model
from tests.unit_tests.core.dist_checkpointing.helpers.live_bytes import Live
from tests.unit_tests.training.helpers.hf_folders import digests, names_in

WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def transformers():
    return pytest.importorskip("transformers")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In bf16, and tied."""
    return save_model(tmp_path_factory.mktemp("models") / "qwen3", "qwen3", dtype=torch.bfloat16)


@pytest.fixture
def folder(model: Path, tmp_path: Path) -> Path:
    """A copy to be spoiled."""
    copy = tmp_path / "model"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    return copy


def converted(*argv: str | Path) -> None:
    assert convert_hf.main(list(map(str, argv))) == 0


def refused(capsys: pytest.CaptureFixture[str], *argv: str | Path) -> str:
    """The one line that the tool says."""
    assert convert_hf.main(list(map(str, argv))) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_an_import_comes_back_as_it_was_to_the_bit(model, tmp_path, capsys):
    converted("import", model, tmp_path / "runs")
    assert checkpoint.main(["verify", str(tmp_path / "runs" / "iter_0000000")]) == 0
    converted("export", tmp_path / "runs", tmp_path / "out")
    printed = capsys.readouterr().out
    assert "iter_0000000: 24 tensors of " in printed
    assert "Qwen3ForCausalLM, 24 tensors" in printed

    before, after = (load_file(path / WEIGHTS) for path in (model, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    # The folder's own tokenizer, generation config and token ids.
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (
        model / "tokenizer.json"
    ).read_bytes()
    assert (tmp_path / "out" / "generation_config.json").exists()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (3, 0)


def test_an_export_does_not_need_the_folder_that_the_run_began_with(folder, tmp_path, capsys):
    converted("import", folder, tmp_path / "runs")
    folder.rename(tmp_path / "moved")
    capsys.readouterr()
    line = refused(capsys, "export", tmp_path / "runs", tmp_path / "out")
    assert f"expected the tokenizer in '{folder}'" in line
    named = ("--tokenizer-model", tmp_path / "moved")
    converted("export", tmp_path / "runs", tmp_path / "out", *named)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"export: {folder}, ")
    assert names_in(tmp_path / "out") == [
        "config.json",
        "generation_config.json",
        WEIGHTS,
        "tokenizer.json",
        "tokenizer_config.json",
    ]


def with_padding_token(folder: Path) -> int:
    """Gives a folder's tokenizer one id more than its model has rows; returns their number."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    unused = range(tokenizer.get_vocab_size(), VOCAB)
    tokenizer.add_tokens([*(f"<unused{number}>" for number in unused), "<pad>"])
    (folder / "tokenizer.json").unlink()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer.get_vocab_size()


def test_a_padding_token_beyond_the_embedding_is_imported_by_a_flag(
    model, folder, tmp_path, capsys
):
    num_ids = with_padding_token(folder)
    line = refused(capsys, "import", folder, tmp_path / "runs")
    assert f"--vocab-size {num_ids}" in line
    converted("import", folder, tmp_path / "runs", "--vocab-size", str(num_ids))
    converted("export", tmp_path / "runs", tmp_path / "out")
    there, more = (load_file(path / WEIGHTS) for path in (model, tmp_path / "out"))
    name = "model.embed_tokens.weight"
    assert more[name].shape[0] == num_ids == VOCAB + 1
    assert torch.equal(more[name][:VOCAB], there[name])
    torch.testing.assert_close(more[name][VOCAB], there[name].float().mean(0).bfloat16())
    assert all(torch.equal(more[other], there[other]) for other in there if other != name)


def test_a_prompt_with_a_token_beyond_the_embedding_is_an_error(folder, capsys):
    with_padding_token(folder)
    asked = ["--load", str(folder), "--max-new-tokens", "3", "--temperature", "5", "--prompt"]
    assert generate.main([*asked, "def main"]) == 0
    assert "prompt: 'def main'" in capsys.readouterr().out
    assert generate.main([*asked, "def <pad>"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--prompt: expected token ids below the {VOCAB} rows" in line


def test_shards_of_a_size_and_dtype_that_are_asked_for(model, tmp_path, capsys):
    converted("import", model, tmp_path / "runs")
    flags = ("--dtype", "fp32", "--max-shard-size", "20KB")
    converted("export", tmp_path / "runs", tmp_path / "out", *flags)
    assert " in float32, of " in capsys.readouterr().out
    assert "model.safetensors.index.json" in names_in(tmp_path / "out")
    # And in again, from shards in another dtype.
    converted("import", tmp_path / "out", tmp_path / "again")
    both = [
        open_checkpoint(LocalStore(tmp_path / name), "iter_0000000") for name in ("runs", "again")
    ]
    digest = [
        one.marker.files["__0_0.distcp"] for one in both if isinstance(one, PublishedCheckpoint)
    ]
    assert len(digest) == 2
    assert digest[0] == digest[1]
    with pytest.raises(SystemExit):
        convert_hf.main(["export", str(tmp_path / "runs"), "x", "--max-shard-size", "5XB"])
    assert "--max-shard-size: expected a size such as" in capsys.readouterr().err


FEW = ("llama", "qwen3_next")


@pytest.mark.parametrize(
    "family",
    [each if each in FEW else pytest.param(each, marks=pytest.mark.wide) for each in FAMILIES],
)
def test_the_likeliest_tokens_are_those_of_transformers(transformers, tmp_path, capsys, family):
    """In fp32."""
    folder = save_model(tmp_path / "model", family, dtype=torch.bfloat16)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs.generation_config.eos_token_id = None
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    ids = tokenizer(TEXT[:12], return_tensors="pt")["input_ids"]
    # Rows of the embedding beyond the tokenizer's ids are padding, which is never drawn here.
    padding = list(range(len(tokenizer), theirs.config.vocab_size))
    written = theirs.generate(
        ids, max_new_tokens=12, do_sample=False, pad_token_id=0, suppress_tokens=padding
    )
    assert len(written[0]) == len(ids[0]) + 12, "nothing ended it"
    expected = tokenizer.decode(written[0])

    converted("import", folder, tmp_path / "runs")
    capsys.readouterr()
    for place in (folder, tmp_path / "runs"):
        asked = ["--prompt", TEXT[:12], "--max-new-tokens", "12", "--temperature", "0"]
        assert generate.main(["--load", str(place), *asked]) == 0
        assert capsys.readouterr().out == f"--- prompt: {TEXT[:12]!r}\n{expected}\n\n"


def test_an_import_has_one_tensor_in_memory_as_it_is_in_the_file(tmp_path, capsys):
    folder = save_model(
        tmp_path / "wide", dtype=torch.bfloat16, vocab_size=20000, hidden_size=256, head_dim=64
    )
    one = 20000 * 256 * 2  # the embedding's bytes, as they are in the file
    with Live() as live:
        converted("import", folder, tmp_path / "runs")
    assert "fp32" in capsys.readouterr().out
    assert live.peak < one + (1 << 20), "the output layer is as large, and fp32 twice as large"


def truncate(folder: Path) -> None:
    with (folder / WEIGHTS).open("r+b") as stream:
        stream.truncate((folder / WEIGHTS).stat().st_size - 8)


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    named = {name.replace("__", "."): tensor for name, tensor in changes.items()}
    tensors = {**load_file(folder / WEIGHTS), **named}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, folder / WEIGHTS)


def change_config(folder: Path, **changes: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "Expected a whole safetensors file at "),
        (lambda folder: change_tensors(folder, model__norm__weight=None), "it lacks model.norm"),
        (lambda folder: change_tensors(folder, more=torch.ones(1)), "nothing here takes more"),
        (lambda folder: change_config(folder, model_type="gpt_neo"), "a model_type of llama"),
        (lambda folder: (folder / "tokenizer.json").unlink(), "--tokenizer-model: expected"),
        (lambda folder: change_config(folder, vocab_size=200), "expected at most 200 ids"),
        (lambda folder: (folder / "config.json").unlink(), "config.json"),
    ],
)
def test_errors_of_an_import_are_one_line_and_leave_no_files(
    folder, tmp_path, capsys, spoil, message
):
    spoil(folder)
    line = refused(capsys, "import", folder, tmp_path / "runs")
    assert line.startswith("convert-hf: ")
    assert message in line
    assert names_in(tmp_path) == ["model"]


def test_checkpoints_that_are_there_are_left_alone(folder, tmp_path, capsys):
    converted("import", folder, tmp_path / "runs")
    before = digests(tmp_path / "runs" / "iter_0000000")
    line = refused(capsys, "import", folder, tmp_path / "runs")
    assert "Expected no checkpoint yet in " in line
    assert line.endswith(", got iter_0000000.")
    assert digests(tmp_path / "runs" / "iter_0000000") == before

    for length, expected in (("65", "at least 1, at most 64"), ("0", "at least 1")):
        line = refused(capsys, "import", folder, tmp_path / "x", "--seq-length", length)
        assert f"--seq-length: expected {expected}" in line

    change_config(folder, model_type="gpt_neo")
    line = refused(capsys, "import", folder, tmp_path / "runs")
    assert line.endswith(", got iter_0000000."), "found before the model is read"


def test_an_import_sweeps_what_a_killed_one_has_left(model, tmp_path):
    left = tmp_path / "runs" / "iter_0000000.0123456789abcdef.saving"
    left.mkdir(parents=True)
    converted("import", model, tmp_path / "runs")
    assert not left.exists()
    assert "iter_0000000" in names_in(tmp_path / "runs")
