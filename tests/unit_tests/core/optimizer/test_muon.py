from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist

from megatron.core import products
from megatron.core.optimizer import matrix_pass
from megatron.core.optimizer.kernels.newton_schulz import MuonStep
from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import SGD, Adam, Muon

BF16, F32 = torch.bfloat16, torch.float32
MATRICES = ((64, 64), (32, 128), (128, 48), (1, 64), (64, 1))
OTHERS = ((128,), (96, 32))
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def parameters(shapes: tuple[tuple[int, ...], ...], dtype: torch.dtype = F32) -> list[Any]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.nn.Parameter(torch.randn(shape, generator=generator).mul_(0.1).to(dtype))
        for shape in shapes
    ]


def give_gradients(own: list[Any], number: int, factor: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(100 + number)
    for parameter in own:
        values = torch.randn(parameter.shape, generator=generator)
        parameter.grad = (values * factor).to(parameter.dtype)


def groups_of(matrices: list[Any], others: list[Any], **options: Any) -> list[dict[str, Any]]:
    return [
        {"params": matrices, **options},
        {"params": others, "use_muon": False, "weight_decay": 0.2},
    ]


def relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    difference = (found.detach() - expected.detach()).norm()
    return float(difference / expected.detach().norm())


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("scale_mode", ["match_rms_adamw", "original"])
@pytest.mark.parametrize("factor", [1.0, 0.25])
def test_fifty_steps_match_torch_muon_and_adamw(monkeypatch, nesterov, scale_mode, factor):
    """`factor` is the clipping factor, which the step applies to the gradients."""
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    matrices, others = parameters(MATRICES), parameters(OTHERS)
    their_matrices, their_others = parameters(MATRICES), parameters(OTHERS)
    options = groups_of(matrices, others, nesterov=nesterov, scale_mode=scale_mode)
    ours = RuleOptimizer(options, Muon(), **OPTIONS)
    muon = torch.optim.Muon(their_matrices, **OPTIONS, nesterov=nesterov, adjust_lr_fn=scale_mode)
    adamw = torch.optim.AdamW(their_others, lr=0.01, weight_decay=0.2)
    for number in range(50):
        give_gradients(matrices + others, number, 1 / factor)
        give_gradients(their_matrices + their_others, number)
        ours.step(grad_scale=factor)
        muon.step()
        adamw.step()
        for own, theirs in zip(matrices, their_matrices, strict=True):
            assert relative(own, theirs) < 1e-6, number
            buffer = muon.state[theirs]["momentum_buffer"]
            assert torch.equal(ours.state[own]["momentum_buffer"], buffer)
        for own, theirs in zip(others, their_others, strict=True):
            assert relative(own, theirs) < 1e-6, number
    assert {*ours.state[matrices[0]]} == {"step", "momentum_buffer"}
    assert {*ours.state[others[0]]} == {"step", "exp_avg", "exp_avg_sq"}
    assert ours.state[matrices[0]]["step"] == 50


@pytest.mark.parametrize("as_remainders", [False, True])
def test_bf16_weights_are_rounded_fp32_main_weights(monkeypatch, as_remainders):
    monkeypatch.setattr(products, "_SLOW_DTYPES", frozenset())
    own, other = parameters(MATRICES, BF16), parameters(MATRICES, BF16)
    wide = [torch.nn.Parameter(p.detach().float()) for p in other]
    ours = RuleOptimizer(
        own, Muon(), master_weights=True, store_param_remainders=as_remainders, **OPTIONS
    )
    theirs = torch.optim.Muon(wide, **OPTIONS, adjust_lr_fn="match_rms_adamw")
    for number in range(50):
        give_gradients(own, number)
        for narrow, main in zip(own, wide, strict=True):
            main.grad = narrow.grad.float()
        ours.step()
        theirs.step()
    for narrow, main in zip(own, wide, strict=True):
        master = ours.state[narrow]["master_param"]
        if not as_remainders:
            assert relative(master, main) < 1e-6
            assert torch.equal(narrow, master.to(BF16))
        assert relative(narrow.float(), main) < 2**-8


class Counter:
    """Replaces `orthogonalize` and records the shapes of its inputs."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.shapes: list[tuple[int, ...]] = []
        self._original = matrix_pass.orthogonalize
        monkeypatch.setattr(matrix_pass, "orthogonalize", self)

    def __call__(self, matrix: torch.Tensor, step: MuonStep) -> torch.Tensor:
        assert matrix.is_contiguous()
        assert matrix.dtype == BF16
        self.shapes.append(tuple(matrix.shape))
        return self._original(matrix, step)


def test_each_matrix_of_a_stack_is_orthogonalized_separately_once_per_step(monkeypatch):
    counter = Counter(monkeypatch)
    fused, single = parameters(((24, 16), (8, 16)))
    rows = (12, 8, 4)
    optimizer = RuleOptimizer(
        [{"params": [fused, single], "matrix_rows": [rows, (8,)]}], Muon(), **OPTIONS
    )
    apart = [torch.nn.Parameter(part.clone()) for part in fused.detach().split(rows)]
    separate = RuleOptimizer(apart, Muon(), **OPTIONS)
    unsplit = [torch.nn.Parameter(fused.detach().clone())]
    whole = RuleOptimizer(unsplit, Muon(), **OPTIONS)
    for number in range(3):
        counter.shapes.clear()
        give_gradients([fused, single], number)
        for part, gradient in zip(apart, fused.grad.split(rows), strict=True):
            part.grad = gradient
        unsplit[0].grad = fused.grad.clone()
        optimizer.step()
        assert sorted(counter.shapes) == [(4, 16), (8, 16), (8, 16), (12, 16)]
        separate.step()
        whole.step()
    assert torch.equal(fused, torch.cat(apart))
    assert relative(unsplit[0], fused) > 1e-3, "the result differs from an unsplit weight's"


def test_the_step_does_not_depend_on_strides():
    (plain,) = parameters(((24, 16),))
    turned = torch.nn.Parameter(plain.detach().T.contiguous().T)
    assert not turned.is_contiguous()
    for each in (plain, turned):
        optimizer = RuleOptimizer([each], Muon(torch.bfloat16), **OPTIONS)
        for number in range(3):
            give_gradients([each], number)
            optimizer.step()
    assert torch.equal(plain, turned)


def test_parameters_without_a_gradient_and_frozen_parameters_are_not_stepped(monkeypatch):
    counter = Counter(monkeypatch)
    matrices = parameters(MATRICES)
    matrices[0].requires_grad_(False)
    optimizer = RuleOptimizer(matrices, Muon(), **OPTIONS)
    before = [parameter.detach().clone() for parameter in matrices]
    give_gradients(matrices[2:], 0)
    optimizer.step()
    assert sorted(counter.shapes) == sorted(MATRICES[2:])
    for index, (old, new) in enumerate(zip(before, matrices, strict=True)):
        assert torch.equal(old, new) == (index < 2)
    assert optimizer.state[matrices[0]] == {}
    assert optimizer.state[matrices[1]]["step"] == 0

    # The next step has gradients of other parameters.
    counter.shapes.clear()
    optimizer.zero_grad()
    give_gradients(matrices[1:3], 1)
    optimizer.step()
    assert sorted(counter.shapes) == sorted(MATRICES[1:3])
    assert [int(optimizer.state[p]["step"]) for p in matrices[1:]] == [1, 2, 1, 1]


def test_parameters_replaced_in_the_groups_use_the_rule_of_their_group():
    """Programs that shard a model after building its optimizer replace parameters this way."""
    runs = []
    for are_put_later in (False, True):
        matrices, others = parameters(MATRICES), parameters(OTHERS)
        given = (parameters(MATRICES), parameters(OTHERS)) if are_put_later else (matrices, others)
        optimizer = RuleOptimizer(groups_of(*given), Muon(), **OPTIONS)
        optimizer.param_groups[0]["params"] = matrices
        optimizer.param_groups[1]["params"] = others
        give_gradients(matrices + others, 0)
        optimizer.step()
        assert {*optimizer.state[others[0]]} == {"step", "exp_avg", "exp_avg_sq"}
        runs.append(matrices + others)
    assert all(map(torch.equal, *runs))


def test_states_load_for_replaced_parameters_and_the_previous_ones_are_freed():
    saved = RuleOptimizer(groups_of(parameters(MATRICES), parameters(OTHERS)), Muon(), **OPTIONS)
    saved.init_state()
    state_dict = saved.state_dict()
    matrices, others = parameters(MATRICES), parameters(OTHERS)
    for change in ("load_state_dict", "set_scaled_state", "initialize_state"):
        before, also = parameters(MATRICES), parameters(OTHERS)
        optimizer = RuleOptimizer(groups_of(before, also), Muon(), **OPTIONS)
        optimizer.param_groups[0]["params"] = matrices
        optimizer.param_groups[1]["params"] = others
        if change == "load_state_dict":
            optimizer.load_state_dict(state_dict)
        elif change == "set_scaled_state":
            optimizer.set_scaled_state(others[0], "exp_avg_sq", torch.ones_like(others[0]))
        else:
            optimizer.initialize_state(others[0])
        assert {*optimizer.state[others[0]]} == {"step", "exp_avg", "exp_avg_sq"}, change
        freed = [weakref.ref(parameter) for parameter in before + also]
        del before, also
        gc.collect()
        assert [reference() for reference in freed] == [None] * len(freed), change


def test_changing_the_rule_of_a_group_after_a_step_raises():
    (matrix,) = parameters(((8, 4),))
    optimizer = RuleOptimizer([matrix], Muon(), **OPTIONS)
    give_gradients([matrix], 0)
    optimizer.step()
    optimizer.param_groups[0]["use_muon"] = False
    before = matrix.detach().clone()
    with pytest.raises(ValueError, match="exp_avg"):
        optimizer.step()
    assert torch.equal(matrix, before)


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_non_finite_gradient_affects_its_matrix_only(value):
    first, second = parameters(((8, 8), (8, 8)))
    give_gradients([first, second], 0)
    first.grad[3, 3] = value
    RuleOptimizer([first, second], Muon(), **OPTIONS).step()
    assert not first.isfinite().any()
    assert second.isfinite().all()


def test_a_planned_step_is_used_and_replanned_if_options_changed():
    own, other = parameters(MATRICES), parameters(MATRICES)
    ours, theirs = (RuleOptimizer(each, Muon(), **OPTIONS) for each in (own, other))
    for number in range(3):
        give_gradients(own, number)
        give_gradients(other, number)
        planned = ours.plan_step()
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["momentum"] = 0.9 if number == 1 else 0.95
        ours.step(grad_scale=0.5, planned=planned)
        theirs.step(grad_scale=0.5)
    assert all(map(torch.equal, own, other))


def test_buffers_and_gradients_are_freed_after_the_step():
    own = parameters(MATRICES)
    optimizer = RuleOptimizer(own, Muon(), **OPTIONS)
    give_gradients(own, 0)
    planned = optimizer.plan_step()
    kept = [weakref.ref(batch.buffer) for batch in planned.matrices]
    kept += [weakref.ref(parameter.grad) for parameter in own]
    optimizer.step(planned=planned)
    optimizer.zero_grad()
    del planned
    gc.collect()
    assert [reference() for reference in kept] == [None] * len(kept)
    assert len(kept) > len(own)


class Exchanged:
    def wait(self) -> None:
        pass


def test_the_send_buffer_of_an_exchange_is_kept_until_it_is_done(monkeypatch):
    monkeypatch.setattr(dist, "all_to_all_single", lambda *_, **__: Exchanged())
    sent, received = torch.ones(4), torch.ones(4)
    wait = matrix_pass._exchange(sent, received, [4], [4], None)
    reference = weakref.ref(sent)
    del sent
    gc.collect()
    assert reference() is not None
    assert wait() is received
    del wait
    gc.collect()
    assert reference() is None


def test_states_load_by_the_rule_of_their_group():
    matrices, others = parameters(MATRICES), parameters(OTHERS)
    ours = RuleOptimizer(groups_of(matrices, others), Muon(), **OPTIONS)
    give_gradients(matrices + others, 0)
    ours.step()
    saved = copy.deepcopy(ours.state_dict())

    fresh = RuleOptimizer(groups_of(matrices, others), Muon(), lr=1.0)
    fresh.load_state_dict(saved)
    assert fresh.param_groups[0]["lr"] == 0.01
    for parameter in matrices + others:
        assert fresh.state[parameter].keys() == ours.state[parameter].keys()
        for name, state in ours.state[parameter].items():
            assert torch.equal(fresh.state[parameter][name], state)

    swapped = RuleOptimizer(groups_of(matrices, others[1:] + others[:1]), Muon())
    saved["param_groups"][1]["use_muon"] = True
    for optimizer in (fresh, swapped):
        with pytest.raises(ValueError, match=r"exp_avg|adam"):
            optimizer.load_state_dict(saved)


def test_loading_options_of_torch_muon_with_other_names_raises():
    theirs = torch.optim.Muon(parameters(MATRICES))
    ours = RuleOptimizer(parameters(MATRICES), Muon())
    with pytest.raises(ValueError, match="ns_coefficients"):
        ours.load_state_dict(theirs.state_dict())
    state = theirs.state_dict()
    for name in ("ns_coefficients", "adjust_lr_fn"):
        del state["param_groups"][0][name]
    ours.load_state_dict(state)


def test_a_deepcopy_of_the_optimizer_takes_the_same_step():
    matrices, others = parameters(MATRICES), parameters(OTHERS)
    optimizer = RuleOptimizer(groups_of(matrices, others), Muon(), **OPTIONS)
    give_gradients(matrices + others, 0)
    optimizer.step()
    copied = copy.deepcopy(optimizer)
    copies = [p for group in copied.param_groups for p in group["params"]]
    for own, each in ((matrices + others, optimizer), (copies, copied)):
        give_gradients(own, 1)
        each.step()
    assert all(map(torch.equal, matrices + others, copies))


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"momentum": 1.0}, ValueError, "momentum"),
        ({"ns_steps": 0}, ValueError, "ns_steps"),
        ({"scale_mode": "muon"}, ValueError, "muon"),
        ({"coefficient_type": "cubic"}, ValueError, "cubic"),
        ({"extra_scale_factor": -1.0}, ValueError, "extra_scale_factor"),
        ({"adjust_lr_fn": "original"}, TypeError, "adjust_lr_fn"),
    ],
    ids=str,
)
def test_invalid_options_of_muon_are_rejected(options, error, message):
    with pytest.raises(error, match=message):
        RuleOptimizer(parameters(MATRICES), Muon(), **options)


@pytest.mark.parametrize(
    ("shapes", "rows", "message"),
    [
        (((8,),), None, "use_muon=False"),
        (((4, 2, 2),), None, "use_muon=False"),
        (((8, 4),), [(4, 3)], "8 rows"),
        (((8, 4),), [(8, 0)], "8 rows"),
        (((8, 4),), [(8,), (8,)], "1 parameters"),
    ],
)
def test_a_group_of_muon_without_matrices_is_rejected(shapes, rows, message):
    group = {"params": parameters(shapes), **({} if rows is None else {"matrix_rows": rows})}
    with pytest.raises(ValueError, match=message):
        RuleOptimizer([group], Muon())
    optimizer = RuleOptimizer(parameters(MATRICES), Muon())
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


def test_state_dtypes_with_a_scale_are_rejected():
    for dtype in (torch.float16, torch.float8_e4m3fn, torch.float64):
        with pytest.raises(NotImplementedError, match=str(dtype)):
            Muon(dtype)
    narrow = parameters(MATRICES, BF16)
    with pytest.raises(NotImplementedError, match="float16"):
        RuleOptimizer(narrow, Muon(), master_weights=True, master_weight_dtype=torch.float16)
    # States of AdamW's parameters may have a scale.
    rule = Muon(scalar=Adam(exp_avg_dtype=torch.float16))
    others = parameters(OTHERS)
    give_gradients(others, 0)
    optimizer = RuleOptimizer([{"params": others, "use_muon": False}], rule)
    optimizer.step()
    assert optimizer.state[others[0]]["exp_avg"].dtype == torch.float16
    assert SGD().part_for({}) == SGD()
