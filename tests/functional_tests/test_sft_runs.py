"""Runs on conversations: from JSON lines to losses that a loop written by hand has, too."""

from __future__ import annotations

import contextlib
import io
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from megatron.core.datasets.builder import build_answer_datasets
from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder
from megatron.core.datasets.sample_dataset import SampleDataset
from megatron.training.arguments import parse_config
from megatron_hybrid import generate, preprocess_data
from tests.functional_tests.helpers.runs import logged, losses_of
from tests.helpers.hf_models import begin_texts
from tests.helpers.ranks import run_ranks
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

LAST, LR, ROWS = 4, 0.01, 4  # iterations, and rows of a global batch
MODEL = (
    "--num-layers 2 --hidden-size 16 --ffn-hidden-size 32 --num-attention-heads 2 "
    "--attention-dropout 0 --hidden-dropout 0 --normalization RMSNorm --swiglu "
    "--disable-bias-linear --make-vocab-size-divisible-by 1"
).split()
TRAINING = (
    f"--sft --seq-length 96 --micro-batch-size 1 --global-batch-size {ROWS} --train-iters {LAST} "
    f"--eval-iters 0 --lr {LR} --lr-decay-style constant --num-workers 0 --log-interval 1 "
    "--split 100 --weight-decay 0 --clip-grad 0"
).split()
SGD = "--optimizer sgd --sgd-momentum 0 --lr 0.3".split()
PER_TOKEN = "--calculate-per-token-loss"
OFFLOADED = "--optimizer-cpu-offload --overlap-cpu-optimizer-d2h-h2d".split()
MOE = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 8 --moe-aux-loss-coeff 0.01 "
    "--moe-per-layer-logging"
).split()
FILLER = 256
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class Chats(NamedTuple):
    """Conversations, and where they are."""

    talks: list[list[dict[str, str]]]
    lines: Path
    tokenizer: Path
    prefix: str


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> Chats:
    folder = tmp_path_factory.mktemp("chats")
    tokenizer = make_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    draw = random.Random(0)
    talks = []
    for number in range(40):
        talk = []
        for turn in range(draw.choice([1, 1, 2])):
            talk.append({"role": "user", "content": f"{number}+{turn}?" + "x" * draw.randrange(9)})
            talk.append(
                {"role": "assistant", "content": f"{number + turn}" + "!" * draw.randrange(5)}
            )
        talks.append(talk)
    lines = folder / "chats.jsonl"
    lines.write_text("\n".join(json.dumps({"messages": talk}) for talk in talks))
    return Chats(talks, lines, tokenizer, preprocess_chats(lines, tokenizer, folder))


def preprocess_chats(lines: Path, tokenizer: Path, folder: Path) -> str:
    """Writes files of conversations in a directory. Returns their prefix."""
    argv = ["--chat", "--input", lines, "--output-prefix", folder / "out"]
    argv += ["--tokenizer-model", tokenizer, "--workers", 2]
    with contextlib.redirect_stdout(io.StringIO()):
        assert preprocess_data.main([str(word) for word in argv]) == 0
    return str(folder / "out_chat_document")


def flags(chats: Chats, *others: object) -> list[str]:
    data = ["--data-path", chats.prefix, "--tokenizer-model", chats.tokenizer]
    return [str(word) for word in (*MODEL, *TRAINING, *data, *others)]


def train(chats: Chats, folder: Path, *others: object, world_size: int = 1) -> dict[int, float]:
    """The loss of each iteration."""
    return losses_of(flags(chats, *others), folder, world_size)


def by_hand(chats: Chats) -> dict[tuple[int, ...], list[bool]]:
    """Of each conversation's tokens, which of them are to be learned."""
    backend = Tokenizer.from_file(str(chats.tokenizer / "tokenizer.json"))
    found = {}
    for talk in chats.talks:
        tokens: list[int] = []
        is_learned: list[bool] = []
        for turn in talk:
            for text, counts in (
                (f"<|im_start|>{turn['role']}\n", False),
                (f"{turn['content']}<|im_end|>", turn["role"] == "assistant"),
                ("\n", False),
            ):
                ids = backend.encode(text, add_special_tokens=False).ids
                tokens += ids
                is_learned += [counts] * len(ids)
        found[tuple(tokens)] = is_learned
    return found


def rows_of(chats: Chats) -> SampleDataset:
    """The rows that a run reads."""
    config = parse_config(flags(chats), 1)
    dataset = build_answer_datasets(
        config.data, (LAST * ROWS, 0, 0), 10_000, config.training.seed, filler=FILLER
    ).train
    assert dataset is not None
    return dataset


def losses_by_hand(
    model: torch.nn.Module, row: dict[str, Any], wanted: dict[tuple[int, ...], list[bool]]
) -> torch.Tensor:
    """The losses of a row's unmasked tokens, each conversation computed separately."""
    found = []
    for tokens, labels in zip(
        row["tokens"].split(row["lengths"]), row["labels"].split(row["lengths"]), strict=True
    ):
        whole = (*tokens.tolist(), int(labels[-1]))
        if whole not in wanted:
            assert len(set(whole)) == 1, "what fills the row"
            continue
        each = F.cross_entropy(model(tokens.unsqueeze(0))[0], labels, reduction="none")
        found.append(each[torch.tensor(wanted[whole][1:])])
    return torch.cat(found)


def mean_of_rows(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([row.mean() for row in rows]).mean()


def mean_of_tokens(rows: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat(rows).mean()


@pytest.mark.parametrize(
    ("mean", "others"),
    [
        (mean_of_rows, []),
        (mean_of_tokens, [PER_TOKEN]),
        (mean_of_tokens, [PER_TOKEN, "--use-torch-fsdp2"]),
    ],
    ids=["rows", "tokens", "tokens-fsdp2"],
)
def test_losses_match_a_loop_written_by_hand(
    chats: Chats,
    tmp_path: Path,
    mean: Callable[[list[torch.Tensor]], torch.Tensor],
    others: list[str],
) -> None:
    saving = ["--save", tmp_path / "run", "--save-interval", 1, "--ckpt-format", "fsdp_dtensor"]
    expected = train(chats, tmp_path, *SGD, *saving, *others, world_size=2)
    wanted, rows = by_hand(chats), rows_of(chats)
    model, _, _ = generate.load_model(str(tmp_path / "run"), 1)
    optimizer = torch.optim.SGD(model.train().parameters(), lr=0.3)
    for iteration in range(2, LAST + 1):
        batch = [rows[(iteration - 1) * ROWS + number] for number in range(ROWS)]
        loss = mean([losses_by_hand(model, row, wanted) for row in batch])
        assert loss.item() == pytest.approx(expected[iteration], rel=1e-5), iteration
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert len(set(expected.values())) == LAST
    assert max(len(rows[number]["lengths"]) for number in range(LAST * ROWS)) > 2, "packed"


def test_unmasked_tokens_have_the_same_weight_at_any_microbatch_size(
    chats: Chats, tmp_path: Path
) -> None:
    """In one microbatch all unmasked tokens have the same weight in any case."""
    whole = ["--micro-batch-size", ROWS, "--main-grads-dtype", "fp32"]
    expected = train(chats, tmp_path / "whole", *whole)
    found = train(chats, tmp_path / "rows", *OFFLOADED, PER_TOKEN, world_size=2)
    assert found == pytest.approx(expected, rel=1e-5)
    assert train(chats, tmp_path / "default") != pytest.approx(expected, rel=1e-5)


def test_data_without_the_tokenizers_prefix_cause_a_warning(chats: Chats, tmp_path: Path) -> None:
    shutil.copytree(chats.tokenizer, tmp_path / "tokenizer")
    begin_texts(tmp_path / "tokenizer", FILLER + 3)
    begun = chats._replace(tokenizer=tmp_path / "tokenizer")
    for name, first in (("other", 1), ("again", FILLER + 3)):
        with IndexedDatasetBuilder(str(tmp_path / name), "uint16") as builder:
            for number in range(200):
                builder.add_document([first, *[number % FILLER] * 9])

    def log_of(one: Chats, *, is_text: bool) -> str:
        flags_of_one = flags(one, "--train-iters", 1, "--skip-train")
        if is_text:
            flags_of_one.remove("--sft")
        return run_ranks(1, logged, flags_of_one)[0]

    other, again = (begun._replace(prefix=tmp_path / name) for name in ("other", "again"))
    assert "texts start with" not in log_of(chats, is_text=True)
    assert "but the documents" not in log_of(begun, is_text=False), "a template defines the start"
    warned = f"texts start with .*, but the documents of {re.escape(str(other.prefix))} do not"
    assert re.search(warned, log_of(other, is_text=True))
    assert re.search(
        "texts start with .*, as defined by the tokenizer.s files\n", log_of(again, is_text=True)
    )


@pytest.mark.parametrize(
    "engine",
    [
        ["--expert-model-parallel-size", 2],
        [*OFFLOADED, "--recompute-granularity", "full"],
        ["--use-torch-fsdp2"],
    ],
    ids=["divided", "offloaded", "fsdp2"],
)
def test_padding_of_rows_is_sent_to_no_expert(
    chats: Chats, tmp_path: Path, engine: list[object]
) -> None:
    train(chats, tmp_path, *MOE, *engine, "--micro-batch-size", 2, world_size=2)
    found = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    loads = [record["expert_load"] for record in found if record["kind"] == "train"]
    rows = rows_of(chats)
    for step, load in enumerate(loads):
        batch = [rows[step * ROWS + number] for number in range(ROWS)]
        real = sum(int((row["tokens"] != FILLER).sum()) for row in batch)
        assert real < ROWS * 96
        assert [sum(experts) for experts in load] == [2 * real] * 2, "of each of two layers"
    assert len(loads) == LAST


@pytest.mark.parametrize(
    "engine", [[], OFFLOADED, ["--use-torch-fsdp2"]], ids=["megatron-fsdp", "offloaded", "fsdp2"]
)
def test_ranks_share_the_rows_and_resumed_runs_continue_bit_for_bit(
    chats: Chats, tmp_path: Path, engine: list[str]
) -> None:
    expected = train(chats, tmp_path / "one", *engine)
    saving = ["--save", tmp_path / "run", "--save-interval", 2]
    found = train(chats, tmp_path / "two", *engine, *saving, world_size=2)
    assert found == pytest.approx(expected, rel=1e-5)
    load = ["--load", tmp_path / "run" / "iter_0000002"]
    resumed = train(chats, tmp_path / "resumed", *engine, *load, world_size=2)
    assert resumed == {n: found[n] for n in range(3, LAST + 1)}


def test_offloaded_runs_are_bit_equal_to_runs_on_the_device(chats: Chats, tmp_path: Path) -> None:
    # Two of the layers send their activations down.
    same = ["--num-layers", 4]
    on_device = train(chats, tmp_path / "device", *same, world_size=2)
    on_host = train(chats, tmp_path / "host", *same, *OFFLOADED, world_size=2)
    assert on_host == on_device
    activations = [*OFFLOADED, "--activation-offload", "--activation-offload-min-kib", 1]
    activations += ["--activation-offload-gib", 1]  # of memory that other tests want, too
    assert train(chats, tmp_path / "activations", *same, *activations, world_size=2) == on_device
