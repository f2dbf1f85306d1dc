"""Training with `fully_shard` gives the numbers of training unsharded, on one rank, with the same
global batch.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import fsdp as fsdp2
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.utils.checkpoint import checkpoint

from megatron.core.distributed.fsdp import (
    DBuffer,
    Flat,
    FsdpContext,
    FsdpModule,
    MixedPrecisionPolicy,
    Partial,
    Placements,
    Replicate,
    fully_shard,
    fully_shard_context,
    fully_shard_optimizer,
    microbatch,
)
from megatron.core.distributed.fsdp.parameter_group import FsdpParameterGroup
from megatron.core.distributed.fsdp.placement import SHARDING_STRATEGIES
from megatron.core.lanes import delays
from megatron.core.materialize import materialize, seeded_reset
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from tests.helpers.ranks import on_ranks, random_delays, rank_device, run_ranks

AVG = Partial("avg")
ON_TWO_AXES = {
    "hsdp": Placements(
        ("outer", "inner"), (Replicate(), Flat()), (AVG, Flat()), (Replicate(), Flat())
    ),
    "hfsdp": Placements(("outer", "inner"), (Replicate(), Flat()), (AVG, Flat()), (Flat(), Flat())),
    "full": Placements(("outer", "inner"), (Flat(), Flat()), (Flat(), Flat()), (Flat(), Flat())),
}
FP32, BF16 = torch.float32, torch.bfloat16
TOLERANCES = {FP32: 1e-6, BF16: 3e-3}  # of losses, relative
SEED = 7
VOCAB = 40


def mesh_and_placements(sharding: str) -> tuple[DeviceMesh, Placements]:
    """What a strategy on all ranks, or a kind of sharding on two axes of two ranks, is."""
    kind = rank_device().type
    if sharding in ON_TWO_AXES:
        return init_device_mesh(kind, (2, 2), mesh_dim_names=("outer", "inner")), ON_TWO_AXES[
            sharding
        ]
    return init_device_mesh(kind, (dist.get_world_size(),)), Placements.for_strategy(sharding)


def mean_over_ranks(value: float) -> float:
    total = torch.tensor(value, dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def groups_of(modules: Sequence[nn.Module]) -> Iterator[FsdpParameterGroup]:
    for module in modules:
        for submodule in module.modules():
            if isinstance(submodule, FsdpModule):
                yield from submodule.parameter_groups


def whole(buffer: DBuffer) -> DBuffer:
    return buffer.redistribute([Replicate()] * buffer.mesh.ndim)


def main_weights(model: nn.Module) -> list[Tensor]:
    """This rank's rows of all main weights."""
    return [group.main_weight.local_buffer.clone() for group in groups_of([model])]


def assert_at_rest(modules: Sequence[nn.Module]) -> None:
    """No full weights, no unreduced gradients, and parameters that are the optimizer's."""
    for group in groups_of(modules):
        assert not group.is_unsharded, group.name
        if group.is_gathered:
            assert group.unsharded_weight.local_buffer.untyped_storage().nbytes() == 0, group.name
        if group.gradients is not None:
            assert group.gradients.unsharded.local_buffer.untyped_storage().nbytes() == 0, (
                group.name
            )
        for parameter in group.fsdp_parameters:
            assert all(
                owner()._parameters[name] is parameter.sharded for owner, name in parameter.owners
            )


def assert_cut_as_placed(modules: Sequence[nn.Module]) -> None:
    """Every rank holds the share of weights that its placements say: it has not simply
    everything.
    """
    for group in groups_of(modules):
        for buffer, placements in (
            (group.model_weight, group.placements.parameter),
            (group.main_weight, group.placements.optimizer),
        ):
            sizes = zip(placements, group.mesh.shape, strict=True)
            num_parts = (
                torch.tensor([size for placement, size in sizes if isinstance(placement, Flat)])
                .prod()
                .item()
            )
            assert buffer.local_buffer.numel() * num_parts == group.layout.size


# A GPT, against one rank and against PyTorch's FSDP2


@dataclass(frozen=True)
class Run:
    """A training run of the GPT."""

    world_size: int
    num_microbatches: int
    optimizer: str
    dtype: torch.dtype
    num_steps: int = 4

    def make_optimizer(self, parameters: Any) -> torch.optim.Optimizer:
        if self.optimizer == "sgd":
            return torch.optim.SGD(parameters, lr=0.2, momentum=0.9)
        return torch.optim.AdamW(parameters, lr=1e-2)

    def batch(self, number: int, rank: int) -> tuple[Tensor, Tensor]:
        """The tokens and labels of a rank in a microbatch. The same in every step, so only learning
        changes losses.
        """
        generator = torch.Generator().manual_seed(number * self.world_size + rank)
        text = torch.randint(VOCAB, (2, 9), generator=generator)
        device = rank_device()
        return text[:, :-1].contiguous().to(device), text[:, 1:].contiguous().to(device)

    def loss(self, model: nn.Module, number: int, rank: int) -> Tensor:
        return model(*self.batch(number, rank)).mean() / self.num_microbatches


def gpt_on_meta(**changes: Any) -> GPTModel:
    """Two layers, and an embedding that is also the output projection, unless changes say
    otherwise.
    """
    values = {
        "ffn_hidden_size": 24,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "init_method_std": 0.1,
    }
    config = TransformerConfig(2, 16, 2, **{**values, **changes})
    with torch.device("meta"):
        return GPTModel(config, VOCAB)


def gpt(**changes: Any) -> GPTModel:
    model = gpt_on_meta(**changes)
    materialize(model, "cpu", SEED)
    return model


def sharded_gpt(sharding: str, dtype: torch.dtype, **changes: Any) -> tuple[GPTModel, FsdpContext]:
    """From meta, as a model that no rank can hold. One group for each layer, one for the rest."""
    mesh, placements = mesh_and_placements(sharding)
    model = gpt_on_meta(**changes).to(dtype)
    policy = MixedPrecisionPolicy(main_params_dtype=FP32, main_grads_dtype=FP32)
    device = rank_device()
    with fully_shard_context(device, reset_parameters=seeded_reset(model, device, SEED)) as context:
        for layer in model.decoder.layers:
            fully_shard(layer, mesh, placements, policy)
        fully_shard(model, mesh, placements, policy)
    return model, context


@cache
def losses_on_one_rank(run: Run) -> list[float]:
    """Of an unsharded model. In bf16 it computes with weights that are refreshed from fp32 ones in
    every step.
    """
    main = gpt()
    model = copy.deepcopy(main).to(run.dtype)
    optimizer = run.make_optimizer(main.parameters())
    losses = []
    for _ in range(run.num_steps):
        losses.append(0.0)
        with torch.no_grad():
            for own, source in zip(model.parameters(), main.parameters(), strict=True):
                own.copy_(source)
        for number in range(run.num_microbatches):
            for rank in range(run.world_size):
                loss = run.loss(model, number, rank) / run.world_size
                loss.backward()
                losses[-1] += loss.item()
                move_gradients(model, main)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def move_gradients(source: nn.Module, target: nn.Module) -> None:
    """Adds the gradients of one model to those of another, and clears them."""
    for parameter, wider in zip(source.parameters(), target.parameters(), strict=True):
        gradient, parameter.grad = parameter.grad.to(wider.dtype), None
        wider.grad = gradient if wider.grad is None else wider.grad + gradient


@cache
def losses_of_fsdp2(run: Run) -> list[float]:
    return run_ranks(run.world_size, _train_with_fsdp2, run)[0]


def _train_with_fsdp2(run: Run) -> list[float]:
    model = gpt()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    policy = fsdp2.MixedPrecisionPolicy(
        param_dtype=run.dtype, reduce_dtype=FP32, cast_forward_inputs=False
    )
    for unit in (*model.decoder.layers, model):
        fsdp2.fully_shard(unit, mesh=mesh, mp_policy=policy)
    optimizer = run.make_optimizer(model.parameters())
    losses = []
    for _ in range(run.num_steps):
        loss_of_step = 0.0
        for number in range(run.num_microbatches):
            loss = run.loss(model, number, dist.get_rank())
            loss.backward()
            loss_of_step += loss.item()
        losses.append(mean_over_ranks(loss_of_step))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _train_sharded(run: Run, sharding: str) -> list[float]:
    model, context = sharded_gpt(sharding, run.dtype)
    assert_cut_as_placed([model])
    return train_sharded_gpt(run, model, context)


def train_sharded_gpt(run: Run, model: GPTModel, context: FsdpContext) -> list[float]:
    optimizer = run.make_optimizer(model.parameters())
    fully_shard_optimizer(optimizer)
    losses = []
    for step in range(run.num_steps):
        loss_of_step = 0.0
        for number in range(run.num_microbatches):
            with microbatch(context, is_last=number == run.num_microbatches - 1):
                loss = run.loss(model, number, dist.get_rank())
                assert_at_rest([model])
                loss.backward()
                assert_at_rest([model])
            loss_of_step += loss.item()
        losses.append(mean_over_ranks(loss_of_step))
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
    return losses


def parity_cases() -> Iterator[Any]:
    """All of them. Four ranks on few cores take their time: of theirs, only some are run by
    default.
    """
    for world_size, dtype, optimizer, num_microbatches in itertools.product(
        (2, 4), (FP32, BF16), ("sgd", "adamw"), (1, 3)
    ):
        for sharding in (*SHARDING_STRATEGIES, *(ON_TWO_AXES if world_size == 4 else ())):
            is_default = world_size == 2 or (
                (dtype, optimizer, num_microbatches) in ((FP32, "sgd", 1), (BF16, "adamw", 3))
                and sharding in (*ON_TWO_AXES, "optim_grads_params")
            )
            yield pytest.param(
                Run(world_size, num_microbatches, optimizer, dtype),
                sharding,
                id=f"{world_size}-{str(dtype).removeprefix('torch.')}-{optimizer}-{num_microbatches}-{sharding}",
                marks=() if is_default else pytest.mark.wide,
            )


@pytest.mark.parametrize(("run", "sharding"), list(parity_cases()))
def test_losses_equal_those_of_one_rank_with_the_same_global_batch_and_of_fsdp2(run, sharding):
    expected = losses_on_one_rank(run)
    assert expected[-1] < 0.97 * expected[0], (
        "it learns, so losses of weights that are not updated would differ"
    )
    tolerance = TOLERANCES[run.dtype]
    for losses in run_ranks(run.world_size, _train_sharded, run, sharding):
        assert losses == pytest.approx(expected, rel=tolerance, abs=0)
        assert losses == pytest.approx(losses_of_fsdp2(run), rel=tolerance, abs=0)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("run", "sharding"),
    [
        (Run(2, 3, "adamw", FP32), "optim_grads_params"),
        *(
            pytest.param(Run(size, 3, "adamw", dtype), sharding, marks=pytest.mark.wide)
            for size, dtype in itertools.product((2, 4), (FP32, BF16))
            for sharding in (*SHARDING_STRATEGIES, *(ON_TWO_AXES if size == 4 else ()))
            if (size, dtype, sharding) != (2, FP32, "optim_grads_params")
        ),
    ],
)
def test_losses_on_accelerators_equal_those_of_one_rank_of_the_cpu(run, sharding):
    expected = losses_on_one_rank(run)
    for losses in run_ranks(run.world_size, _train_sharded, run, sharding, device="sim"):
        assert losses == pytest.approx(expected, rel=TOLERANCES[run.dtype], abs=0)


def _train_delayed(run: Run, shardings: Sequence[str], seeds: Sequence[int]) -> None:
    for sharding in shardings:
        model, context = sharded_gpt(sharding, run.dtype)
        losses = train_sharded_gpt(run, model, context)
        weights = main_weights(model)
        assert len(set(losses)) == len(losses)
        for seed in seeds:
            delayed, context = sharded_gpt(sharding, run.dtype)
            # Another seed on every rank, or they would pause in step.
            with random_delays(seed * run.world_size + dist.get_rank()):
                assert train_sharded_gpt(run, delayed, context) == losses, (sharding, seed)
            assert all(map(torch.equal, main_weights(delayed), weights)), (sharding, seed)


@pytest.mark.parametrize(
    ("run", "shardings", "seeds"),
    [
        (Run(2, 2, "adamw", BF16, num_steps=3), SHARDING_STRATEGIES, (1, 2)),
        (Run(4, 2, "sgd", FP32, num_steps=3), ("hfsdp",), (1, 2)),
        pytest.param(
            Run(4, 3, "adamw", BF16),
            (*SHARDING_STRATEGIES, *ON_TWO_AXES),
            (4, 5, 6, 7),
            marks=pytest.mark.wide,
        ),
    ],
    ids=["2-strategies", "4-hfsdp", "4-all"],
)
def test_lanes_that_pause_at_random_change_no_bit_of_losses_and_weights(run, shardings, seeds):
    run_ranks(run.world_size, _train_delayed, run, shardings, seeds)


@pytest.mark.sim
@pytest.mark.parametrize(
    ("run", "shardings", "seeds"),
    [
        (Run(2, 2, "adamw", BF16, num_steps=2), ["optim_grads"], (1,)),
        pytest.param(
            Run(2, 2, "adamw", BF16), SHARDING_STRATEGIES, (1, 2, 3), marks=pytest.mark.wide
        ),
        pytest.param(
            Run(4, 3, "adamw", BF16), list(ON_TWO_AXES), (4, 5, 6), marks=pytest.mark.wide
        ),
    ],
    ids=["2-zero2", "2-strategies", "4-two-axes"],
)
def test_streams_that_pause_at_random_change_no_bit_of_losses_and_weights(run, shardings, seeds):
    run_ranks(run.world_size, _train_delayed, run, shardings, seeds, device="sim", timeout=600)


# Models of other shapes, in fp32 and against one rank: losses, gradients, weights

WIDTH = 6
NUM_ROWS = 3  # of a rank's batch


class Layer(nn.Module):
    """Rows of WIDTH numbers in and out; counts how often it has run."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        return self.linear(x).tanh()


def layers(number: int) -> list[Layer]:
    return [Layer() for _ in range(number)]


class Stack(nn.Module):
    """Layers, and a scale of its own that makes it worth a group."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return self.run(x) * self.scale

    def run(self, x: Tensor) -> Tensor:
        for module in self.inner:
            x = module(x)
        return x


def num_ranks_of(module: nn.Module) -> int:
    """How many ranks' batches a module sees in this process."""
    return 1 if isinstance(module, FsdpModule) else dist.get_world_size()


def square_mean(x: Tensor) -> Tensor:
    return x.square().mean()


@dataclass
class Subject:
    """A model to train.

    Attributes:
        units: the modules to shard, inner ones first.
        loss: of a batch.
        calls: how often layers run in forward and backward, all counted; None: as many as they are.
        options: of `fully_shard`.
        keeps_weights: whether forward leaves all full weights; None: it may leave some.
    """

    units: Sequence[nn.Module]
    loss: Callable[[Tensor], Tensor]
    calls: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    keeps_weights: bool | None = False

    def parameters(self) -> dict[str, nn.Parameter]:
        """By names that do not change when units are sharded, each once."""
        found = {}
        for number, unit in enumerate(self.units):
            for name, parameter in unit.named_parameters():
                if all(parameter is not other for other in found.values()):
                    found[f"{number}.{name}"] = parameter
        return found

    def layers(self) -> set[Layer]:
        return {
            module for unit in self.units for module in unit.modules() if isinstance(module, Layer)
        }

    def make_optimizer(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters().values(), lr=0.1, momentum=0.9)


Build = Callable[[], Subject]


@dataclass(frozen=True)
class Setting:
    """On how many ranks a subject is trained, and how."""

    world_size: int
    shardings: Sequence[str]
    delay_seed: int | None = None


@pytest.fixture(
    params=[
        pytest.param(Setting(2, ("optim", "optim_grads_params")), id="2"),
        pytest.param(
            Setting(2, SHARDING_STRATEGIES, delay_seed=1), id="2-delayed", marks=pytest.mark.wide
        ),
        pytest.param(
            Setting(4, ("optim", "optim_grads_params", *ON_TWO_AXES)),
            id="4",
            marks=pytest.mark.wide,
        ),
    ]
)
def setting(request: pytest.FixtureRequest) -> Setting:
    value: Setting = request.param
    return value


def built(build: Build) -> Subject:
    torch.manual_seed(SEED)
    return build()


def shard(subject: Subject, sharding: str) -> FsdpContext:
    mesh, placements = mesh_and_placements(sharding)
    with fully_shard_context("cpu") as context:
        for unit in subject.units:
            fully_shard(unit, mesh, placements, **subject.options)
    assert_cut_as_placed(subject.units)
    return context


def batches(step: int, number: int) -> Tensor:
    """The batches of all ranks."""
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(dist.get_world_size(), NUM_ROWS, WIDTH, generator=generator)


def whole_gradients(subject: Subject) -> dict[str, Tensor | None]:
    """The reduced gradients of a sharded subject; None where a parameter shows none."""
    found = buffers_of(subject, lambda group: group.main_grad)
    return {
        name: None if parameter.grad is None else found[parameter]
        for name, parameter in subject.parameters().items()
    }


def whole_weights(subject: Subject) -> dict[str, Tensor]:
    found = buffers_of(subject, lambda group: group.main_weight)
    return {name: found[parameter] for name, parameter in subject.parameters().items()}


def buffers_of(
    subject: Subject, choose: Callable[[FsdpParameterGroup], DBuffer | None]
) -> dict[nn.Parameter, Tensor]:
    """The whole tensors that stand behind sharded parameters in one of the buffers."""
    found = {}
    for group in {id(group): group for group in groups_of(subject.units)}.values():
        buffer = choose(group)
        if buffer is not None:
            tensors = whole(buffer)
            for index, parameter in enumerate(group.fsdp_parameters):
                found[parameter.sharded] = tensors.get_local_tensor(index)
    return found


def assert_trains_as_on_one_rank(setting: Setting, build: Build) -> None:
    run_ranks(setting.world_size, _train_alike, setting, build)


def _train_alike(setting: Setting, build: Build) -> None:
    for sharding in setting.shardings:
        try:
            with (
                nullcontext()
                if setting.delay_seed is None
                else delays(setting.delay_seed + dist.get_rank())
            ):
                train_alike(build, sharding)
        except Exception as error:
            raise AssertionError(f"{sharding}: {error}") from error


def train_alike(build: Build, sharding: str) -> None:
    """A step of two microbatches, with and without gradients of inputs, then one that begins with
    gradients of zero.
    """
    alone, sharded = built(build), built(build)
    before = {name: parameter.detach().clone() for name, parameter in alone.parameters().items()}
    context = shard(sharded, sharding)
    optimizers = [subject.make_optimizer() for subject in (alone, sharded)]
    fully_shard_optimizer(optimizers[1])
    learners: set[str] = set()
    for step, num_microbatches in enumerate((2, 1)):
        for number in range(num_microbatches):
            x = batches(step, number).requires_grad_(step + number == 1)
            expected = run_alone(alone, x)
            with microbatch(context, is_last=number == num_microbatches - 1):
                run_sharded(sharded, x, expected)
        assert_same_tensors(
            whole_gradients(sharded),
            {name: parameter.grad for name, parameter in alone.parameters().items()},
        )
        learners |= {
            name for name, parameter in alone.parameters().items() if parameter.grad is not None
        }
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    after = {name: parameter.detach() for name, parameter in alone.parameters().items()}
    assert_same_tensors(whole_weights(sharded), after)
    for name, weight in whole_weights(sharded).items():
        assert torch.equal(weight, before[name]) != (name in learners), name
    assert learners


def run_alone(subject: Subject, x: Tensor) -> list[float]:
    """The losses of all ranks' batches; their mean's gradients are added."""
    losses = []
    for batch in x:
        loss = subject.loss(batch)
        (loss / len(x)).backward()
        losses.append(loss.item())
    return losses


def run_sharded(subject: Subject, x: Tensor, expected: Sequence[float]) -> None:
    """Forward and backward of this rank's batch."""
    calls_before = sum(layer.num_calls for layer in subject.layers())
    batch = x[dist.get_rank()].detach().requires_grad_(x.requires_grad)
    loss = subject.loss(batch)
    if subject.keeps_weights:
        assert all(group.is_unsharded for group in groups_of(subject.units))
    elif subject.keeps_weights is False:
        assert_at_rest(subject.units)
    loss.backward()
    assert_at_rest(subject.units)
    assert loss.item() == pytest.approx(expected[dist.get_rank()], rel=1e-6, abs=1e-7)
    if x.requires_grad:
        # Each rank's own: of its loss, not of the mean.
        torch.testing.assert_close(
            batch.grad / len(x), x.grad[dist.get_rank()], rtol=1e-5, atol=1e-6
        )
    calls = sum(layer.num_calls for layer in subject.layers()) - calls_before
    assert calls == (len(subject.layers()) if subject.calls is None else subject.calls)


def assert_same_tensors(
    actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]
) -> None:
    assert actual.keys() == expected.keys()
    for name, tensor in expected.items():
        assert (actual[name] is None) == (tensor is None), name
        if tensor is not None:
            torch.testing.assert_close(
                actual[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
            )


def test_layers_in_a_stack_with_a_parameter_of_its_own(setting):
    def build() -> Subject:
        stack = Stack(*layers(3))
        return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))

    assert_trains_as_on_one_rank(setting, build)


def test_one_parameter_under_two_names_gets_the_gradients_of_both_uses(setting):
    def build() -> Subject:
        first, second, third = layers(3)
        third.linear.weight = first.linear.weight
        model = nn.Sequential(first, second, third)
        assert len(list(model.parameters())) == 5
        return Subject([second, model], lambda x: square_mean(model(x)))

    assert_trains_as_on_one_rank(setting, build)


def test_frozen_parameters_beside_others_stay_as_they_are(setting):
    def build() -> Subject:
        stack = Stack(*layers(3))
        stack.inner[0].linear.weight.requires_grad_(False)
        stack.inner[2].linear.bias.requires_grad_(False)
        return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))

    assert_trains_as_on_one_rank(setting, build)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_module_that_is_frozen_whole_stays_as_it_is(setting, number):
    def build() -> Subject:
        stack = Stack(*layers(3))
        stack.inner[number].requires_grad_(False)
        return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)))

    assert_trains_as_on_one_rank(setting, build)


def test_a_parameter_that_is_frozen_for_some_calls_gets_no_gradient_in_them(setting):
    def build() -> Subject:
        stack = Stack(*layers(2))
        num_calls = itertools.count()

        def loss(x: Tensor) -> Tensor:
            is_second = next(num_calls) // num_ranks_of(stack) == 1
            stack.inner[0].linear.weight.requires_grad_(not is_second)
            return square_mean(stack(x))

        return Subject([*stack.inner, stack], loss)

    assert_trains_as_on_one_rank(setting, build)


class Segments(Stack):
    """Runs its modules in checkpointed pairs."""

    def __init__(self, *inner: nn.Module, use_reentrant: bool) -> None:
        super().__init__(*inner)
        self.use_reentrant = use_reentrant

    def run(self, x: Tensor) -> Tensor:
        for first, second in zip(self.inner[::2], self.inner[1::2], strict=True):
            x = checkpoint(
                lambda x, first=first, second=second: second(first(x)),
                x,
                use_reentrant=self.use_reentrant,
            )
        return x


class SelfRecomputing(Layer):
    """Checkpoints its own body."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=self.use_reentrant)


recomputation = pytest.mark.parametrize(
    "use_reentrant", [True, False], ids=["reentrant", "non-reentrant"]
)


@recomputation
def test_sharded_modules_that_are_recomputed_from_outside(setting, use_reentrant):
    def build() -> Subject:
        stem, *inner = layers(4)

        def loss(x: Tensor) -> Tensor:
            x = stem(x)
            for layer in inner:
                x = checkpoint(layer, x, use_reentrant=use_reentrant)
            return square_mean(x)

        return Subject([stem, *inner], loss, calls=7)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_sharded_modules_of_a_sharded_root_that_are_recomputed_one_by_one(setting, use_reentrant):
    class Recomputing(Stack):
        def run(self, x: Tensor) -> Tensor:
            x = x + self.scale
            for module in self.inner:
                x = checkpoint(module, x, use_reentrant=use_reentrant)
            return x

    def build() -> Subject:
        stack = Recomputing(*layers(3))
        return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)), calls=6)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_recomputed_region_of_several_sharded_modules(setting, use_reentrant):
    def build() -> Subject:
        stem, *inner = layers(5)
        root = nn.Sequential(stem, Segments(*inner, use_reentrant=use_reentrant))
        return Subject([stem, *inner, root], lambda x: square_mean(root(x)), calls=9)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_recomputed_region_without_a_sharded_module_around_it(setting, use_reentrant):
    def build() -> Subject:
        inner = layers(4)

        def region(x: Tensor) -> Tensor:
            for layer in inner[1:]:
                x = layer(x)
            return x

        return Subject(
            inner,
            lambda x: square_mean(checkpoint(region, inner[0](x), use_reentrant=use_reentrant)),
            calls=7,
        )

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_whole_sharded_model_that_is_recomputed(setting, use_reentrant):
    def build() -> Subject:
        stack = Stack(*layers(3))

        def loss(x: Tensor) -> Tensor:
            # A reentrant checkpoint has a backward only if an input has one.
            return square_mean(
                checkpoint(stack, x.clone().requires_grad_() + 0, use_reentrant=use_reentrant)
            )

        return Subject([*stack.inner, stack], lambda x: loss(x.detach()) + 0 * x.sum(), calls=6)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_sharded_module_that_recomputes_its_own_body(setting, use_reentrant):
    def build() -> Subject:
        stem = Layer()
        stack = Stack(*(SelfRecomputing(use_reentrant) for _ in range(3)))
        root = nn.Sequential(stem, stack)
        return Subject([stem, *stack.inner, root], lambda x: square_mean(root(x)), calls=7)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_sharded_module_that_recomputes_its_own_body_with_sharded_modules_in_it(
    setting, use_reentrant
):
    def build() -> Subject:
        stem, *inner = layers(5)
        segments = Segments(*inner, use_reentrant=use_reentrant)
        return Subject([stem, *inner, segments], lambda x: square_mean(segments(stem(x))), calls=9)

    assert_trains_as_on_one_rank(setting, build)


def test_a_recomputed_region_in_a_recomputed_region(setting):
    def build() -> Subject:
        stem, *inner = layers(5)
        segments = Segments(*inner, use_reentrant=False)
        return Subject(
            [stem, *inner, segments],
            lambda x: square_mean(checkpoint(segments, stem(x), use_reentrant=False)),
            calls=1 + 4 * 3,
        )

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_recomputed_module_that_is_called_twice(setting, use_reentrant):
    def build() -> Subject:
        stem, twice, between = layers(3)

        def loss(x: Tensor) -> Tensor:
            x = checkpoint(twice, stem(x), use_reentrant=use_reentrant)
            return square_mean(checkpoint(twice, between(x), use_reentrant=use_reentrant))

        return Subject([stem, twice, between], loss, calls=6, keeps_weights=None)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_recomputed_module_that_is_called_again_at_once(setting, use_reentrant):
    """The reduction of its first gradients may be under way when the second ones come."""

    def build() -> Subject:
        stem, twice = layers(2)

        def loss(x: Tensor) -> Tensor:
            x = checkpoint(twice, stem(x), use_reentrant=use_reentrant)
            return square_mean(checkpoint(twice, x, use_reentrant=use_reentrant))

        return Subject([stem, twice], loss, calls=5)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_module_that_recomputes_its_own_body_and_is_called_twice(setting, use_reentrant):
    def build() -> Subject:
        stem, twice = Layer(), SelfRecomputing(use_reentrant)
        stack = Stack(stem, twice, twice)
        return Subject(
            [stem, twice, stack], lambda x: square_mean(stack(x)), calls=5, keeps_weights=None
        )

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_module_in_two_recomputed_regions(setting, use_reentrant):
    def build() -> Subject:
        stem, shared, first, second = layers(4)

        def loss(x: Tensor) -> Tensor:
            x = stem(x)
            y = checkpoint(lambda x: first(shared(x)), x, use_reentrant=use_reentrant)
            z = checkpoint(lambda x, y: second(x) + shared(y), x, y, use_reentrant=use_reentrant)
            return square_mean(y + z)

        return Subject([stem, shared, first, second], loss, calls=9, keeps_weights=None)

    assert_trains_as_on_one_rank(setting, build)


@recomputation
def test_a_recomputed_region_of_modules_that_keep_their_weights(setting, use_reentrant):
    def build() -> Subject:
        stem, *inner = layers(5)
        root = nn.Sequential(stem, Segments(*inner, use_reentrant=use_reentrant))
        options = {"reshard_after_forward": False}
        return Subject(
            [stem, *inner, root],
            lambda x: square_mean(root(x)),
            calls=9,
            options=options,
            keeps_weights=None,
        )

    assert_trains_as_on_one_rank(setting, build)


def test_sharded_modules_three_levels_deep(setting):
    def build() -> Subject:
        inner, middle = [Stack(*layers(2)) for _ in range(2)], []
        middle = [Stack(stack, Layer()) for stack in inner]
        outer = Stack(*middle)
        leaves = [layer for stack in inner for layer in stack.inner]
        return Subject([*leaves, *inner, *middle, outer], lambda x: square_mean(outer(x)))

    assert_trains_as_on_one_rank(setting, build)


def test_a_sharded_module_that_is_called_twice_one_after_the_other(setting):
    def build() -> Subject:
        first, twice, last = layers(3)
        model = Stack(first, twice, twice, last, twice)
        return Subject(
            [first, twice, last, model],
            lambda x: square_mean(model(x)),
            calls=5,
            keeps_weights=None,
        )

    assert_trains_as_on_one_rank(setting, build)


def test_a_sharded_module_that_is_called_twice_on_branches(setting):
    def build() -> Subject:
        stem, twice, other = layers(3)

        def loss(x: Tensor) -> Tensor:
            x = stem(x)
            return square_mean(twice(x) + other(x)) + twice(x.sin()).mean()

        return Subject([stem, twice, other], loss, calls=4, keeps_weights=None)

    assert_trains_as_on_one_rank(setting, build)


def test_a_call_without_a_backward_beside_one_that_has_one(setting):
    def build() -> Subject:
        first, second = layers(2)

        def loss(x: Tensor) -> Tensor:
            target = second(first(x.detach() + 1)).detach()
            return square_mean(second(first(x)) - target)

        return Subject([first, second], loss, calls=4)

    assert_trains_as_on_one_rank(setting, build)


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (1, 2, 0)])
def test_roots_without_a_common_parent_in_whichever_order_they_are_sharded(setting, order):
    def build() -> Subject:
        roots = [nn.Sequential(layer) for layer in layers(3)]
        units = [unit for number in order for unit in (roots[number][0], roots[number])]

        def loss(x: Tensor) -> Tensor:
            return square_mean(roots[2](roots[1](roots[0](x)) + x))

        return Subject(units[::2], loss, keeps_weights=False if order == (0, 1, 2) else None)

    assert_trains_as_on_one_rank(setting, build)


@dataclass
class Named:
    """What a module may take and give, of a kind that torch does not look into."""

    x: Tensor
    note: str = ""


class Wrapped(Layer):
    """Takes and gives its rows inside of something."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        first = args[0] if args else kwargs["x"]
        return self.wrap(super().forward(self.unwrap(first)))

    def call(self, x: Tensor) -> Tensor:
        return self.unwrap(self(x=self.wrap(x)) if self.kind == "keyword" else self(self.wrap(x)))

    def wrap(self, x: Tensor) -> Any:
        kinds = {"tuple": (None, (x, 2)), "dict": {"a": [x], "b": "c"}, "dataclass": Named(x, "n")}
        return kinds.get(self.kind, x)

    def unwrap(self, x: Any) -> Tensor:
        if isinstance(x, Tensor):
            return x
        return {"tuple": lambda: x[1][0], "dict": lambda: x["a"][0], "dataclass": lambda: x.x}[
            self.kind
        ]()


@pytest.mark.parametrize("kind", ["keyword", "tuple", "dict", "dataclass"])
def test_inputs_and_outputs_inside_of_something(setting, kind):
    def build() -> Subject:
        stem, *inner = Layer(), Wrapped(kind), Wrapped(kind)

        def loss(x: Tensor) -> Tensor:
            return square_mean(inner[1].call(inner[0].call(stem(x))))

        return Subject([stem, *inner], loss)

    assert_trains_as_on_one_rank(setting, build)


class Opaque:
    """Hides a tensor from everybody who does not know the class."""

    def __init__(self, x: Tensor) -> None:
        self.x = x


def test_an_output_that_nobody_can_look_into(setting):
    class Hiding(Layer):
        def forward(self, x: Tensor) -> Opaque:
            return Opaque(super().forward(x))

    def build() -> Subject:
        first, hiding, last = Layer(), Hiding(), Layer()
        return Subject(
            [first, hiding, last],
            lambda x: square_mean(last(hiding(first(x)).x)),
            keeps_weights=None,
        )

    assert_trains_as_on_one_rank(setting, build)


def test_a_skip_connection_whose_tensor_has_later_uses(setting):
    def build() -> Subject:
        first, second, third = layers(3)

        def loss(x: Tensor) -> Tensor:
            x = first(x)
            y = second(x) + x
            return square_mean(third(y) * x + y) + x.mean()

        return Subject([first, second, third], loss)

    assert_trains_as_on_one_rank(setting, build)


# Of three-dimensional inputs a linear layer's output is a view, whose history an in-place change
# rewrites.
two_and_three_dimensional = pytest.mark.parametrize(
    "shape", [(NUM_ROWS, WIDTH), (1, NUM_ROWS, WIDTH)], ids=["2d", "3d"]
)


@two_and_three_dimensional
def test_an_in_place_relu_after_a_sharded_module(setting, shape):
    def build() -> Subject:
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        model = nn.Sequential(
            *(module for linear in linears for module in (linear, nn.ReLU(inplace=True)))
        )
        return Subject(linears, lambda x: square_mean(model(x.view(shape)) - 1))

    assert_trains_as_on_one_rank(setting, build)


@two_and_three_dimensional
def test_an_in_place_relu_of_what_a_sharded_module_gets(setting, shape):
    def build() -> Subject:
        blocks = [nn.Sequential(nn.ReLU(inplace=True), nn.Linear(WIDTH, WIDTH)) for _ in range(3)]
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), *blocks)
        return Subject([model[0], *blocks], lambda x: square_mean(model(x.view(shape)) - 1))

    assert_trains_as_on_one_rank(setting, build)


def test_weights_that_are_kept_between_forward_and_backward(setting):
    def build() -> Subject:
        stack = Stack(*layers(3))
        return Subject(
            [*stack.inner, stack],
            lambda x: square_mean(stack(x)),
            options={"reshard_after_forward": False},
            keeps_weights=True,
        )

    assert_trains_as_on_one_rank(setting, build)


@pytest.mark.parametrize("reshard_after_forward", [True, False])
@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_a_forward_without_gradients_between_forward_and_backward(
    setting, guard, reshard_after_forward
):
    def build() -> Subject:
        stack = Stack(*layers(3))

        def loss(x: Tensor) -> Tensor:
            with guard():
                stack(x - 1)
            result = square_mean(stack(x))
            with guard():
                stack(x + 1)
            return result

        options = {"reshard_after_forward": reshard_after_forward}
        return Subject([*stack.inner, stack], loss, calls=9, options=options)

    assert_trains_as_on_one_rank(setting, build)


def test_an_output_that_the_loss_does_not_use(setting):
    def build() -> Subject:
        first, second, unused = layers(3)

        def loss(x: Tensor) -> Tensor:
            x = second(first(x))
            unused(x)
            return square_mean(x)

        return Subject([first, second, unused], loss)

    assert_trains_as_on_one_rank(setting, build)


def test_one_of_two_outputs_that_the_loss_does_not_use(setting):
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = layers(2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.used(x), self.unused(x)

    def build() -> Subject:
        first, second = Two(), Two()
        return Subject([first, second], lambda x: square_mean(second(first(x)[0])[0]))

    assert_trains_as_on_one_rank(setting, build)


def test_a_layer_that_only_some_microbatches_use(setting):
    def build() -> Subject:
        first, sometimes, last = layers(3)
        num_calls = itertools.count()

        def loss(x: Tensor) -> Tensor:
            x = first(x)
            if next(num_calls) // num_ranks_of(first) in (0, 2):
                x = sometimes(x)
            else:
                sometimes(x)
            return square_mean(last(x))

        return Subject([first, sometimes, last], loss)

    assert_trains_as_on_one_rank(setting, build)


def test_modules_that_run_in_another_order_than_they_are_registered(setting):
    def build() -> Subject:
        model = Stack(*layers(4))
        first, second, third, fourth = model.inner

        class Reordered(Stack):
            def run(self, x: Tensor) -> Tensor:
                return second(first(third(fourth(x))))

        model.__class__ = Reordered
        return Subject([*model.inner, model], lambda x: square_mean(model(x)), keeps_weights=None)

    assert_trains_as_on_one_rank(setting, build)


def test_two_forwards_before_their_backwards(setting):
    def build() -> Subject:
        stack = Stack(*layers(3))

        def loss(x: Tensor) -> Tensor:
            first, second = square_mean(stack(x)), square_mean(stack(x + 1))
            (first / num_ranks_of(stack)).backward()
            return second

        return Subject([*stack.inner, stack], loss, calls=6)

    assert_trains_as_on_one_rank(setting, build)


def test_parameters_of_two_dtypes_in_one_module(setting):
    class Mixed(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH, dtype=torch.float64))

        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x) * self.scale).float()

    def build() -> Subject:
        stack = Stack(Mixed(), Mixed())
        options = {"mixed_precision_policy": MixedPrecisionPolicy(main_params_dtype=None)}
        return Subject([*stack.inner, stack], lambda x: square_mean(stack(x)), options=options)

    assert_trains_as_on_one_rank(setting, build)


def test_outputs_that_are_inputs_or_depend_on_parameters_alone(setting):
    class Branching(Layer):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
            return super().forward(x), x, self.scale.square()

    def build() -> Subject:
        first, second = Branching(), Branching()

        def loss(x: Tensor) -> Tensor:
            x, _, early = first(x)
            y, x, late = second(x)
            return square_mean(y * x * late) + square_mean(early)

        return Subject([first, second], loss)

    assert_trains_as_on_one_rank(setting, build)


def test_two_backwards_through_one_forward(setting):
    def build() -> Subject:
        stack = Stack(*layers(3))

        def loss(x: Tensor) -> Tensor:
            y = stack(x)
            (y.mean() / num_ranks_of(stack)).backward(retain_graph=True)
            return square_mean(y)

        return Subject([*stack.inner, stack], loss)

    assert_trains_as_on_one_rank(setting, build)


# Weights that are drawn from meta


def _draw(config: dict[str, Any], dtype: torch.dtype, shardings: Sequence[str]) -> None:
    expected = dict(gpt(**config).named_parameters())
    for sharding in shardings:
        model, _ = sharded_gpt(sharding, dtype, **config)
        found = {}
        for group in groups_of([model]):
            assert (group.dtype, group.main_weight.dtype) == (dtype, FP32)
            tensors = whole(group.main_weight)
            found |= {
                name: tensors.get_local_tensor(index) for index, name in enumerate(group.names)
            }
        assert found.keys() == expected.keys()
        for name, weight in found.items():
            assert torch.equal(weight, expected[name]), name
        assert all(parameter.is_meta for parameter in gpt_on_meta(**config).parameters())


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize(
    "config",
    [{}, {"swiglu": True, "normalization": "RMSNorm", "untie_embeddings_and_output_weights": True}],
)
def test_weights_drawn_from_meta_are_the_bits_of_an_unsharded_model(dtype, config):
    run_ranks(2, _draw, config, dtype, SHARDING_STRATEGIES)


@pytest.mark.wide
def test_weights_drawn_from_meta_on_two_axes_are_the_bits_of_an_unsharded_model():
    run_ranks(4, _draw, {}, BF16, (*SHARDING_STRATEGIES, *ON_TWO_AXES))


@on_ranks(2)
def test_a_tied_weight_drawn_from_meta_is_that_of_the_first_module_that_has_it() -> None:
    def build() -> nn.Sequential:
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
        model[2].weight = model[0].weight
        return model

    alone, sharded = build(), build()
    materialize(alone, "cpu", SEED)
    mesh, placements = mesh_and_placements("optim_grads_params")
    with fully_shard_context("cpu", reset_parameters=seeded_reset(sharded, "cpu", SEED)):
        fully_shard(sharded[1], mesh, placements)
        fully_shard(sharded, mesh, placements)
    assert sharded[2].weight is sharded[0].weight
    weights = whole_weights(Subject([sharded], square_mean))
    for name, parameter in alone.named_parameters():
        assert torch.equal(weights[f"0.{name}"], parameter), name


# Mixed precision


def stack_subject(dtype: torch.dtype = FP32) -> Subject:
    stack = Stack(Layer()).to(dtype)
    return Subject([*stack.inner, stack], lambda x: square_mean(stack(x.to(dtype)).float()))


def sharded_stack(sharding: str, dtype: torch.dtype, **options: Any) -> tuple[Subject, FsdpContext]:
    """A stack under the policy that the options describe."""
    subject = built(lambda: stack_subject(dtype))
    subject.options = {
        "grad_divisor": options.pop("grad_divisor", 1),
        "mixed_precision_policy": MixedPrecisionPolicy(**options),
    }
    return subject, shard(subject, sharding)


def backward(
    subject: Subject, context: FsdpContext, numbers: Sequence[int], *, is_whole: bool = True
) -> None:
    """The microbatches of these numbers; they end a step if `is_whole`."""
    for number in numbers:
        with microbatch(context, is_last=is_whole and number == numbers[-1]):
            subject.loss(batches(0, number)[dist.get_rank()]).backward()


def gradients_under(
    sharding: str, dtype: torch.dtype, numbers: Sequence[int], **options: Any
) -> dict[str, Tensor]:
    subject, context = sharded_stack(sharding, dtype, **options)
    backward(subject, context, numbers)
    return whole_gradients(subject)


def on_every_sharding(function: Callable[[str], None]) -> None:
    """On two ranks, with every strategy."""
    run_ranks(2, lambda: [function(sharding) for sharding in SHARDING_STRATEGIES])


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("main_params_dtype", [None, torch.float64, FP32, BF16])
def test_main_weights_have_the_dtype_they_are_given_and_so_has_what_the_optimizer_updates(
    dtype, main_params_dtype
):
    def body(sharding: str) -> None:
        subject, _ = sharded_stack(sharding, dtype, main_params_dtype=main_params_dtype)
        expected = main_params_dtype or dtype
        assert {group.main_weight.dtype for group in groups_of(subject.units)} == {expected}
        assert {group.model_weight.dtype for group in groups_of(subject.units)} == {dtype}
        assert {parameter.dtype for parameter in subject.parameters().values()} == {expected}

    on_every_sharding(body)


def test_an_update_too_small_for_bf16_reaches_fp32_main_weights_alone():
    def body(sharding: str) -> None:
        for main_dtype, can_learn in ((BF16, False), (FP32, True)):
            subject, context = sharded_stack(sharding, BF16, main_params_dtype=main_dtype)
            optimizer = torch.optim.SGD(subject.parameters().values(), lr=1e-5)
            fully_shard_optimizer(optimizer)
            before = whole_weights(subject)["1.scale"].clone()
            backward(subject, context, [0])
            optimizer.step()
            assert torch.equal(whole_weights(subject)["1.scale"], before) != can_learn

    on_every_sharding(body)


@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("main_grads_dtype", [None, FP32, BF16])
def test_main_gradients_have_the_dtype_they_are_given(dtype, main_grads_dtype):
    def body(sharding: str) -> None:
        subject, context = sharded_stack(sharding, dtype, main_grads_dtype=main_grads_dtype)
        expected = main_grads_dtype or dtype
        backward(subject, context, [0, 1])
        assert {group.main_grad.dtype for group in groups_of(subject.units)} == {expected}
        assert {parameter.grad.dtype for parameter in subject.parameters().values()} == {expected}

    on_every_sharding(body)


def test_fp32_main_gradients_keep_of_bf16_microbatches_what_bf16_ones_round_away():
    def body(sharding: str) -> None:
        numbers = range(4)
        fine = gradients_under(sharding, BF16, numbers, main_grads_dtype=FP32)
        coarse = gradients_under(sharding, BF16, numbers, main_grads_dtype=BF16)
        assert any(
            not torch.equal(gradient, gradient.to(BF16).to(FP32)) for gradient in fine.values()
        )
        for name, gradient in coarse.items():
            assert not torch.equal(gradient.to(FP32), fine[name]), name
            torch.testing.assert_close(
                gradient.to(FP32), fine[name], rtol=0.05, atol=0.02 * fine[name].abs().max()
            )

    on_every_sharding(body)


class Recording(torch.optim.Optimizer):
    """Gradient descent that remembers the gradients it was given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        parameters = self.param_groups[0]["params"]
        self.seen = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.sub_(parameter.grad, alpha=0.1)


def test_the_optimizer_gets_bf16_gradients_as_fp32_and_afterwards_they_are_back():
    def body(sharding: str) -> None:
        subject, context = sharded_stack(sharding, FP32, main_grads_dtype=BF16)
        optimizer = Recording(subject.parameters().values())
        fully_shard_optimizer(optimizer)
        before = {name: weight.clone() for name, weight in whole_weights(subject).items()}
        backward(subject, context, [0, 1])
        gradients = [parameter.grad for parameter in subject.parameters().values()]
        optimizer.step()
        for parameter, gradient, seen in zip(
            subject.parameters().values(), gradients, optimizer.seen, strict=True
        ):
            assert parameter.grad is gradient
            assert (gradient.dtype, seen.dtype) == (BF16, FP32)
            assert torch.equal(seen.to_local(), gradient.to_local().to(FP32))
        rounded = whole_gradients(subject)
        for name, weight in whole_weights(subject).items():
            torch.testing.assert_close(weight, before[name] - 0.1 * rounded[name].to(FP32))
            assert not torch.equal(weight, before[name])

    on_every_sharding(body)


def test_an_optimizer_whose_step_calls_that_of_its_base_leaves_bf16_gradients_as_they_were():
    class Inheriting(torch.optim.SGD):
        def step(self, closure: None = None) -> None:
            super().step(closure)

    def body(sharding: str) -> None:
        torch.optim.SGD(
            [nn.Parameter(torch.zeros(1))]
        )  # the first one lets hooks run around SGD's own step
        subject, context = sharded_stack(sharding, FP32, main_grads_dtype=BF16)
        optimizer = Inheriting(subject.parameters().values(), lr=0.1)
        fully_shard_optimizer(optimizer)
        backward(subject, context, [0])
        gradients = [parameter.grad for parameter in subject.parameters().values()]
        optimizer.step()
        for parameter, gradient in zip(subject.parameters().values(), gradients, strict=True):
            assert parameter.grad is gradient

    on_every_sharding(body)


def test_gradients_reduced_in_bf16_differ_from_those_in_fp32_by_rounding_alone():
    def body(sharding: str) -> None:
        fine = gradients_under(sharding, FP32, [0, 1])
        coarse = gradients_under(sharding, FP32, [0, 1], grad_comm_dtype=BF16)
        for name, gradient in coarse.items():
            assert gradient.dtype == FP32
            assert not torch.equal(gradient, fine[name]), name
            # Half a unit in the last place of eight bits, of every rank's part.
            torch.testing.assert_close(
                gradient, fine[name], rtol=0, atol=2**-8 * fine[name].abs().max() * 2
            )

    on_every_sharding(body)


@pytest.mark.parametrize(("divisor", "numbers"), [(3.0, [0]), (4.0, [0, 1, 2])])
def test_grad_divisor_divides_gradients_exactly(divisor, numbers):
    """Sums of more than one microbatch are divided part by part, which is exact for a power
    of two.
    """

    def body(sharding: str) -> None:
        undivided = gradients_under(sharding, FP32, numbers)
        divided = gradients_under(sharding, FP32, numbers, grad_divisor=divisor)
        for name, gradient in undivided.items():
            assert gradient.any()
            assert torch.equal(divided[name], gradient / divisor), name

    on_every_sharding(body)


# Accumulation


def gradients_of_microbatches(numbers: Sequence[int]) -> list[dict[str, Tensor]]:
    """Of each microbatch alone, averaged over ranks."""
    found = []
    for number in numbers:
        subject = built(stack_subject)
        run_alone(subject, batches(0, number))
        found.append({name: parameter.grad for name, parameter in subject.parameters().items()})
    return found


class Accumulating:
    """A sharded stack, and what its gradients have to be."""

    def __init__(self, sharding: str) -> None:
        self.subject, self.context = sharded_stack(sharding, FP32)
        self.of_microbatches = gradients_of_microbatches(range(4))
        largest = [
            max(gradient.abs().max() for gradient in gradients.values())
            for gradients in self.of_microbatches
        ]
        assert min(largest) > 1e-2

    def run(self, *numbers: int, is_whole: bool = True) -> None:
        backward(self.subject, self.context, numbers, is_whole=is_whole)

    def run_unscoped(self, *numbers: int) -> None:
        for number in numbers:
            self.subject.loss(batches(0, number)[dist.get_rank()]).backward()

    def clear(self, *, to_none: bool) -> None:
        torch.optim.SGD(self.subject.parameters().values()).zero_grad(set_to_none=to_none)

    def double(self) -> None:
        for parameter in self.subject.parameters().values():
            parameter.grad = parameter.grad * 2

    def check(self, *factors: float, other: dict[str, Sequence[float]] | None = None) -> None:
        """The gradients are those of the microbatches, each as often as `factors` say, or `other`
        for a parameter.
        """
        expected = {}
        for name in self.subject.parameters():
            own = (other or {}).get(name, factors)
            expected[name] = sum(
                factor * self.of_microbatches[number][name] for number, factor in enumerate(own)
            )
        assert_same_tensors(whole_gradients(self.subject), expected)
        # What the optimizer gets is what the buffer has.
        for group in groups_of(self.subject.units):
            rows = group.main_grad.view(group.placements.optimizer)
            for index, parameter in enumerate(group.fsdp_parameters):
                assert torch.equal(parameter.sharded.grad.to_local(), rows.get_local_tensor(index))


ACCUMULATION = [
    pytest.param(2, SHARDING_STRATEGIES, id="strategies"),
    pytest.param(4, ("hsdp", "hfsdp"), id="hybrid"),
    pytest.param(4, (*SHARDING_STRATEGIES, "full"), id="4", marks=pytest.mark.wide),
]


def accumulate(
    world_size: int, shardings: Sequence[str], scenario: Callable[[Accumulating], None]
) -> None:
    def body() -> None:
        for sharding in shardings:
            try:
                scenario(Accumulating(sharding))
            except Exception as error:
                raise AssertionError(f"{sharding}: {error}") from error

    run_ranks(world_size, body)


on_shardings = pytest.mark.parametrize(("world_size", "shardings"), ACCUMULATION)


@on_shardings
def test_backwards_of_one_step_and_of_several_add_up_until_gradients_are_cleared(
    world_size, shardings
):
    def scenario(model: Accumulating) -> None:
        model.run(0, 1, 2)
        model.check(1, 1, 1)
        model.run(3)
        model.check(1, 1, 1, 1)
        model.run(0, 2)
        model.check(2, 1, 2, 1)
        for to_none in (False, True):
            model.clear(to_none=to_none)
            model.run(3, 1)
            model.check(0, 1, 0, 1)
            model.clear(to_none=not to_none)
            model.run(2)
            model.check(0, 0, 1, 0)

    accumulate(world_size, shardings, scenario)


@on_shardings
def test_backwards_outside_of_microbatch_add_up_each_averaged_over_ranks(world_size, shardings):
    def scenario(model: Accumulating) -> None:
        model.run_unscoped(0)
        model.check(1)
        model.run_unscoped(1, 1, 2)
        model.check(1, 2, 1)
        model.run(3, 0)
        model.check(2, 2, 1, 1)
        model.run_unscoped(3)
        model.check(2, 2, 1, 2)
        for to_none in (True, False):
            model.clear(to_none=to_none)
            model.run_unscoped(3)
            model.check(0, 0, 0, 1)

    accumulate(world_size, shardings, scenario)


@on_shardings
def test_gradients_cleared_between_microbatches_begin_anew(world_size, shardings):
    def scenario(model: Accumulating) -> None:
        for to_none in (True, False):
            model.run(0, 1, is_whole=False)
            model.clear(to_none=to_none)
            model.run(2, 3)
            model.check(0, 0, 1, 1)
            model.run(1, is_whole=False)
            model.clear(to_none=to_none)
            model.run(0)
            model.check(1)

    accumulate(world_size, shardings, scenario)


@on_shardings
def test_gradients_that_the_user_has_put_in_their_place_are_continued_from(world_size, shardings):
    def scenario(model: Accumulating) -> None:
        model.run(0, 1)
        model.double()
        model.run(2, 3)
        model.check(2, 2, 1, 1)
        model.double()
        model.double()
        model.run(0)
        model.check(9, 8, 4, 4)
        model.double()
        model.run_unscoped(1)
        model.check(18, 17, 8, 8)

    accumulate(world_size, shardings, scenario)


@on_shardings
def test_partial_gradients_that_the_user_has_put_in_their_place_are_continued_from(
    world_size, shardings
):
    def scenario(model: Accumulating) -> None:
        model.run(0, is_whole=False)
        model.double()
        model.run(1, is_whole=False)
        model.double()
        model.run(2)
        model.check(4, 2, 1)

    accumulate(world_size, shardings, scenario)


@on_shardings
@pytest.mark.parametrize("to_none", [True, False])
def test_the_gradients_of_some_parameters_that_are_cleared_begin_anew_alone(
    world_size, shardings, to_none
):
    def scenario(model: Accumulating) -> None:
        parameters = model.subject.parameters()
        names = [name for name in parameters if name.endswith("weight")]

        def clear() -> None:
            torch.optim.SGD([parameters[name] for name in names]).zero_grad(set_to_none=to_none)

        model.run(0, 1)
        clear()
        model.run(2, 3)
        model.check(1, 1, 1, 1, other=dict.fromkeys(names, (0, 0, 1, 1)))
        model.run(0, is_whole=False)
        clear()
        model.run(1, is_whole=False)
        model.run(2)
        model.check(2, 2, 2, 1, other=dict.fromkeys(names, (0, 1, 1, 0)))

    accumulate(world_size, shardings, scenario)


@on_shardings
def test_gradients_that_the_user_has_changed_in_place_are_continued_from(world_size, shardings):
    def scenario(model: Accumulating) -> None:
        model.run(0, 1)
        for parameter in model.subject.parameters().values():
            parameter.grad.mul_(0.5)
        model.run(2, 3)
        model.check(0.5, 0.5, 1, 1)

    accumulate(world_size, shardings, scenario)


def _error_of_sums(strategy: str) -> float:
    torch.manual_seed(0)
    rank, size = dist.get_rank(), dist.get_world_size()
    alone = nn.Linear(16, 16, bias=False).bfloat16()
    model = copy.deepcopy(alone)
    policy = MixedPrecisionPolicy(main_grads_dtype=torch.float32, grad_comm_dtype=torch.float32)
    with fully_shard_context("cpu") as context:
        fully_shard(
            model, init_device_mesh("cpu", (size,)), Placements.for_strategy(strategy), policy
        )
    inputs = torch.randn(8, size, 4, 16).bfloat16()
    exact = torch.zeros(16, 16, dtype=torch.float64)
    for number, batch in enumerate(inputs):
        for own in batch:
            alone(own).float().square().mean().backward()
            exact += alone.weight.grad.double() / size
            alone.weight.grad = None
        with microbatch(context, is_last=number == len(inputs) - 1):
            model(batch[rank]).float().square().mean().backward()
    summed = model.parameter_groups[0].main_grad.redistribute([Replicate()]).get_local_tensor(0)
    return ((summed - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("strategy", ["no_shard", "optim", "optim_grads"])
def test_fp32_sums_of_bf16_microbatches_are_not_rounded_before_they_are_reduced(strategy):
    assert max(run_ranks(2, _error_of_sums, strategy)) < 1e-6
