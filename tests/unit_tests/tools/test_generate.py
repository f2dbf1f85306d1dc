from __future__ import annotations

import json

import pytest
import tokenizers
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import pretrain_gpt
from megatron.core.dist_checkpointing.formats import open_checkpoint, read_piece
from megatron.core.dist_checkpointing.layout.boxes import Box
from megatron.core.dist_checkpointing.store import LocalStore
from megatron.core.drivers import CudaDriver
from megatron_hybrid import generate
from tests.helpers.checkpoints import whole, write_checkpoint
from tests.helpers.hf_models import TEXT, VOCAB, begin_texts, save_model
from tests.helpers.ranks import run_ranks

MODEL = {
    "--num-layers": "1",
    "--hidden-size": "32",
    "--num-attention-heads": "2",
    "--seq-length": "16",
    "--tokenizer-type": "ByteTokenizer",
}
SETTINGS = [
    *(word for flag in MODEL.items() for word in flag),
    *("--mock-data", "--num-workers", "0", "--micro-batch-size", "2", "--train-iters", "2"),
    *("--lr", "1e-2", "--eval-iters", "0"),
]


class Counting(nn.Module):
    """Finds the successor of the last token likeliest, and remembers how much it was shown."""

    def __init__(self, num_tokens: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1))
        self.num_tokens = num_tokens
        self.lengths: list[int] = []

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.lengths.append(tokens.shape[1])
        successor = (tokens + 1) % self.num_tokens
        return 10.0 * nn.functional.one_hot(successor, self.num_tokens)


def sample(prompt: list[int], **settings) -> list[int]:
    defaults = {
        "num_new_tokens": 4,
        "context_length": 3,
        "num_tokens": 8,
        "eod": 7,
        "temperature": 0.0,
        "top_k": 0,
        "generator": torch.Generator().manual_seed(0),
    }
    return generate.sample(settings.pop("model", Counting(8)), prompt, **{**defaults, **settings})


def test_sampling_uses_no_attention_kernel_that_is_built_for_each_length(monkeypatch):
    class Watching(Counting):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            may_use_cudnn.append(torch.backends.cuda.cudnn_sdp_enabled())
            return super().forward(tokens)

    may_use_cudnn: list[bool] = []
    monkeypatch.setattr(generate, "kernels_of", lambda _: CudaDriver())
    sample([0], model=Watching(8))
    assert may_use_cudnn == [False] * 4


def test_sampling_ends_at_the_end_token_and_shows_the_model_its_context():
    assert sample([0]) == [1, 2, 3, 4]
    assert sample([4]) == [5, 6]
    model = Counting(8)
    sample([0, 1], model=model, num_new_tokens=3)
    assert model.lengths == [2, 3, 3]


def test_top_k_limits_the_choice_and_padding_is_never_drawn():
    hot = {"temperature": 50.0, "num_new_tokens": 50, "eod": 99}
    assert sample([0], top_k=1, **hot) == [i % 8 for i in range(1, 51)]
    assert sample([0], **hot) == sample([0], **hot), "the seed repeats it"
    assert len(set(sample([0], **hot))) > 3
    assert max(sample([3], num_tokens=4, **hot)) < 4


@pytest.mark.parametrize("temperature", [1e-40, 5e-324, 1e-9])
def test_the_lowest_temperatures_choose_the_most_likely_token(temperature):
    assert sample([0], temperature=temperature) == [1, 2, 3, 4]
    assert sample([0], temperature=temperature, top_k=3) == [1, 2, 3, 4]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_that_are_not_finite_are_an_error_rather_than_text(temperature):
    class Diverged(Counting):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * float("nan")

    with pytest.raises(ValueError, match=r"finite.*--ckpt-step"):
        sample([0], model=Diverged(8), temperature=temperature)


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--prompt", "caf\udce9"),
        ("--seed", str(1 << 64)),
        ("--top-k", "-3"),
        ("--temperature", "nan"),
    ],
)
def test_bad_values_are_errors_with_their_flag(capsys, flag, value):
    with pytest.raises(SystemExit) as end:
        generate.main(["--load", "nowhere", "--prompt", "fine", flag, value])
    assert end.value.code == 2
    assert flag in capsys.readouterr().err.splitlines()[-1]


def test_a_prompt_that_the_tokenizer_has_no_tokens_for_is_one_line(tmp_path, capsys):
    ids = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "40"]
    run_ranks(1, _train, [*SETTINGS, *ids, "--save", str(tmp_path)])
    for prompt in ("3 41", "two", "-1"):
        assert generate.main(["--load", str(tmp_path), f"--prompt={prompt}"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("generate: Expected token ids")


def _train(argv: list[str]) -> None:
    pretrain_gpt.run(argv)


def test_the_data_and_the_device_of_the_training_may_be_gone(tmp_path, capsys):
    # In the format without digests, so that what is in the file can be changed.
    run_ranks(1, _train, [*SETTINGS, "--ckpt-format", "torch_dcp", "--save", str(tmp_path)])
    (state_file,) = tmp_path.glob("*/train_state.json")
    state = json.loads(state_file.read_text())
    state["config"] |= {"mock_data": False, "data_path": ["/nowhere/data"], "device": "cuda"}
    state_file.write_text(json.dumps(state))
    assert generate.main(["--load", str(tmp_path), "--prompt", "ab", "--max-new-tokens", "2"]) == 0
    assert "--- prompt: 'ab'" in capsys.readouterr().out
    for value in ("16", 0):
        changed = {**state, "config": state["config"] | {"seq_length": value}}
        state_file.write_text(json.dumps(changed))
        assert generate.main(["--load", str(tmp_path)]) == 2
        assert f"got {value!r}." in capsys.readouterr().err
    del state["config"]
    state_file.write_text(json.dumps(state))
    assert generate.main(["--load", str(tmp_path)]) == 2
    assert "Expected the run's configuration" in capsys.readouterr().err


def test_weights_without_a_run_write_the_same_text_with_a_config_file(tmp_path, capsys):
    run_ranks(1, _train, [*SETTINGS, "--save", str(tmp_path / "run")])
    asked = ["--prompt", "ab", "--max-new-tokens", "3", "--temperature", "0"]
    assert generate.main(["--load", str(tmp_path / "run"), *asked]) == 0
    written = capsys.readouterr().out
    model, _, _ = generate.load_model(str(tmp_path / "run"), None)

    # In our format, and in PyTorch's.
    imported = tmp_path / "imported" / "iter_0000001"
    saved, weights = open_checkpoint(LocalStore(tmp_path / "run"), "iter_0000002"), {}
    for key, tensor in saved.tensors.items():
        if key.startswith("model."):
            value = read_piece(saved, key, Box.whole(tensor.shape))
            weights[key] = (value, whole(value))
    write_checkpoint(imported, weights, {}, world_size=1)
    dcp.save(model.state_dict(), checkpoint_id=tmp_path / "plain", no_dist=True)

    settings = tmp_path / "run.yaml"
    settings.write_text("\n".join(f"{flag[2:]}: {value}" for flag, value in MODEL.items()))
    for load in (imported.parent, imported, tmp_path / "plain"):
        assert generate.main(["--load", str(load), *asked]) == 2
        assert "--config" in capsys.readouterr().err
        assert generate.main(["--load", str(load), "--config", str(settings), *asked]) == 0
        assert capsys.readouterr().out == written
    step = ["--ckpt-step", "1", "--config", str(settings)]
    assert generate.main(["--load", str(imported), *step]) == 2
    assert "Expected a directory of checkpoints with --ckpt-step" in capsys.readouterr().err


def test_greedy_tokens_match_transformers_with_a_prefix(tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    folder = save_model(tmp_path / "model", "gemma3_text")
    begin_texts(folder)
    kind = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|endoftext|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    prompts = ("def main():", "the answer", "")
    asked = [word for prompt in prompts for word in ("--prompt", prompt)]
    asked += ["--load", str(folder), "--max-new-tokens", "8", "--temperature", "0"]
    assert generate.main(asked) == 0
    written = capsys.readouterr().out

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    # Rows of the embedding that have no token are never drawn here.
    unused = list(range(len(tokenizer), model.config.vocab_size))
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": 0}
    options["suppress_tokens"] = unused or None
    differs = []
    for prompt in prompts:
        inputs = torch.tensor([tokenizer(prompt).input_ids])
        assert inputs[0, 0] == 3
        found = model.generate(inputs, **options)
        new = found[0, inputs.shape[1] :].tolist()
        text = tokenizer.decode(new[:-1] if new[-1] == 0 else new)
        assert f"prompt: {prompt!r}\n{prompt}{text}\n" in written
        if prompt:
            found = model.generate(inputs[:, 1:], **options)
            differs.append(found[0, inputs.shape[1] - 1 :].tolist() != new)
    assert any(differs), "it matters"
    assert written.startswith("texts start with")


@pytest.mark.parametrize("family", ["llama", "qwen3_next"])
def test_the_likeliest_tokens_match_transformers(tmp_path, capsys, family):
    """In fp32."""
    transformers = pytest.importorskip("transformers")
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

    asked = ["--prompt", TEXT[:12], "--max-new-tokens", "12", "--temperature", "0"]
    assert generate.main(["--load", str(folder), *asked]) == 0
    assert capsys.readouterr().out == f"--- prompt: {TEXT[:12]!r}\n{expected}\n\n"


def test_a_prompt_with_a_token_beyond_the_embedding_is_an_error(tmp_path, capsys):
    folder = save_model(tmp_path / "model", "qwen3", dtype=torch.bfloat16)
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    unused = range(tokenizer.get_vocab_size(), VOCAB)
    tokenizer.add_tokens([*(f"<unused{number}>" for number in unused), "<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))

    asked = ["--load", str(folder), "--max-new-tokens", "3", "--temperature", "5", "--prompt"]
    assert generate.main([*asked, "def main"]) == 0
    assert "prompt: 'def main'" in capsys.readouterr().out
    assert generate.main([*asked, "def <pad>"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"--prompt: expected token ids below the {VOCAB} rows" in line
