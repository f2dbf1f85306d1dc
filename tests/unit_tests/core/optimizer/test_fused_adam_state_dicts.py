"""FusedAdam's rejected arguments, state dicts and copies."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch

from megatron.core.optimizer.fused_adam import FusedAdam
from tests.unit_tests.core.optimizer.helpers.adam_runs import (
    BF16,
    F8,
    F16,
    F32,
    parameters,
    plain,
    snapshot,
    train,
)

# Rejected arguments


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        # A NotImplementedError is the RuntimeError that TransformerEngine raises.
        ({"amsgrad": True}, NotImplementedError, "amsgrad=False"),
        ({"maximize": True}, NotImplementedError, "maximize=False"),
        ({"capturable": True}, NotImplementedError, "capturable=False"),
        ({"differentiable": True}, NotImplementedError, "differentiable=False"),
        ({"store_param_remainders": True}, ValueError, "master_weights=True"),
        ({"exp_avg_dtype": torch.float64}, NotImplementedError, "exp_avg_dtype .*float64"),
        ({"master_weight_dtype": BF16}, NotImplementedError, "master_weight_dtype .*bfloat16"),
        ({"lr": -1.0}, ValueError, "lr .* -1.0"),
        ({"betas": (0.9, 1.0)}, ValueError, "beta2 in"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        FusedAdam(parameters((4,)), **options)


def test_a_parameter_of_another_dtype_is_rejected_and_not_kept():
    optimizer = FusedAdam(parameters((4,)))
    with pytest.raises(ValueError, match=r"Expected parameters of .*, got torch.float64 at 0"):
        optimizer.add_param_group({"params": parameters((4,), dtype=torch.float64)})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"grad": torch.zeros(3)}, "gradient of parameter 1 of group 0 with shape"),
        ({"grad": torch.zeros(4).to_sparse()}, "gradient of parameter 1 of group 0, .*sparse_coo"),
        ({"grad": torch.zeros(4, dtype=torch.int32)}, "int32"),
        ({"grad": torch.zeros(4, device="meta")}, "on cpu, got meta"),
        ({"exp_avg": torch.zeros(5)}, r"exp_avg of parameter 1 .* \(4,\) .* \(5,\)"),
        ({"exp_avg_sq": torch.zeros(4, dtype=BF16)}, "float32, .*bfloat16"),
    ],
)
def test_no_parameter_is_stepped_when_one_cannot_be(changes, message):
    owned = parameters((4,), (4,))
    optimizer = FusedAdam(owned, use_decoupled_grad=True)
    for parameter in owned:
        parameter.decoupled_grad = torch.ones(4)
    optimizer.step()
    changes = dict(changes)
    owned[1].decoupled_grad = changes.pop("grad", owned[1].decoupled_grad)
    optimizer.state[owned[1]].update(changes)
    before = snapshot(optimizer)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert snapshot(optimizer) == before


# State dicts


ALL_OPTIONS = [
    {},
    {"exp_avg_dtype": BF16, "exp_avg_sq_dtype": BF16},
    {"exp_avg_dtype": F8, "exp_avg_sq_dtype": F16},
    {"master_weights": True},
    {"master_weights": True, "store_param_remainders": True},
    {"master_weights": True, "master_weight_dtype": F16, "exp_avg_dtype": F16},
]


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_loaded_state_dict_gives_the_bits_back_and_continues_alike(options):
    ours, theirs = (parameters((16, 5), (3,), dtype=BF16) for _ in range(2))
    optimizer, fresh = (
        FusedAdam(ours, lr=0.1, **options),
        FusedAdam(theirs, lr=0.2, weight_decay=0.3, **options),
    )
    train(optimizer, ours, 0, 3)
    for own, their in zip(ours, theirs, strict=True):
        their.data.copy_(own.data)
    fresh.init_state()
    storages = [tensor.data_ptr() for state in fresh.state.values() for tensor in state.values()]
    saved = copy.deepcopy(optimizer.state_dict())
    before = plain(saved)
    fresh.load_state_dict(saved)
    assert plain(saved) == before
    assert [
        tensor.data_ptr() for state in fresh.state.values() for tensor in state.values()
    ] == storages
    values = [
        plain(
            [o.get_unscaled_state(p, name) for p in owned for name in o.state[p] if name != "step"]
        )
        for o, owned in ((optimizer, ours), (fresh, theirs))
    ]
    assert values[0] == values[1]
    assert fresh.param_groups[0]["lr"] == 0.1
    assert fresh.param_groups[0]["weight_decay"] == 0.0
    train(optimizer, ours, 3, 6)
    train(fresh, theirs, 3, 6)
    assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
def test_a_state_dict_holds_fp32_values_of_scaled_states_and_leaves_the_states_as_they_are(options):
    owned = parameters((16, 5), dtype=BF16)
    optimizer = FusedAdam(owned, **options)
    train(optimizer, owned, 0, 2)
    before = snapshot(optimizer)
    tensors = dict(optimizer.state[owned[0]])
    state = optimizer.state_dict()["state"][0]
    assert snapshot(optimizer) == before
    assert all(optimizer.state[owned[0]][name] is tensor for name, tensor in tensors.items())
    for name, own in tensors.items():
        if own.dtype in (F16, F8):
            assert state[name].dtype == F32
            state[name].zero_()
        else:
            assert state[name] is own
    state.clear()
    assert snapshot(optimizer) == before


def _rename(state: dict[str, Any]) -> None:
    state["exp_average"] = state.pop("exp_avg")


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda d: d["state"][1].update(exp_avg=torch.zeros(3, dtype=BF16)), "exp_avg .* 1 in"),
        (lambda d: d["state"][1].update(exp_avg=torch.zeros(4)), r"\(3,\) .* \(4,\)"),
        (lambda d: d["state"][1].pop("exp_avg_sq"), r"\['exp_avg', 'step'\]"),
        (lambda d: _rename(d["state"][1]), r"\['exp_average', 'exp_avg_sq', 'step'\]"),
        (lambda d: d["state"][1].update(step=0.5), "parameter 1, got 0.5"),
        (lambda d: d["state"][1].update(exp_avg=[0.0] * 3), "exp_avg of parameter 1 .* list"),
        (lambda d: d["state"].update({2: {}}), r"\[2\]"),
        (lambda d: d["param_groups"][0]["params"].pop(), r"\[2\] parameters, got \[1\]"),
        (lambda d: d["param_groups"].append({"params": []}), r"\[2\] .* \[2, 0\]"),
    ],
)
@pytest.mark.parametrize("is_fresh", [True, False])
def test_a_state_dict_that_does_not_fit_is_rejected_and_nothing_is_changed(
    spoil, message, is_fresh
):
    ours, theirs = (parameters((16, 5), (3,)) for _ in range(2))
    optimizer, other = FusedAdam(ours, lr=0.1), FusedAdam(theirs, lr=0.2)
    train(optimizer, ours, 0, 2)
    if not is_fresh:
        train(other, theirs, 0, 1)
    before = snapshot(other)
    saved = copy.deepcopy(optimizer.state_dict())
    spoil(saved)
    with pytest.raises(ValueError, match=message):
        other.load_state_dict(saved)
    assert snapshot(other) == before
    assert len(other.state) == (0 if is_fresh else 2)


def test_state_dicts_of_torch_adamw_and_of_transformer_engine_are_understood():
    ours, theirs = (parameters((16, 4), (16,)) for _ in range(2))
    reference = torch.optim.AdamW(theirs, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, fused=True)
    train(reference, theirs, 0, 3)
    per_parameter = copy.deepcopy(reference.state_dict())
    per_group = copy.deepcopy(per_parameter)
    per_group["param_groups"][0]["step"] = 3
    for state in per_group["state"].values():
        del state["step"]
    train(reference, theirs, 3, 5)
    weights = parameters((16, 4), (16,))
    twin = torch.optim.AdamW(weights, lr=0.1, betas=(0.8, 0.9), weight_decay=0.2, fused=True)
    train(twin, weights, 0, 3)
    for saved in (per_parameter, per_group):
        for own, weight in zip(ours, weights, strict=True):
            own.data.copy_(weight.data)
        optimizer = FusedAdam(ours)
        optimizer.load_state_dict(saved)
        assert "step" not in optimizer.param_groups[0]
        train(optimizer, ours, 3, 5)
        assert all(torch.equal(own, their) for own, their in zip(ours, theirs, strict=True))


def test_a_state_dict_from_before_the_first_step_starts_anew():
    owned, others = (parameters((4,), dtype=BF16) for _ in range(2))
    optimizer = FusedAdam(owned, master_weights=True, exp_avg_dtype=F8)
    train(optimizer, owned, 0, 2)
    optimizer.load_state_dict(FusedAdam(others, master_weights=True, exp_avg_dtype=F8).state_dict())
    state = optimizer.state[owned[0]]
    assert state["step"] == 0
    assert (state["exp_avg"].float() == 0).all()
    assert torch.equal(state["master_param"], owned[0].detach().float())


def _saved_and_loaded(pair: Any) -> Any:
    stream = io.BytesIO()
    torch.save(pair, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=False)


@pytest.mark.parametrize("options", ALL_OPTIONS, ids=str)
@pytest.mark.parametrize("copied_by", [copy.deepcopy, _saved_and_loaded])
def test_a_copy_continues_as_the_original_does_and_leaves_it_alone(copied_by, options):
    owned = parameters((5, 7), (9,), dtype=BF16)
    optimizer = FusedAdam([{"params": owned[:1], "lr": 0.1}, {"params": owned[1:]}], **options)
    train(optimizer, owned, 0, 2)
    before = snapshot(optimizer)
    copied_owned, copied = copied_by((owned, optimizer))
    assert copied.param_groups[0]["params"][0] is copied_owned[0], "they stay a pair"
    assert snapshot(copied) == before
    train(copied, list(copied_owned), 2, 4)
    assert snapshot(optimizer) == before
    train(optimizer, owned, 2, 4)
    assert snapshot(copied)[0] == snapshot(optimizer)[0]
    assert plain(copied.state_dict()["state"]) == plain(optimizer.state_dict()["state"])
    assert snapshot(optimizer) != before


def test_a_copy_from_before_the_first_step_has_all_settings_of_its_own():
    (own,) = parameters((4,))
    optimizer = copy.deepcopy(
        FusedAdam([own], adam_w_mode=False, set_grad_none=False, use_decoupled_grad=True)
    )
    (copied,) = optimizer.param_groups[0]["params"]
    copied.decoupled_grad = torch.ones(4)
    optimizer.step()
    assert not torch.equal(copied, own)
    optimizer.zero_grad()
    assert torch.equal(copied.decoupled_grad, torch.zeros(4))
    assert not optimizer.adam_w_mode


def test_hooks_of_state_dicts_see_values_and_may_change_them():
    owned = parameters((4,))
    optimizer = FusedAdam(owned, exp_avg_dtype=F8)
    train(optimizer, owned, 0, 1)
    seen: list[str] = []

    def after_saving(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(state_dict["state"][0]["exp_avg"].dtype))
        return {**state_dict, "extra": 1}

    def before_loading(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        seen.append(str(state_dict.pop("extra")))
        return {**state_dict, "state": {}}

    optimizer.register_state_dict_post_hook(after_saving)
    optimizer.register_load_state_dict_pre_hook(before_loading)
    optimizer.register_load_state_dict_post_hook(lambda _: seen.append("loaded"))
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    assert seen == ["torch.float32", "1", "loaded"]
    assert saved["extra"] == 1
    assert optimizer.state[owned[0]]["step"] == 0


def test_init_state_allocates_and_does_not_step():
    owned = parameters((16, 4), (16,))
    optimizer = FusedAdam(owned)
    optimizer.init_state()
    tensors = [tensor for state in optimizer.state.values() for tensor in state.values()]
    assert len(tensors) == 6
    assert all((tensor == 0).all() for tensor in tensors)
    others = parameters((16, 4), (16,))
    train(optimizer, owned, 0, 2)
    train(FusedAdam(others), others, 0, 2)
    assert all(torch.equal(own, other) for own, other in zip(owned, others, strict=True))
    assert tensors == [tensor for state in optimizer.state.values() for tensor in state.values()]
