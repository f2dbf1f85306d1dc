"""The methods of `FSDPModule` on sharded modules, called as programs for FSDP2 call them, with the
effect that they have on FSDP2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp2
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from megatron.core.distributed.fsdp import FsdpModule, Placements, fully_shard
from tests.helpers.ranks import on_ranks

FULLY = (fsdp2.fully_shard, fully_shard)
# Methods of FSDP2, with arguments that enable a feature.
REJECTED: dict[str, tuple[Any, ...]] = {
    "set_custom_all_gather": (object(),),
    "set_custom_reduce_scatter": (object(),),
    "set_all_reduce_hook": (print,),
    "set_reduce_scatter_unused_params": (True,),
    "set_reduce_scatter_max_input_buffers": (2,),
    "set_separate_reduce_scatter_group": (),
    "set_allocate_memory_from_process_group_for_comm": (True,),
    "set_symm_mem_for_comm": (),
    "_set_unshard_async_op": (True,),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(10, 6)
        self.layers = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])
        self.head = nn.Linear(6, 10)

    def hidden(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x).tanh()
        return x

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.hidden(tokens))

    def generate(self, tokens: torch.Tensor) -> torch.Tensor:
        """Calls the forward, and reads a weight that the root owns."""
        for _ in range(2):
            tokens = torch.cat([tokens, self(tokens)[:, -1:].argmax(-1)], dim=1)
        return tokens + int(self.head.bias.shape[0] == 0)

    def encode(self, tokens: torch.Tensor) -> torch.Tensor:
        """Uses weights of the root outside of its forward."""
        return self.hidden(tokens) @ self.head.weight.t()


def sharded(
    fully: Callable[..., Any], mesh: Any = None, root: dict[str, Any] | None = None, **options: Any
) -> Any:
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),)) if mesh is None else mesh
    for module in (model.embedding, *model.layers):
        fully(module, mesh=mesh, **options)
    fully(model, mesh=mesh, **options, **(root or {}))
    # As an optimizer has them: FSDP2's modules show others while their weights are whole.
    model.own = list(model.parameters())
    return model


def pair(mesh: Any = None, **options: Any) -> list[Any]:
    """The model sharded by FSDP2, and the model sharded by this engine."""
    return [sharded(fully, mesh, **options) for fully in FULLY]


def tokens(seed: int = 0) -> torch.Tensor:
    torch.manual_seed(10 * seed + dist.get_rank())
    return torch.randint(10, (2, 4))


def backward(model: Any, seed: int = 0) -> None:
    model(tokens(seed)).float().logsumexp(-1).sum().backward()


def whole(gradient: Any) -> torch.Tensor:
    """The rows of the ranks of the last axis, of which the first ranks are one line.

    Not by `full_tensor`: DTensor remembers equal meshes of earlier tests, with their groups.
    """
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, gradient.to_local())
    return torch.cat(parts[: gradient.device_mesh.size(-1)])


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [whole(parameter.grad) for parameter in model.own]


def assert_same_gradients(models: list[Any]) -> None:
    for own, other in zip(*map(gradients, models), strict=True):
        torch.testing.assert_close(own, other)


def units(model: nn.Module) -> Iterator[Any]:
    return (module for module in model.modules() if isinstance(module, FSDPModule))


def test_every_method_of_fsdp2_is_overridden() -> None:
    """An inherited one would look for FSDP2's private state."""
    public = {name for name in vars(FSDPModule) if not name.startswith("__")}
    ours = {name for kind in (FsdpModule, *FsdpModule.__mro__[1:2]) for name in vars(kind)}
    assert public - ours == set()


@on_ranks(2)
def test_rejected_methods_suggest_an_alternative_and_accept_their_default() -> None:
    model = sharded(fully_shard)
    for name, arguments in REJECTED.items():
        with pytest.raises(NotImplementedError, match=name):
            getattr(model, name)(*arguments)
    model.set_reduce_scatter_unused_params(False)
    model.set_separate_reduce_scatter_group(enable=False)
    model.set_allocate_memory_from_process_group_for_comm(False)
    with pytest.raises(NotImplementedError, match="_comm_ctx"):
        fsdp2.share_comm_ctx([model])


# Gradients


def sum_gradients(model: nn.Module) -> None:
    """A pretraining program that divides its loss by the tokens of all ranks."""
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            # FSDP2 cannot do without on gloo.
            module.set_force_sum_reduction_for_comms(True)


@on_ranks(2)
def test_norms_and_clipping_use_sums_instead_of_means_if_requested() -> None:
    norms = []
    for model in pair():
        sum_gradients(model)
        backward(model)
        summed = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3).full_tensor()
        clipped = torch.stack([gradient.norm() for gradient in gradients(model)]).norm()
        norms.append((float(summed), float(clipped)))
    assert norms[1] == pytest.approx(norms[0])
    assert norms[1][1] == pytest.approx(1e-3, rel=1e-2)

    mean = sharded(fully_shard)
    backward(mean)
    norm = torch.nn.utils.get_total_norm([p.grad for p in mean.parameters()]).full_tensor()
    assert norms[1][0] == pytest.approx(2 * float(norm))


@on_ranks(4)
def test_a_divide_factor_counts_all_axes_of_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for factor in (1.0, 3.0):
        models = pair(mesh)
        for model in models:
            for unit in units(model):
                unit.set_gradient_divide_factor(factor)
                unit.set_force_sum_reduction_for_comms(True)
            for number in range(2):
                model.set_requires_gradient_sync(number == 1)
                backward(model, number)
        assert_same_gradients(models)


@on_ranks(2)
def test_a_divide_factor_is_not_recursive_and_leaves_grad_divisor() -> None:
    models = pair()
    for model in models:
        for unit in units(model):
            unit.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        model.layers[0].set_reduce_scatter_divide_factor(4.0)
        backward(model)
    assert_same_gradients(models)

    halved = sharded(fully_shard, grad_divisor=2)
    halved.set_gradient_divide_factor(1.0)
    halved.layers[0].set_gradient_divide_factor(4.0)
    backward(halved)
    torch.testing.assert_close(halved.head.weight.grad * 2, models[1].head.weight.grad)
    with pytest.raises(ValueError, match="positive factor, got 0"):
        halved.set_gradient_divide_factor(0)


@on_ranks(4)
def test_synchronisation_can_be_deferred_by_module_and_by_axis() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for defer in (
        lambda model, is_last: model.set_requires_gradient_sync(is_last),
        lambda model, is_last: model.set_requires_all_reduce(is_last),
        lambda model, is_last: model.set_requires_gradient_sync(is_last, recurse=False),
        lambda model, is_last: model.layers[1].set_requires_all_reduce(is_last),
    ):
        models = pair(mesh)
        for model in models:
            for number in range(3):
                defer(model, number == 2)
                model.set_is_last_backward(number == 2)
                backward(model, number)
        assert_same_gradients(models)


@on_ranks(2)
def test_sums_only_are_supported_on_the_cpu() -> None:
    models = pair()
    for model in models:
        for unit in units(model):
            unit.set_force_sum_reduction_for_comms(True)
        backward(model)
    assert_same_gradients(models)


# Weights


@on_ranks(2)
def test_unshard_gives_the_caller_full_weights_and_reshard_takes_them_back() -> None:
    for model in pair():
        names = dict(model.named_parameters())
        torch.manual_seed(0)
        expected = dict(Net().named_parameters())
        handle = model.layers[1].unshard(async_op=True)
        handle.wait()
        assert model.unshard() is None
        for name in ("layers.1.weight", "head.bias"):
            found = model.get_parameter(name)
            assert not isinstance(found, DTensor)
            assert torch.equal(found, expected[name])
        assert isinstance(model.layers[0].weight, DTensor)  # not recursive

        model(tokens()).sum().backward()
        for unit in units(model):
            unit.reshard()
        assert {name: id(p) for name, p in model.named_parameters()} == {
            name: id(p) for name, p in names.items()
        }


@on_ranks(2)
def test_without_resharding_weights_are_kept_for_many_forwards() -> None:
    """A rollout: everything is gathered once, used often, and freed before training continues."""
    found = []
    for model in pair():
        for unit in units(model):
            unit.set_reshard_after_forward(False)
            unit.unshard()
        with torch.no_grad():
            first, second = model(tokens()), model(tokens())
        assert not isinstance(model.layers[0].weight, DTensor)
        assert torch.equal(first, second)
        for unit in units(model):
            unit.reshard()
            unit.set_reshard_after_forward(True)
        assert isinstance(model.layers[0].weight, DTensor)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            model.layers[2].unshard(async_op=True)
            backward(model, step)
            optimizer.step()
            optimizer.zero_grad()
        found.append(model(tokens()))
    torch.testing.assert_close(found[1], found[0])
    with pytest.raises(ValueError, match="True or False, got None"):
        model.set_reshard_after_forward(None)


@on_ranks(2)
def test_kept_weights_are_gathered_again_after_an_optimizer_step() -> None:
    model = sharded(fully_shard)
    model.set_reshard_after_forward(False)
    sharded_weight = model.head.weight
    model.unshard()
    full = model.head.weight
    with torch.no_grad():
        sharded_weight.mul_(0.0)
        out = model(tokens())
    assert torch.equal(full, torch.zeros(10, 6))
    torch.testing.assert_close(out, full.new_zeros(2, 4, 1) + model.head.bias)
    model.reshard()


@on_ranks(2)
def test_a_write_to_a_held_weight_is_an_error_and_not_lost() -> None:
    for use in (
        lambda model: model.reshard(),
        lambda model: model(tokens()),
        lambda model: model.state_dict(),
        lambda model: model.to("cpu"),
    ):
        model = sharded(fully_shard)
        model.unshard()
        with torch.no_grad():
            model.head.weight.zero_()
        with pytest.raises(RuntimeError, match=r"head\.weight.*written to after unshard"):
            use(model)
        model._fsdp_is_held = False
        model.reshard()
        # The values before, and a whole model.
        model(tokens()).sum().backward()
        assert float(model.head.weight.full_tensor().abs().sum()) > 0


@on_ranks(2)
def test_state_dicts_and_moves_see_sharded_parameters() -> None:
    model = sharded(fully_shard)
    for look in (
        lambda: model.state_dict(),
        lambda: get_model_state_dict(model),
        lambda: set_model_state_dict(model, get_model_state_dict(model)),
        lambda: model.to("cpu"),
    ):
        for unit in units(model):
            unit.unshard()
        look()
        assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
        assert not any(unit.is_unsharded for unit in units(model))


@on_ranks(2)
def test_a_module_cannot_be_resharded_while_it_runs() -> None:
    model = sharded(fully_shard)
    model.layers[0].register_forward_pre_hook(lambda module, _: module.reshard())
    with pytest.raises(RuntimeError, match=r"reshard\(\) of a FsdpLinear inside its forward"):
        model(tokens())
    assert not model.layers[0].is_unsharded


@on_ranks(2)
def test_weights_kept_after_a_backward_are_used_until_they_change() -> None:
    models = pair()
    for model in models:
        model.set_reshard_after_backward(False)
        for number in range(2):
            backward(model, number)
    assert all(unit.is_unsharded for unit in units(models[1]))
    assert_same_gradients(models)

    # FSDP2 would use the weights from before the step.
    usual = sharded(fully_shard)
    for number in range(2):
        backward(usual, number)
    for model in (usual, models[1]):
        torch.optim.SGD(model.own, lr=1.0).step()
        model.zero_grad()
        model.set_reshard_after_backward(True)
        backward(model, 2)
    assert not any(unit.is_unsharded for unit in units(models[1]))
    assert_same_gradients([usual, models[1]])


@on_ranks(2)
def test_an_embedding_does_without_its_weight_in_backward() -> None:
    models = pair()
    for model in models:
        model.embedding.set_unshard_in_backward(False)
        backward(model)
    assert_same_gradients(models)

    group, gathers = models[1].embedding.parameter_groups[0], []
    prepare = group._prepare_gather

    def counted() -> Any:
        gathers.append(prepare())
        return gathers[-1]

    group._prepare_gather = counted
    backward(models[1])
    assert len([gather for gather in gathers if gather is not None]) == 1


@on_ranks(2)
def test_prefetched_modules_are_gathered_early() -> None:
    models = pair()
    for model in models:
        first, second, third = model.layers
        first.set_modules_to_forward_prefetch([second, third])
        third.set_modules_to_backward_prefetch([second, first])
        seen: list[tuple[bool, bool]] = []
        if isinstance(model, FsdpModule):
            first.register_forward_hook(
                lambda *_: seen.append((second.is_unsharded, third.is_unsharded))  # noqa: B023
            )
        for number in range(2):
            backward(model, number)
    assert seen == [(True, True)] * 2
    assert not any(unit.is_unsharded for unit in units(models[1]))
    assert_same_gradients(models)
    for wrong in (nn.Linear(2, 2), sharded(fully_shard)):
        with pytest.raises(ValueError, match="modules of the same sharded model"):
            models[1].set_modules_to_forward_prefetch([wrong])


# Methods besides forward


@on_ranks(2)
def test_a_registered_method_may_call_the_forward() -> None:
    found = []
    for model in pair():
        register_fsdp_forward_method(model, "generate")
        with torch.no_grad():
            found.append(model.generate(tokens()))
        backward(model)
        found.append(gradients(model))
    assert torch.equal(found[0], found[2])
    torch.testing.assert_close(found[3], found[1])


@on_ranks(2)
def test_gradients_come_back_through_a_registered_method() -> None:
    policy = fsdp2.MixedPrecisionPolicy(output_dtype=torch.float64)
    models = pair(root={"mp_policy": policy})
    for model in models:
        register_fsdp_forward_method(model, "encode")
        for number in range(2):
            out = model.encode(tokens(number))
            assert out.dtype == torch.float64
            (out.logsumexp(-1).sum() + 0 * model(tokens(number)).sum()).backward()
    assert_same_gradients(models)


@on_ranks(2)
def test_a_registered_method_that_raises_leaves_a_model_that_trains() -> None:
    model, other = sharded(fully_shard), sharded(fully_shard)
    register_fsdp_forward_method(model, "encode")
    with pytest.raises(TypeError):
        model.encode("words")
    for number in range(2):
        backward(model, number)
        backward(other, number)
    assert not any(unit.is_unsharded for unit in units(model))
    assert_same_gradients([model, other])


# The rest


@on_ranks(2)
def test_a_failed_iteration_is_dropped_on_demand() -> None:
    model, other = (
        sharded(fully_shard, placements=Placements.for_strategy("optim")) for _ in range(2)
    )
    model.set_requires_gradient_sync(False)
    backward(model, 7)
    fail = model.layers[1].register_forward_hook(_failing_in_backward)
    with pytest.raises(ArithmeticError):
        backward(model)
    fail.remove()
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    backward(model, 1)
    backward(other, 1)
    assert_same_gradients([model, other])
    with pytest.raises(RuntimeError, match="outermost sharded module, got a FsdpLinear"):
        model.layers[0].reset_iter_state()


@on_ranks(2)
def test_parts_of_a_sharded_container_are_plain_containers() -> None:
    for fully in FULLY:
        layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(3)))
        for module in (*layers, layers):
            fully(module, mesh=init_device_mesh("cpu", (2,)))
        part = layers[1:]
        assert type(part) is nn.Sequential
        assert len(part) == 2


@on_ranks(2)
def test_a_module_of_fsdp2_is_not_sharded_again() -> None:
    with pytest.raises(ValueError, match="not sharded yet, got a FSDPLinear"):
        fully_shard(fsdp2.fully_shard(nn.Linear(2, 2), mesh=init_device_mesh("cpu", (2,))))


def _fail(_: torch.Tensor) -> None:
    raise ArithmeticError("mine")


def _failing_in_backward(_: nn.Module, __: Any, out: torch.Tensor) -> None:
    out.register_hook(_fail)


@on_ranks(1)
def test_a_program_may_have_replaced_the_function_of_fsdp2() -> None:
    """As those do that train with libraries which import it from PyTorch when they shard."""
    model = nn.Linear(4, 4)
    with mock.patch("torch.distributed.fsdp.fully_shard", fully_shard):
        torch.distributed.fsdp.fully_shard(model)
    assert isinstance(model, torch.distributed.fsdp.FSDPModule)
    model(torch.ones(1, 4)).sum().backward()
    assert model.weight.grad is not None
