"""Experts with many tokens and with none, wherever they are, train as on one rank."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig
from tests.helpers.engine_contents import contents_of
from tests.helpers.mixtures import MIXTURE, SEQ, VOCAB, Trained, mixture_engine, train
from tests.helpers.ranks import run_ranks

# With biases, also in routers, so that a test can determine the chosen experts.
BIASED = replace(MIXTURE, add_bias_linear=True)
FIRST_HALF, SECOND_HALF = range(4), range(4, 8)
LOW, HIGH = (0, VOCAB // 2), (VOCAB // 2, VOCAB)  # tokens


def _model() -> GPTModel:
    torch.manual_seed(5)
    return GPTModel(BIASED, VOCAB)


def _with_biases(*biases: float) -> GPTModel:
    """A model whose routers add a bias to each expert's logit."""
    model = _model()
    for router in _routers(model):
        router.bias.data.copy_(torch.tensor(biases))
    return model


def _divided_by_tokens() -> GPTModel:
    """A model that sends high tokens to the first half of the experts and low ones to the other.

    One channel of the residual stream determines them, in both mixtures: it is large in the
    embedding, and layers add little to it.
    """
    model = _model()
    embedding = model.embedding.word_embeddings.weight.data
    embedding[:, 0] = 5.0
    embedding[: LOW[1], 0] = -5.0
    for router in _routers(model):
        router.weight.data[:4, 0] = 5.0
        router.weight.data[4:, 0] = -5.0
    return model


def _routers(model: GPTModel) -> list[nn.Module]:
    return [layer.mlp.router for layer in model.decoder.layers[1:]]


def _tokens(step: int, kinds: list[tuple[int, int]]) -> torch.Tensor:
    """A sequence of each kind: [sequences, SEQ + 1]."""
    generator = torch.Generator().manual_seed(step)
    return torch.stack([torch.randint(*kind, (SEQ + 1,), generator=generator) for kind in kinds])


def _alternating(step: int, num_sequences: int) -> torch.Tensor:
    """Low tokens for ranks with even numbers, high ones for the others."""
    return _tokens(step, [LOW, HIGH] * (num_sequences // 2))


NEVER = -1e4
MODELS: dict[str, Callable[[], GPTModel]] = {
    "uneven": lambda: _with_biases(4, 3, 2, 1, 0, -1, -2, -3),
    "an expert without tokens": lambda: _with_biases(0, 0, 0, NEVER, 0, 0, 0, 0),
    "ranks without tokens for their experts": lambda: _with_biases(*[NEVER] * 4, *[0] * 4),
    "ranks whose tokens all go away": _divided_by_tokens,
}


def _trained(name: str, expert_size: int) -> Trained:
    engine = mixture_engine(expert_size, model=MODELS[name]())
    return train(engine, range(2), 8, _alternating)


@cache
def _on_one_rank(name: str) -> Trained:
    return run_ranks(1, _trained, name, 1)[0]


def _check(name: str, world_size: int, expert_size: int) -> list[torch.Tensor]:
    """Expects one rank's numbers; returns loads by rank: [steps, layers with experts, experts]."""
    expected = _on_one_rank(name)
    ranks = run_ranks(world_size, _trained, name, expert_size)
    for trained in ranks:
        assert trained.losses == pytest.approx(expected.losses, rel=0, abs=1e-6)
        assert trained.norms == pytest.approx(expected.norms, rel=1e-5)
    loads = [trained.loads for trained in ranks]
    assert torch.equal(sum(loads), expected.loads)
    return loads


SIZES = [(4, 2), *(pytest.param(n, n, marks=pytest.mark.wide) for n in (2, 4))]


@pytest.mark.parametrize(("world_size", "expert_size"), SIZES)
def test_uneven_loads(world_size, expert_size):
    loads = _check("uneven", world_size, expert_size)
    for load in sum(loads).flatten(0, 1):
        assert load[0] > 5 * load[5]


@pytest.mark.parametrize(("world_size", "expert_size"), SIZES)
def test_an_expert_without_tokens_on_all_ranks(world_size, expert_size):
    loads = _check("an expert without tokens", world_size, expert_size)
    assert not sum(loads)[..., 3].any()
    assert sum(loads)[..., [0, 1, 2, 4, 5, 6, 7]].all()


@pytest.mark.parametrize(("world_size", "expert_size"), SIZES)
def test_ranks_whose_experts_have_no_tokens(world_size, expert_size):
    loads = _check("ranks without tokens for their experts", world_size, expert_size)
    assert not sum(loads)[..., FIRST_HALF].any()
    assert sum(loads)[..., SECOND_HALF].all()


@pytest.mark.parametrize(("world_size", "expert_size"), SIZES)
def test_ranks_whose_tokens_all_go_away_and_experts_without_tokens_of_one_rank(
    world_size, expert_size
):
    loads = _check("ranks whose tokens all go away", world_size, expert_size)
    for rank, load in enumerate(loads):
        # With two ranks that divide the experts, all tokens of both change places.
        away, never = (SECOND_HALF, FIRST_HALF) if rank % 2 == 0 else (FIRST_HALF, SECOND_HALF)
        assert load[..., away].sum() == load.sum()
        assert not load[..., never].any()


STEPS_WITHOUT = range(1, 3)
MOMENTS = ("exp_avg", "exp_avg_sq")


def _unused_experts(expert_size: int, choice: str) -> tuple[int, list[str]]:
    """Trains the first half of the experts in one step, and the other half only after it.

    Returns:
        The number of parameters that were compared with torch's AdamW, stepped with gradients of
        zero, and what differs.
    """
    config = OptimizerConfig(gpu_optimizer=choice, weight_decay=0.1)
    engine = mixture_engine(expert_size, model=_divided_by_tokens(), optimizer=config)
    train(engine, [0], 8, _alternating)
    before = contents_of(engine)
    later = train(engine, STEPS_WITHOUT, 8, lambda step, count: _tokens(step, [LOW] * count))
    assert not later.loads[..., FIRST_HALF].any()
    after = contents_of(engine)

    differing, names = [], [name for name in before.weights if ".experts." in name]
    for name in names:
        half = len(before.weights[name]) // 2
        weight, *moments = (
            before.weights[name][:half],
            *(before.states[f"{name}.{key}"][:half] for key in MOMENTS),
        )
        assert moments[0].any(), "they had tokens in the first step"
        expected = _stepped_with_zeros(
            weight,
            dict(zip(MOMENTS, moments, strict=True)),
            weight_decay=0.0 if name.endswith("bias") else 0.1,
            lr=engine.state.optimizer.param_groups[0]["lr"],
        )
        assert not torch.equal(expected[0], weight)
        found = [after.weights[name], *(after.states[f"{name}.{key}"] for key in MOMENTS)]
        differing += [
            f"{kind} of {name}"
            for kind, own, theirs in zip(("weight", *MOMENTS), found, expected, strict=True)
            if not torch.equal(own[:half], theirs)
        ]
    return len(names), differing


def _stepped_with_zeros(
    weight: torch.Tensor, moments: dict[str, torch.Tensor], weight_decay: float, lr: float
) -> list[torch.Tensor]:
    """Weight and moments after `STEPS_WITHOUT` steps of torch AdamW, from its first step's."""
    parameter = nn.Parameter(weight.clone())
    optimizer = torch.optim.AdamW(
        [parameter], lr=lr, betas=(0.9, 0.999), eps=1e-8, weight_decay=weight_decay, fused=True
    )
    optimizer.state[parameter] = {
        "step": torch.tensor(1.0),
        **{key: moment.clone() for key, moment in moments.items()},
    }
    for _ in STEPS_WITHOUT:
        parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
    return [parameter.detach(), *(optimizer.state[parameter][key] for key in MOMENTS)]


@pytest.mark.parametrize(
    ("world_size", "expert_size", "choice"),
    [
        (1, 1, "native"),
        (4, 2, "native"),
        *(pytest.param(n, 2, "torch", marks=pytest.mark.wide) for n in (2, 4)),
    ],
)
def test_adamw_steps_experts_without_tokens_with_gradients_of_zero(world_size, expert_size, choice):
    for num_compared, differing in run_ranks(world_size, _unused_experts, expert_size, choice):
        assert num_compared == 2 * 4
        assert differing == []
