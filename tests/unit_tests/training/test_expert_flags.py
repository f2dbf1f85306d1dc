"""Flags of mixtures of experts that contradict each other, or the number of ranks: one clear line
each.
"""

from __future__ import annotations

import pytest

from megatron.core.options import ConfigError
from megatron.training.arguments import parse_config

MINIMAL = [
    *("--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 16 --mock-data").split(),
    *"--tokenizer-type NullTokenizer --vocab-size 31 --num-workers 0 --eval-iters 0".split(),
    *"--micro-batch-size 1 --train-iters 1 --lr 0.1".split(),
]
SIZE = "--expert-model-parallel-size"


def _refusal(flags: str, world_size: int) -> str:
    with pytest.raises(ConfigError) as error:
        parse_config([*MINIMAL, *flags.split()], world_size)
    return str(error.value)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (f"--num-experts 6 {SIZE} 4", f"{SIZE}: expected a divisor of --num-experts 6, got 4."),
        (f"--num-experts 6 {SIZE} 3", f"{SIZE}: expected a divisor of 4 ranks, got 3."),
        (
            f"--num-experts 8 {SIZE} 4 --num-distributed-optimizer-instances 2",
            f"{SIZE}: expected a divisor of 2 ranks of each of 2 instances, got 4.",
        ),
        (f"--num-experts 8 {SIZE} 0", f"{SIZE}: expected an integer >= 1, got 0."),
        (
            f"{SIZE} 2",
            f"--num-experts: expected an integer >= 1, since {SIZE} is given, got None.",
        ),
        (
            f"--num-experts 8 {SIZE} 2 --use-torch-fsdp2",
            f"{SIZE}: expected --use-megatron-fsdp, got 2.",
        ),
        (
            "--num-experts 4 --moe-router-topk 5",
            "--moe-router-topk: expected at most --num-experts 4, got 5.",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
            "--moe-router-num-groups: expected a divisor of --num-experts 8, got 3.",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5",
            "--moe-router-group-topk: expected at most --moe-router-num-groups 4, got 5.",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 "
            "--moe-router-topk 3",
            "--moe-router-topk: expected at most the 2 experts of --moe-router-group-topk 1 "
            "groups, got 3.",
        ),
    ],
)
def test_what_does_not_fit_together_is_refused_in_one_line(flags, expected):
    assert _refusal(flags, world_size=4) == expected


def test_dividing_experts_needs_experts_on_one_rank_too():
    expected = f"--num-experts: expected an integer >= 1, since {SIZE} is given, got None."
    assert _refusal(f"{SIZE} 2", 1) == expected


def test_dividing_experts_needs_an_engine():
    flags = f"--num-experts 8 {SIZE} 2 --no-use-megatron-fsdp"
    assert _refusal(flags, 1) == f"{SIZE}: expected --use-megatron-fsdp, got 2."


def test_one_rank_for_all_experts_is_no_setting():
    assert parse_config([*MINIMAL, SIZE, "1"], 4) == parse_config(MINIMAL, 4)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("", "--moe-router-pre-softmax"),
        ("--moe-router-pre-softmax --moe-router-norm-topk", "--moe-router-no-norm-topk"),
        (
            "--moe-router-score-function sigmoid --moe-router-norm-topk",
            "--moe-router-no-norm-topk",
        ),
    ],
)
def test_a_router_whose_one_weight_is_always_1_is_refused_where_it_would_train(flags, instead):
    flags = f"--num-experts 4 --moe-router-topk 1 {flags}"
    assert _refusal(flags, 1) == (
        f"--moe-router-topk: expected at least 2, or {instead} beside it, since the one expert's "
        "weight is always 1 otherwise, got 1."
    )
    parse_config([*MINIMAL, *flags.split(), "--skip-train"], 1)


@pytest.mark.parametrize(
    "flags",
    [
        "--num-experts 4 --moe-router-pre-softmax",
        "--num-experts 4 --moe-router-score-function sigmoid",
        "--num-experts 1",
    ],
)
def test_a_router_whose_one_weight_varies_trains_and_so_does_one_without_a_choice(flags):
    config = parse_config([*MINIMAL, "--moe-router-topk", "1", *flags.split()], 1)
    assert config.model.moe_router_topk == 1
