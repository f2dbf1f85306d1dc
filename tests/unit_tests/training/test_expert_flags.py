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
    ("flags", "named"),
    [
        (f"--num-experts 6 {SIZE} 4", SIZE),
        (f"--num-experts 6 {SIZE} 3", SIZE),
        (f"--num-experts 8 {SIZE} 4 --num-distributed-optimizer-instances 2", SIZE),
        (f"--num-experts 8 {SIZE} 0", SIZE),
        (f"{SIZE} 2", "--num-experts"),
        (f"--num-experts 8 {SIZE} 2 --use-torch-fsdp2", SIZE),
        ("--num-experts 4 --moe-router-topk 5", "--moe-router-topk"),
        (
            "--num-experts 8 --moe-router-num-groups 3 --moe-router-group-topk 1",
            "--moe-router-num-groups",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 5",
            "--moe-router-group-topk",
        ),
        (
            "--num-experts 8 --moe-router-num-groups 4 --moe-router-group-topk 1 "
            "--moe-router-topk 3",
            "--moe-router-topk",
        ),
    ],
)
def test_flags_that_contradict_each_other_are_rejected_by_name(flags, named):
    assert _refusal(flags, world_size=4).startswith(f"{named}: expected ")


@pytest.mark.parametrize(
    ("flags", "named"),
    [(f"{SIZE} 2", "--num-experts"), (f"--num-experts 8 {SIZE} 2 --no-use-megatron-fsdp", SIZE)],
)
def test_one_rank_cannot_divide_experts_without_experts_or_an_engine(flags, named):
    assert _refusal(flags, world_size=1).startswith(f"{named}: expected ")


def test_one_rank_for_all_experts_is_no_setting():
    assert parse_config([*MINIMAL, SIZE, "1"], 4) == parse_config(MINIMAL, 4)


@pytest.mark.parametrize(
    ("flags", "instead"),
    [
        ("", "--moe-router-pre-softmax"),
        ("--moe-router-pre-softmax --moe-router-norm-topk", "--moe-router-no-norm-topk"),
        ("--moe-router-score-function sigmoid --moe-router-norm-topk", "--moe-router-no-norm-topk"),
    ],
)
def test_a_router_whose_single_weight_is_always_1_is_rejected_in_training(flags, instead):
    flags = f"--num-experts 4 --moe-router-topk 1 {flags}"
    message = _refusal(flags, 1)
    assert message.startswith("--moe-router-topk: expected ")
    assert f" {instead} " in message
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
