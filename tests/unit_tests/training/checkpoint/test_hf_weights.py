"""Weights in the transformers library's files: its logits, and loading them with any engine."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from megatron.core.dist_checkpointing.errors import CheckpointError
from megatron.core.distributed.torch_fsdp2 import reshard
from megatron.core.dtensors import local_tensor
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_weights import load_hf, save_hf
from megatron.training.tokenizer import (
    ByteTokenizer,
    HuggingFaceTokenizer,
    train_bpe,
)
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.dist_checkpointing.helpers.crashes import (
    KILLED,
    Child,
    Fault,
    Forks,
    Kill,
    forks,
    mount_small_disk,
    watched,
)
from tests.unit_tests.core.dist_checkpointing.helpers.live_bytes import Live
from tests.unit_tests.core.dist_checkpointing.helpers.models import Setting, Trained
from tests.unit_tests.core.dist_checkpointing.helpers.scenes import memory_folder
from tests.unit_tests.training.helpers.hf_folders import (
    ARCHITECTURES,
    CPU,
    QWEN3,
    VOCAB,
    change_config,
    digests,
    names_in,
    plain_gpt,
    shard_model,
    sharded_gpt,
)

LLAMA = dataclasses.replace(QWEN3, qk_layernorm=False, untie_embeddings_and_output_weights=True)
ENGINES = ("megatron_fsdp", "torch_fsdp2")
save_exactly = partial(save_hf, dtype=torch.float32)
pytestmark = pytest.mark.filterwarnings("ignore:.*SwigPy.*:DeprecationWarning")


def local_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of this rank's weights."""
    return {
        name: local_tensor(weight).detach().clone() for name, weight in model.named_parameters()
    }


def loss_of(model: nn.Module) -> float:
    tokens = torch.randint(0, VOCAB, (2, 9), generator=torch.Generator().manual_seed(7))
    with torch.no_grad():
        return float(model(tokens[:, :-1], tokens[:, 1:]).mean())


# What transformers makes of it


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_transformers_computes_the_same_logits_from_what_is_saved(transformers, tmp_path, case):
    model = plain_gpt(dataclasses.replace(QWEN3, **ARCHITECTURES[case]))
    save_exactly(model, tmp_path / "gpt", CPU)
    theirs, report = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "gpt", output_loading_info=True
    )
    assert type(theirs).__name__ == f"{case.split()[0]}ForCausalLM"
    assert not any(report.values()), "missing, unexpected or of another shape"
    assert theirs.dtype == torch.float32
    assert theirs.config.eos_token_id is None
    tokens = torch.randint(0, VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    # And back, from the files and the config that it writes itself.
    theirs.save_pretrained(tmp_path / "theirs")
    other = plain_gpt(model.config, seed=1)
    load_hf(other, tmp_path / "theirs")
    assert all(map(torch.equal, model.parameters(), other.parameters()))


def test_shards_with_an_index_contain_the_same_weights(transformers, tmp_path):
    model = plain_gpt()
    save_exactly(model, tmp_path / "gpt", CPU, max_shard_bytes=8000)
    index = json.loads((tmp_path / "gpt/model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert names_in(tmp_path / "gpt") == ["config.json", *files, "model.safetensors.index.json"]
    assert files[0] == f"model-00001-of-{len(files):05}.safetensors"
    sizes = [sum(t.nbytes for t in load_file(tmp_path / "gpt" / file).values()) for file in files]
    assert len(sizes) > 2
    assert max(sizes) <= 8000
    assert sum(sizes) == index["metadata"]["total_size"]

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "gpt")
    with torch.no_grad():
        tokens = torch.arange(12).view(2, 6)
        torch.testing.assert_close(model(tokens), theirs(tokens).logits, rtol=1e-5, atol=1e-5)
    other = plain_gpt(seed=1)
    load_hf(other, tmp_path / "gpt")
    assert all(map(torch.equal, model.parameters(), other.parameters()))


TEXT = 'Once upon a time, 12 größere Füchse 🦊 said:\n\n  "Hi"\x00<|endoftext|>'


@pytest.mark.parametrize("kind", ["tokenizers", "bytes"])
def test_the_tokenizer_beside_the_weights_gives_the_same_ids(transformers, tmp_path, kind):
    tokenizer: Any = ByteTokenizer()
    if kind == "tokenizers":
        tokenizer = HuggingFaceTokenizer(train_bpe([TEXT] * 3, 300, tmp_path / "tokenizer.json"))
    save_exactly(plain_gpt(LLAMA), tmp_path / "gpt", CPU, tokenizer=tokenizer)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path / "gpt")
    text = TEXT if kind == "tokenizers" else TEXT.removesuffix("<|endoftext|>")
    assert loaded(text)["input_ids"] == tokenizer.tokenize(text)
    assert loaded.decode(tokenizer.tokenize(text)) == text
    assert loaded.eos_token_id == tokenizer.eod
    assert json.loads((tmp_path / "gpt/config.json").read_text())["eos_token_id"] == tokenizer.eod
    # What transformers itself has loaded goes along as well.
    save_exactly(plain_gpt(LLAMA), tmp_path / "again", CPU, tokenizer=loaded)
    again = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    assert again(text)["input_ids"] == tokenizer.tokenize(text)
    assert json.loads((tmp_path / "again/config.json").read_text())["eos_token_id"] == tokenizer.eod


# Engines and numbers of ranks


@pytest.mark.parametrize(
    ("engine", "config", "world_size"),
    [("megatron_fsdp", QWEN3, 3), ("megatron_fsdp", LLAMA, 1), ("torch_fsdp2", LLAMA, 3)],
    ids=["tied", "one rank", "fsdp2"],
)
def test_weights_are_loaded_on_any_number_of_ranks(tmp_path, engine, config, world_size):
    """test_hf_weights_on_ranks.py shows that the files do not depend on the ranks that save."""

    def save() -> None:
        model = sharded_gpt(engine, seed=0, config=config)
        save_exactly(model, tmp_path / "gpt", CPU, max_shard_bytes=20000)

    def load() -> None:
        model, expected = (sharded_gpt(engine, seed=seed, config=config) for seed in (1, 0))
        before = loss_of(model)
        load_hf(model, tmp_path / "gpt")
        assert loss_of(model) == loss_of(expected) != before
        reshard(model)
        reshard(expected)
        got = local_weights(model)
        assert all(torch.equal(got[name], one) for name, one in local_weights(expected).items())

    run_ranks(2, save)
    run_ranks(world_size, load)


@pytest.mark.parametrize(
    ("engine", "config", "world_size"),
    [("megatron_fsdp", QWEN3, 3), ("torch_fsdp2", LLAMA, 3), ("megatron_fsdp", LLAMA, 1)],
    ids=["tied", "fsdp2", "one rank"],
)
def test_rows_added_to_a_vocabulary_are_the_mean_of_the_others(
    tmp_path: Path, engine: str, config: TransformerConfig, world_size: int
) -> None:
    # More rows than one rank has, and in one piece with rows of the file.
    num_rows = VOCAB + 40
    before = plain_gpt(config)
    save_exactly(before, tmp_path / "gpt", CPU)

    def load(target: Path) -> None:
        model = sharded_gpt(engine, seed=1, config=config, num_rows=num_rows)
        with pytest.raises(CheckpointError, match=f"vocab_size {VOCAB} .* {num_rows}"):
            load_hf(model, tmp_path / "gpt")
        load_hf(model, tmp_path / "gpt", adds_rows=True)
        save_exactly(model, target, CPU)

    run_ranks(world_size, load, tmp_path / "more")
    there, more = (load_file(tmp_path / name / "model.safetensors") for name in ("gpt", "more"))
    assert json.loads((tmp_path / "more/config.json").read_text())["vocab_size"] == num_rows
    of_vocabulary = {"model.embed_tokens.weight", "lm_head.weight"} & there.keys()
    assert len(of_vocabulary) == (1 if config is QWEN3 else 2)
    for name in of_vocabulary:
        assert torch.equal(more[name][:VOCAB], there[name])
        mean = there[name].mean(0, keepdim=True).expand(40, -1)
        torch.testing.assert_close(more[name][VOCAB:], mean, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(more[name], there[name]) for name in there.keys() - of_vocabulary)


def test_no_rows_are_taken_away_from_a_vocabulary(tmp_path: Path) -> None:
    save_exactly(plain_gpt(), tmp_path / "gpt", CPU)
    fewer = GPTModel(QWEN3, VOCAB - 1)
    with pytest.raises(CheckpointError, match=f"vocab_size {VOCAB} .* {VOCAB - 1}"):
        load_hf(fewer, tmp_path / "gpt", adds_rows=True)


def test_pending_updates_of_offloaded_weights_are_waited_for(tmp_path):
    def run(folder: Path) -> None:
        with torch.device("meta"):
            model = GPTModel(QWEN3, VOCAB)
        setting = Setting(fraction=1.0, compute_dtype=torch.bfloat16)
        trained = Trained(setting, seed=0, model=model)
        trained.step(0)
        trained.delay_update()
        trained.step(1)
        save_exactly(trained.model, folder / "gpt", CPU)
        trained.optimizer.synchronize()
        expected, loss = local_weights(model), loss_of(model)
        trained.delay_update()
        trained.step(2)
        load_hf(trained.model, folder / "gpt")
        assert loss_of(trained.model) == loss, "compute weights follow, without a later update"
        trained.optimizer.synchronize()
        reshard(trained.model)  # the root shows whole weights after a forward
        got = local_weights(trained.model)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())

    run_ranks(2, run, tmp_path)


def test_files_of_other_dtypes_are_converted(tmp_path):
    model = plain_gpt()
    save_exactly(model, tmp_path / "gpt", CPU)
    tensors = load_file(tmp_path / "gpt/model.safetensors")
    save_file(
        {name: tensor.bfloat16() for name, tensor in tensors.items()},
        tmp_path / "gpt/model.safetensors",
    )
    other = plain_gpt(seed=1)
    load_hf(other, tmp_path / "gpt")
    for one, other_one in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one.bfloat16().float(), other_one)
    other.to(torch.float16)
    save_hf(other, tmp_path / "half", CPU)
    assert {t.dtype for t in load_file(tmp_path / "half/model.safetensors").values()} == {
        torch.float16
    }
    assert json.loads((tmp_path / "half/config.json").read_text())["dtype"] == "float16"


class Net(nn.Module):
    """No GPT: two names for one weight, a buffer, a scalar, several dtypes, more columns than
    rows.
    """

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.second = nn.Linear(5, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.rough = nn.Parameter(torch.randn(3, dtype=torch.bfloat16))
        self.register_buffer("seen", torch.arange(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("next", torch.arange(3.0, dtype=torch.float64))


def test_any_module_is_saved_under_its_own_names_without_a_config(tmp_path):
    torch.manual_seed(0)
    model = Net()
    save_hf(model, tmp_path / "net", CPU)
    assert names_in(tmp_path / "net") == ["model.safetensors"]
    # By default, only fp32 tensors are converted, to bf16.
    expected = {
        name: tensor.bfloat16() if tensor.dtype == torch.float32 else tensor
        for name, tensor in model.state_dict().items()
    }
    with safe_open(tmp_path / "net/model.safetensors", framework="pt") as file:
        assert file.metadata() == {"format": "pt"}
        assert set(file.keys()) == set(expected) - {"second.weight"}
        for name in file.keys():  # noqa: SIM118, it is no dict
            assert file.get_tensor(name).dtype == expected[name].dtype
            assert torch.equal(file.get_tensor(name), expected[name])

    content = (tmp_path / "net/model.safetensors").read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    for name, tensor in expected.items():
        if name in header:
            begin = 8 + length + header[name]["data_offsets"][0]
            assert begin % tensor.element_size() == 0, "aligned"

    other = Net()
    with torch.no_grad():
        other.scale.zero_()
        other.seen.zero_()
    load_hf(other, tmp_path / "net")
    assert all(
        torch.equal(tensor.to(other.state_dict()[name].dtype), other.state_dict()[name])
        for name, tensor in expected.items()
    )


# What cannot be done


@pytest.fixture
def saved(tmp_path) -> Path:
    save_exactly(plain_gpt(), tmp_path / "gpt", CPU)
    return tmp_path / "gpt"


def change_tensors(folder: Path, **changes: torch.Tensor | None) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors |= {name.replace("__", "."): tensor for name, tensor in changes.items()}
    save_file(
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
        folder / "model.safetensors",
    )


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (
            lambda folder: change_tensors(folder, model__norm__weight=None),
            "it lacks model.norm.weight",
        ),
        (lambda folder: change_tensors(folder, more=torch.ones(1)), "it has unexpected keys more"),
        (
            lambda folder: change_tensors(folder, model__norm__weight=torch.ones(23)),
            r"model.norm.weight has shape \(23,\) where the model has \(24,\)",
        ),
        (
            lambda folder: change_tensors(
                folder, model__norm__weight=torch.ones(24, dtype=torch.int32)
            ),
            "model.norm.weight is torch.int32 where the model has torch.float32",
        ),
        (
            lambda folder: change_config(folder, num_key_value_heads=4),
            "num_key_value_heads 4 where the model has 2",
        ),
        (lambda folder: change_config(folder, model_type="qwen2"), "qk_norm False where"),
        (
            lambda folder: change_config(folder, rope_parameters=None, rope_theta=7.0),
            "rotary.base 7.0 where the model has 500.0",
        ),
    ],
)
def test_weights_of_another_model_are_rejected_before_anything_is_changed(saved, spoil, message):
    spoil(saved)
    model = plain_gpt(seed=1)
    before = local_weights(model)
    with pytest.raises(CheckpointError, match=message):
        load_hf(model, saved)
    assert all(torch.equal(tensor, before[name]) for name, tensor in local_weights(model).items())


def test_a_config_of_transformers_4_is_read(saved):
    model = plain_gpt(seed=1)
    change_config(
        saved, rope_parameters=None, rope_scaling=None, rope_theta=500, partial_rotary_factor=None
    )
    load_hf(model, saved)
    (saved / "config.json").unlink()
    load_hf(model, saved)
    assert loss_of(model) == loss_of(plain_gpt())


def test_constants_in_old_directories_are_ignored(saved):
    path = saved / "model.safetensors"
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file(load_file(path) | old, path)
    model = plain_gpt(seed=1)
    load_hf(model, saved)
    assert loss_of(model) == loss_of(plain_gpt())


def test_a_tied_weight_may_be_stored_twice_with_the_same_values(saved):
    model = plain_gpt(seed=1)
    same = load_file(saved / "model.safetensors")["model.embed_tokens.weight"].clone()
    other = same.clone()
    other[-1, -1] += 1
    change_tensors(saved, lm_head__weight=same)
    load_hf(model, saved)
    assert loss_of(model) == loss_of(plain_gpt())
    # A config that ties the two does not make them equal: transformers unties them.
    change_tensors(saved, lm_head__weight=other)
    ties = r"with which config.json ties it; set tie_word_embeddings to false"
    with pytest.raises(CheckpointError, match=rf"lm_head.weight is not model.embed_.*, {ties}"):
        load_hf(model, saved)
    change_config(saved, tie_word_embeddings=False)
    with pytest.raises(CheckpointError, match="with which it is tied"):
        load_hf(model, saved)
    change_tensors(saved, lm_head__weight=same, model__embed_tokens__weight=None)
    load_hf(plain_gpt(seed=1), saved)


def test_a_difference_that_one_rank_finds_is_an_error_on_all(saved):
    """The difference is in rows of rank 0 alone."""

    def load() -> str:
        model = sharded_gpt("megatron_fsdp", seed=1)
        before = local_weights(model)
        with pytest.raises(CheckpointError, match="with which it is tied") as caught:
            load_hf(model, saved)
        assert all(
            torch.equal(tensor, before[name]) for name, tensor in local_weights(model).items()
        )
        return str(caught.value)

    other = load_file(saved / "model.safetensors")["model.embed_tokens.weight"].clone()
    other[0, 0] += 1
    change_tensors(saved, lm_head__weight=other)
    change_config(saved, tie_word_embeddings=False)
    one, two = run_ranks(2, load)
    assert not one.startswith("rank 0: ")
    assert two == f"rank 0: {one}"


def test_an_existing_directory_is_not_changed(saved):
    before = digests(saved)

    def save() -> None:
        with pytest.raises(CheckpointError, match=r"at .*gpt, got one that holds config.json"):
            save_exactly(sharded_gpt("megatron_fsdp", seed=1), saved, CPU)

    run_ranks(2, save)
    assert digests(saved) == before
    assert names_in(saved.parent) == ["gpt"]


def test_a_save_that_cannot_succeed_writes_nothing(tmp_path):
    for config in (
        dataclasses.replace(QWEN3, rotary_percent=0.5),
        dataclasses.replace(QWEN3, add_qkv_bias=True),
    ):
        with pytest.raises(ConfigError, match="expected a GPT that an architecture"):
            save_exactly(GPTModel(config, VOCAB), tmp_path / "gpt", CPU)
    for folder, options in ((tmp_path / "gpt", {"max_shard_bytes": 0}), ("memory://gpt", {})):
        with pytest.raises(ValueError, match="Expected"):
            save_exactly(plain_gpt(), folder, CPU, **options)
    (tmp_path / "file").touch()
    with pytest.raises(
        CheckpointError, match=r"Expected to write into .*file, got: FileExistsError"
    ):
        save_exactly(plain_gpt(), tmp_path / "file" / "gpt", CPU)
    assert names_in(tmp_path) == ["file"]


# Ends in the middle


@pytest.fixture(scope="module")
def forked() -> Iterator[Forks]:
    with forks(
        "tests.unit_tests.core.dist_checkpointing.helpers.crashes",
        "tests.unit_tests.core.dist_checkpointing.helpers.models",
        "megatron.training.checkpoint.hf_weights",
    ) as found:
        yield found


def save_watched(folder: Path, before: Any) -> str | None:
    """Saves, and returns the error."""
    model = plain_gpt()
    with watched(folder, before):
        try:
            save_exactly(
                model, folder / "gpt", CPU, tokenizer=ByteTokenizer(), max_shard_bytes=20000
            )
        except CheckpointError as failure:
            return str(failure)
    return None


def check_whole(folder: Path) -> None:
    model = plain_gpt(seed=1)
    load_hf(model, folder)
    assert loss_of(model) == loss_of(plain_gpt())


def test_a_killed_save_leaves_a_whole_directory_or_none_and_the_next_one_deletes_its_draft(forked):
    def run() -> list[bool]:
        operations: list[str] = []
        with memory_folder() as root:
            assert save_watched(root, lambda each: operations.append(str(each))) is None
        (rename,) = (n for n, each in enumerate(operations) if each.startswith("rename"))

        is_there = []
        # Every eighth operation, and all around the rename.
        around = range(rename - 1, len(operations))
        for number in sorted({*range(0, len(operations), 8), *around}):
            with memory_folder() as root:
                assert Child(save_watched, root, Kill(number)).end() == KILLED
                is_there.append("gpt" in names_in(root))
                if is_there[-1]:
                    check_whole(root / "gpt")
                elif number >= rename - 1 or number == 0:
                    assert Child(save_watched, root, lambda _: None).end() is None
                    assert names_in(root) == ["gpt"]
        return is_there

    is_there = forked.run(run, timeout=300.0)
    assert is_there == sorted(is_there), "it appears in one of the operations"
    assert is_there.count(False) > 5
    assert is_there[-1]


@pytest.mark.parametrize(("first", "lasts"), [(0, False), (1, True)], ids=["once", "full"])
def test_a_disk_that_fails_is_one_error_and_leaves_nothing(forked, first, lasts):
    def run() -> tuple[int, int]:
        num_failed = num_saved = 0
        for number in range(first, 1000, 5):
            with memory_folder() as root:
                ending = Child(save_watched, root, Fault(number, lasts=lasts)).end()
                if ending is None:
                    num_saved += 1
                    check_whole(root / "gpt")
                else:
                    num_failed += 1
                    assert "No space left on device" in ending, ending
                    assert names_in(root) == [] or not lasts, "there is room enough to delete"
                    assert "gpt" not in names_in(root)
                # A failed fsync of a directory, or a failed deletion, does not fail the save.
                if num_saved > 4:
                    return num_failed, num_saved
        raise AssertionError("the save did not finish")

    num_failed, _ = forked.run(run, timeout=300.0)
    assert num_failed > 4


def save_on_small_disk(folder: Path, dtype: torch.dtype) -> str | None:
    """The error, "" for none, None if no disk can be mounted."""
    if not mount_small_disk(folder, 3 << 20):
        return None
    model = nn.Linear(1024, 1024, bias=False)  # 4 MiB in fp32
    try:
        save_hf(model, folder / "net", CPU, dtype=dtype)
    except CheckpointError as failure:
        assert names_in(folder) == []
        return str(failure)
    return ""


def test_a_disk_without_enough_space_is_an_error_before_anything_is_written(forked: Forks) -> None:
    def run() -> tuple[str | None, str | None]:
        found = []
        for dtype in (torch.float32, torch.bfloat16):
            with memory_folder() as root:
                found.append(Child(save_on_small_disk, root, dtype).result())
        return found[0], found[1]

    in_fp32, in_bf16 = forked.run(run, timeout=60.0)
    if in_fp32 is None:
        pytest.skip("no file system can be mounted here")
    assert "Expected room for 4.00 MiB of weights in" in in_fp32
    assert "got 3.00 MiB: No space left on device" in in_fp32
    assert in_bf16 == ""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_saving_has_no_whole_tensor_in_memory(tmp_path, dtype):
    model = nn.Linear(4096, 4096, bias=False)
    with Live() as live:
        save_hf(model, tmp_path / "net", CPU, dtype=dtype)
    # The weight itself is counted once it has been detached.
    assert model.weight.nbytes <= live.peak < 1.3 * model.weight.nbytes


# Models of the transformers library


def their_model(architecture: str, tied: bool) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    settings = getattr(transformers, f"{architecture}Config")(
        vocab_size=VOCAB,
        hidden_size=24,
        intermediate_size=10,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        tie_word_embeddings=tied,
    )
    return getattr(transformers, f"{architecture}ForCausalLM")(settings)


def train(
    model: nn.Module, num_steps: int, rank: int = 0, world_size: int = 1, first: int = 0
) -> list[float]:
    """The losses of steps on one global batch each."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    losses = []
    for number in range(first, first + num_steps):
        tokens = torch.randint(0, VOCAB, (4, 9), generator=torch.Generator().manual_seed(number))
        own = tokens[rank::world_size]
        loss = model(input_ids=own, labels=own).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().double()
        if world_size > 1:
            dist.all_reduce(total)
        losses.append(float(total) / world_size)
    return losses


def test_their_models_train_under_both_engines_and_are_saved_for_them(transformers, tmp_path):
    def run(folder: Path, architecture: str, tied: bool, engine: str) -> list[float]:
        rank = dist.get_rank()
        model = their_model(architecture, tied)
        shard_model(model, engine, torch.float32)
        losses = train(model, 3, rank, 2)
        save_exactly(model, folder, CPU)
        expected = local_weights(model)
        with torch.no_grad():
            for parameter in model.parameters():
                local_tensor(parameter).zero_()
        load_hf(model, folder)
        got = local_weights(model)
        assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())
        return losses + train(model, 1, rank, 2, first=3)

    for architecture, tied, engine in (
        ("Qwen3", True, "megatron_fsdp"),
        ("Llama", False, "torch_fsdp2"),
    ):
        plain, folder = their_model(architecture, tied), tmp_path / architecture
        expected = train(plain, 4)
        names = set(plain.state_dict()) - ({"lm_head.weight"} if tied else set())
        losses = run_ranks(2, run, folder, architecture, tied, engine)[0]
        assert losses == pytest.approx(expected, rel=1e-6)
        files = ["config.json", "generation_config.json", "model.safetensors"]
        assert names_in(folder) == files
        assert load_file(folder / "model.safetensors").keys() == names
        loaded, report = transformers.AutoModelForCausalLM.from_pretrained(
            folder, output_loading_info=True
        )
        assert type(loaded).__name__ == f"{architecture}ForCausalLM"
        assert loaded.config.architectures == [f"{architecture}ForCausalLM"]
        assert not any(report.values())

    # A config of another arithmetic is an error here as well.
    rope = {"rope_type": "default", "rope_theta": 7.0}
    change_config(tmp_path / "Llama", rope_parameters=rope)
    with pytest.raises(CheckpointError, match=r"rope_theta': 7\.0"):
        load_hf(their_model("Llama", False), tmp_path / "Llama")
