"""Parts of a model: frozen ones, and ones with another rate."""

from __future__ import annotations

from typing import ClassVar

import pytest
import torch
from torch import nn

from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.optimizer.torch_optimizer import parameter_groups
from megatron.core.options import ConfigError
from megatron.core.parts import factors_of, freeze, parse_factors, split_names


class Model(nn.Module):
    parts: ClassVar = {"eyes": ("eye.", "lid."), "mouth": ("mouth.",)}

    def __init__(self) -> None:
        super().__init__()
        self.eye = nn.Linear(2, 3)
        self.lid = nn.Linear(2, 2, bias=False)
        self.mouth = nn.ModuleList([nn.Linear(3, 2) for _ in range(11)])


def frozen(model: nn.Module) -> set[str]:
    return {name for name, one in model.named_parameters() if not one.requires_grad}


def test_parts_are_named_by_the_model_or_are_beginnings_of_names() -> None:
    for names, expected in (
        (["eyes"], {"eye.weight", "eye.bias", "lid.weight"}),
        (["mouth.1"], {"mouth.1.weight", "mouth.1.bias"}),
        (["lid.weight", "eye"], {"eye.weight", "eye.bias", "lid.weight"}),
        ([], set()),
    ):
        model = Model()
        freeze(model, names, "--freeze")
        assert frozen(model) == expected


def test_names_may_have_commas_or_spaces_between_them() -> None:
    assert split_names(["a,b", "c"]) == ["a", "b", "c"]
    assert parse_factors(("a=1,b=0.5", "c=0"), "--x") == {"a": 1.0, "b": 0.5, "c": 0.0}
    assert parse_factors(None, "--x") == {}


@pytest.mark.parametrize("given", ["a", "=1", "a=", "a=x", "a=-1", "a=nan", "a=inf"])
def test_factors_that_are_none_are_rejected(given: str) -> None:
    with pytest.raises(ConfigError, match="--lr-multipliers: expected NAME=FACTOR"):
        OptimizerConfig(lr_multipliers=(given,))
    with pytest.raises(ConfigError, match="expected one factor of a, got two"):
        OptimizerConfig(lr_multipliers=("a=1", "a=2"))


def test_parts_that_the_model_lacks_are_rejected_and_so_is_freezing_all() -> None:
    with pytest.raises(ConfigError, match=r"--freeze: expected parts of the model \(eyes, mouth\)"):
        freeze(Model(), ["ear"], "--freeze")
    with pytest.raises(ConfigError, match="beginnings of parameters' names"):
        freeze(nn.Linear(2, 2), ["ear"], "--freeze")
    with pytest.raises(ConfigError, match="something left to train"):
        freeze(Model(), ["eyes", "mouth"], "--freeze")


def test_of_two_factors_of_a_parameter_the_last_counts() -> None:
    model = Model()
    found = factors_of(model, {"eyes": 0.5, "eye.bias": 2.0}, "--lr-multipliers")
    assert found == {model.eye.weight: 0.5, model.lid.weight: 0.5, model.eye.bias: 2.0}


def test_groups_have_their_factor_and_the_schedule_keeps_to_it() -> None:
    model = Model()
    freeze(model, ["mouth.0"], "--freeze")
    config = OptimizerConfig(weight_decay=0.1, lr_multipliers=("eyes=0.5",))
    groups = parameter_groups(model, config)
    assert [(group["weight_decay"], group.get("lr_mult")) for group in groups] == [
        (0.1, None), (0.0, None), (0.1, 0.5), (0.0, 0.5),
    ]  # fmt: skip
    assert [len(group["params"]) for group in groups] == [10, 10, 2, 1]
    assert sum(len(group["params"]) for group in parameter_groups(model, OptimizerConfig())) == 23

    schedule = LRSchedule.build(LRScheduleConfig(lr=0.25, lr_decay_style="constant"), 10)
    optimizer = torch.optim.SGD(groups, lr=1.0)
    assert schedule.apply(optimizer.param_groups, 3) == 0.25
    assert [group["lr"] for group in optimizer.param_groups] == [0.25, 0.25, 0.125, 0.125]
