from __future__ import annotations

import dataclasses
import gc
import itertools
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.optimizer.kernels import host_adam, torch_adam
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam, available_bodies, shared_host_adam
from megatron.core.optimizer.kernels.piece import Piece, merged
from tests.unit_tests.core.optimizer.helpers.pieces import adam_piece

FP32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
FLOATS = [FP32, BF16, FP16]
BODIES = available_bodies()  # "torch" is among them
SPLIT = "split"  # a bf16 weight and a remainder
OVER = "over"  # an out over the gradient
STEPS = {
    "AdamW": AdamStep(3, lr=1e-2, weight_decay=0.1),
    "scaled": AdamStep(2, lr=1e-2, weight_decay=0.1),
    "L2": AdamStep(3, lr=1e-2, weight_decay=0.1, adam_w_mode=False),
    "low beta1": AdamStep(3, lr=1e-2, beta1=0.3),
    "no bias correction": AdamStep(1, lr=1e-2, bias_correction=False),
}


GRAD_SCALES = {STEPS["scaled"]: 0.37}  # of the others: 1


@pytest.fixture(scope="module")
def kernels() -> dict[str, HostAdam]:
    """One of each body."""
    return {body: HostAdam(2, body=body) for body in BODIES}


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """To compare zeros by sign; all NaNs are one."""
    if not tensor.is_floating_point():
        return tensor
    plain = torch.where(tensor.isnan(), torch.nan, tensor)
    return plain.view(torch.int32 if tensor.element_size() == 4 else torch.int16)


def differing(piece: Piece, other: Piece) -> dict[str, int]:
    """How many elements of each array differ, where any does."""
    others = other.arrays()
    counts = {
        name: int((bits(tensor) != bits(others[name])).sum())
        for name, tensor in piece.arrays().items()
    }
    return {name: count for name, count in counts.items() if count}


def copied(piece: Piece) -> Piece:
    """A copy in separate memory; an out over the gradient stays one."""
    copy = piece.mapped(torch.clone)
    if piece.out is not None and piece.out.data_ptr() == piece.grad.data_ptr():
        return copy._replace(out=copy.grad.view(piece.out.dtype))
    return copy


def split(full: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(bf16 weight, remainder) whose sum of bits is that of the fp32 values; written apart from the
    code under test.
    """
    integers = full.view(torch.int32).long() & 0xFFFFFFFF
    remainder = integers & 0xFFFF
    remainder = torch.where(remainder >= 0x8000, remainder - 0x10000, remainder)
    high = (integers - remainder) >> 16 & 0xFFFF
    high = torch.where(high >= 0x8000, high - 0x10000, high)
    return high.to(torch.int16).view(BF16), remainder.to(torch.int16)


def joined(weight: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 values of `split`."""
    integers = (weight.view(torch.int16).long() * 0x10000 + remainder.long()) & 0xFFFFFFFF
    return (
        torch.where(integers >= 1 << 31, integers - (1 << 32), integers).to(torch.int32).view(FP32)
    )


def piece_of(numel, step, *, grad=BF16, weight=FP32, moment=FP32, out=None, seed=0) -> Piece:
    """Random arrays with every kind of number in them: tiny, subnormal, huge, infinite, NaN."""
    generator = torch.Generator().manual_seed(seed)

    def values(scale: float) -> torch.Tensor:
        exponents = torch.randint(-3, 1, (numel,), generator=generator)
        made = torch.randn(numel, generator=generator) * scale * 10.0**exponents
        for place, special in enumerate(
            [0.0, -0.0, 1e-40, 3e-45, 1e30, 6e-8, torch.inf, -torch.inf, torch.nan]
        ):
            made[17 * place + 5 :: 211] = special
        return made

    gradient = values(1.0).to(grad)
    full = values(2.0)
    remainder = None
    weights = full.to(weight) if weight != SPLIT else None
    if weights is None:
        weights, remainder = split(torch.where(full.isnan(), torch.nan, full))
    outs = gradient if out == OVER else None if out is None else torch.zeros(numel, dtype=out)
    first, second = values(0.1).to(moment), values(0.01).abs().to(moment)
    return adam_piece(step, gradient, weights, first, second, remainder, outs)


ALL_FORMS = list(itertools.product(FLOATS, [*FLOATS, SPLIT], [FP32, BF16], [None, *FLOATS, OVER]))


@pytest.mark.parametrize("step", STEPS.values(), ids=STEPS.keys())
def test_every_body_gives_the_same_bits_in_every_combination_of_dtypes(kernels, step):
    for grad, weight, moment, out in ALL_FORMS:
        before = piece_of(403, step, grad=grad, weight=weight, moment=moment, out=out)
        expected, grad_scale = copied(before), GRAD_SCALES.get(step, 1.0)
        kernels["torch"].run([expected], grad_scale)
        assert differing(before, expected).keys() >= {"weight", "exp_avg", "exp_avg_sq"}
        for body in BODIES:
            piece = copied(before)
            kernels[body].run([piece], grad_scale)
            assert differing(piece, expected) == {}, (body, grad, weight, moment, out)


@pytest.mark.parametrize("body", BODIES)
@pytest.mark.parametrize(
    "settings_of_step",
    [
        {"weight_decay": 0.1},
        {"weight_decay": 0.1, "adam_w_mode": False},
        {"beta1": 0.95, "beta2": 0.95, "eps": 1e-6},
        {"beta1": 0.4},
        {"beta1": 0.0},
    ],
    ids=str,
)
def test_many_steps_are_bit_equal_to_torchs_fused_optimizer(body, settings_of_step):
    generator = torch.Generator().manual_seed(0)
    kernel = HostAdam(2, body=body)
    numel = 1024  # whole vectors: torch rounds a shorter tail differently
    weight = torch.randn(numel, generator=generator)
    piece = adam_piece(
        AdamStep(1, lr=1e-2, **settings_of_step),
        torch.zeros(numel, dtype=BF16),
        weight,
        torch.zeros(numel),
        torch.zeros(numel),
        out=torch.zeros(numel, dtype=BF16),
    )
    step = piece.step
    expected = torch.nn.Parameter(weight.clone())
    kind = torch.optim.AdamW if step.adam_w_mode else torch.optim.Adam
    betas, decay = (step.beta1, step.beta2), step.weight_decay
    reference = kind([expected], betas=betas, eps=step.eps, weight_decay=decay, fused=True)
    for number in range(1, 41):
        piece.grad.copy_(torch.randn(numel, generator=generator) * 10.0 ** (number % 7 - 5))
        piece.grad[number::199] = 1e-39
        if number == 30:
            piece.grad[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
        step = dataclasses.replace(piece.step, step=number, lr=1e-2 / number)
        reference.param_groups[0]["lr"] = step.lr
        expected.grad = piece.grad.float()
        reference.step()
        kernel.run([piece._replace(step=step)])
    state = reference.state[expected]
    moments = {name: state[name] for name in ("exp_avg", "exp_avg_sq")}
    assert differing(piece, piece._replace(weight=expected.detach(), states=moments)) == {}
    assert torch.equal(bits(piece.out), bits(piece.weight.bfloat16()))
    assert piece.weight.isnan().sum() == 3


@pytest.mark.parametrize("body", BODIES)
def test_the_step_is_adam_as_its_paper_writes_it(body):
    """In fp64, which no code here shares."""
    generator = torch.Generator().manual_seed(0)
    weight, exp_avg = torch.randn(1000, generator=generator), torch.randn(1000, generator=generator)
    grad, exp_avg_sq = torch.randn(1000, generator=generator), torch.rand(1000, generator=generator)
    step = AdamStep(7, lr=1e-2, beta1=0.8, beta2=0.99, eps=1e-3, weight_decay=0.1)
    g, p, m, v = (tensor.double() for tensor in (grad * 0.5, weight, exp_avg, exp_avg_sq))
    m, v = 0.8 * m + 0.2 * g, 0.99 * v + 0.01 * g * g
    expected = p * (1 - 1e-3) - 1e-2 * (m / (1 - 0.8**7)) / ((v / (1 - 0.99**7)).sqrt() + 1e-3)
    HostAdam(1, body=body).run([adam_piece(step, grad, weight, exp_avg, exp_avg_sq)], 0.5)
    torch.testing.assert_close(weight.double(), expected, rtol=1e-6, atol=1e-7)


@settings(deadline=None, max_examples=30)
@given(
    numel=st.integers(0, 700),
    offset=st.integers(0, 70),
    form=st.sampled_from(ALL_FORMS),
    step=st.sampled_from(list(STEPS.values())),
    body=st.sampled_from(BODIES),
)
def test_an_element_does_not_depend_on_where_it_stands(kernels, numel, offset, form, step, body):
    grad, weight, moment, out = form
    whole = piece_of(offset + numel, step, grad=grad, weight=weight, moment=moment, out=out)
    part = copied(whole).part(offset, numel)
    grad_scale = GRAD_SCALES.get(step, 1.0)
    kernels["torch"].run([whole], grad_scale)
    kernels[body].run([part], grad_scale)
    assert differing(part, whole.part(offset, numel)) == {}


@settings(deadline=None, max_examples=30)
@given(cuts=st.lists(st.integers(0, 400), max_size=8), body=st.sampled_from(BODIES))
def test_pieces_and_what_they_merge_to_give_the_same_bits(kernels, cuts, body):
    whole = piece_of(400, STEPS["AdamW"], weight=SPLIT, out=OVER)
    edges = [0, *sorted(cuts), 400]
    apart, together = copied(whole), copied(whole)
    kernels[body].run(
        [apart.part(start, stop - start) for start, stop in itertools.pairwise(edges)]
    )
    joined_pieces = merged(
        together.part(start, stop - start) for start, stop in itertools.pairwise(edges)
    )
    kernels[body].run(joined_pieces)
    assert len(joined_pieces) == 1
    assert differing(apart, together) == {}
    assert differing(apart, whole)


@pytest.mark.parametrize("body", BODIES)
def test_a_weight_and_its_remainder_take_the_steps_of_a_fp32_weight(body):
    kernel = HostAdam(2, body=body)
    plain = piece_of(1000, STEPS["AdamW"], grad=FP32)
    weight, remainder = split(torch.where(plain.weight.isnan(), torch.nan, plain.weight))
    divided = copied(plain)._replace(
        weight=weight, remainder=remainder, out=torch.zeros(1000, dtype=BF16)
    )
    for number in range(1, 20):
        kernel.run([piece._replace(step=AdamStep(number, lr=1e-2)) for piece in (plain, divided)])
    assert torch.equal(bits(joined(divided.weight, divided.remainder)), bits(plain.weight))
    assert torch.equal(divided.out.view(torch.int16), divided.weight.view(torch.int16))
    rounded = plain.weight.bfloat16()
    ties = plain.weight.view(torch.int32) & 0xFFFF == 0x8000
    assert torch.equal(bits(divided.weight)[~ties], bits(rounded)[~ties])


@settings(deadline=None)
@given(number=st.integers(-(1 << 31), (1 << 31) - 1))
def test_every_weight_but_a_nan_survives_the_remainder_form_without_a_change(kernels, number):
    full = torch.tensor([number], dtype=torch.int32).view(FP32)
    weight, remainder = split(full)
    assert torch.equal(joined(weight, remainder).view(torch.int32), full.view(torch.int32))
    zeros = torch.zeros(1)
    for kernel in kernels.values():
        piece = adam_piece(
            AdamStep(1, lr=0.0),
            zeros,
            weight.clone(),
            zeros.clone(),
            zeros.clone(),
            remainder.clone(),
        )
        kernel.run([piece])
        kept = joined(piece.weight, piece.remainder)
        assert torch.equal(bits(kept), bits(full))
        assert bool(piece.weight.isnan()) == bool(full.isnan())


def test_rounding_to_sixteen_bits_is_torchs_for_every_exponent(kernels):
    """lr 0: out is the weight, rounded. The values are on, just below and just above every tie."""
    halves = torch.arange(1 << 16).to(torch.int32)
    weights = {
        BF16: torch.cat(
            [(halves << 16) + low for low in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)]
        ).view(FP32),
        FP16: torch.cat(
            [
                (halves.to(torch.int16).view(FP16).float().view(torch.int32)) + low
                for low in (-1, 0, 1, 0x1000, 0x1001)
            ]
        ).view(FP32),
    }
    for dtype, weight in weights.items():
        expected = weight.to(dtype)
        for body, kernel in kernels.items():
            out = torch.zeros_like(expected)
            zeros = [torch.zeros_like(weight) for _ in range(3)]
            kernel.run(
                [adam_piece(AdamStep(1, lr=0.0), zeros[0], weight.clone(), *zeros[1:], out=out)]
            )
            assert torch.equal(bits(out), bits(expected)), (body, dtype)


def test_every_half_is_read_as_torch_reads_it(kernels):
    """Moments of zero and beta1 0: exp_avg becomes the gradient."""
    halves = torch.arange(1 << 16).to(torch.int32).to(torch.int16)
    for dtype, (body, kernel) in itertools.product([BF16, FP16], kernels.items()):
        grad = halves.view(dtype)
        grad = grad[~grad.isinf()]
        weight, exp_avg, exp_avg_sq = (torch.zeros(grad.numel()) for _ in range(3))
        kernel.run([adam_piece(AdamStep(1, lr=0.0, beta1=0.0), grad, weight, exp_avg, exp_avg_sq)])
        assert torch.equal(bits(exp_avg), bits(grad.float())), (body, dtype)


@pytest.mark.parametrize("body", BODIES)
def test_the_number_of_threads_changes_no_bit(body):
    step = STEPS["AdamW"]
    results = []
    for num_threads in (1, 2, 3):
        kernel = HostAdam(num_threads, body=body)
        assert kernel.num_threads == num_threads
        pieces = [piece_of(numel, step, out=BF16, seed=numel) for numel in (0, 1, 300_001, 17)]
        kernel.run(pieces)
        results.append((pieces, kernel.squared_norm(pieces[2].weight.nan_to_num(0, 1, 1))))
    (first, norm), *others = results
    for pieces, other_norm in others:
        assert all(
            differing(piece, other) == {} for piece, other in zip(first, pieces, strict=True)
        )
        assert torch.equal(norm, other_norm)


@pytest.mark.parametrize("body", BODIES)
def test_several_python_threads_share_one_pool(body):
    kernel = HostAdam(2, body=body)
    before = [piece_of(40_000 + 997 * i, STEPS["AdamW"], out=BF16, seed=i) for i in range(6)]
    alone, at_once = [copied(piece) for piece in before], [copied(piece) for piece in before]
    for _ in range(2):
        kernel.run(alone)
    threads = [
        threading.Thread(target=lambda p=piece: [kernel.run([p]) for _ in range(2)])
        for piece in at_once
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(differing(piece, other) == {} for piece, other in zip(alone, at_once, strict=True))


def test_a_ticket_may_be_waited_for_twice_and_one_that_is_dropped_has_finished():
    kernel = HostAdam(1)
    waited, dropped, expected = (piece_of(1_000_000, STEPS["AdamW"]) for _ in range(3))
    kernel.run([expected])
    ticket = kernel.submit([waited])
    ticket.wait()
    ticket.wait()
    assert differing(waited, expected) == {}
    kernel.submit([dropped])
    gc.collect()
    assert differing(dropped, expected) == {}


def test_a_pool_is_closed_while_its_work_is_still_waited_for():
    expected, piece = (piece_of(1_000_000, STEPS["AdamW"]) for _ in range(2))
    HostAdam(1).run([expected])
    ticket = HostAdam(2).submit([piece])
    gc.collect()
    ticket.wait()
    assert differing(piece, expected) == {}


def test_a_forked_child_is_rejected_and_its_parent_continues():
    kernel = HostAdam(2)
    kernel.run([piece_of(1000, STEPS["AdamW"])])
    child = os.fork()
    if child == 0:
        try:
            kernel.squared_norm(torch.ones(1))
        except RuntimeError as error:
            del kernel
            os._exit(0 if "Expected process" in str(error) else 1)
        os._exit(2)
    assert os.waitpid(child, 0)[1] == 0
    assert float(kernel.squared_norm(torch.ones(3))) == 3.0


def test_the_interpreter_ends_with_pools_and_tickets_open():
    code = (
        "import torch\n"
        "from megatron.core.optimizer.kernels.adam import AdamStep\n"
        "from megatron.core.optimizer.kernels.piece import Piece\n"
        "from megatron.core.optimizer.kernels.host_adam import HostAdam, shared_host_adam\n"
        "grad, weight, first, second = [torch.zeros(1_000_000) for _ in range(4)]\n"
        "states = {'exp_avg': first, 'exp_avg_sq': second}\n"
        "ticket = HostAdam(2).submit([Piece(AdamStep(1, lr=1.0), grad, weight, states)])\n"
        "print(float(shared_host_adam(0).squared_norm(torch.ones(4))))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=600, check=True
    )
    assert ended.stdout == "4.0\n"


def test_without_the_library_one_warning_is_given_and_torch_computes(monkeypatch, caplog, tmp_path):
    piece = piece_of(1003, STEPS["AdamW"], out=BF16)
    expected = copied(piece)
    HostAdam(1).run([expected])
    monkeypatch.setattr(host_adam, "LIBRARY", tmp_path / "libnone.so")
    with caplog.at_level(logging.WARNING):
        kernels = [HostAdam(2), HostAdam(2)]
    assert len(caplog.messages) == 1
    assert [kernel.body for kernel in kernels] == ["torch", "torch"]
    assert available_bodies() == ["torch"]
    kernels[0].run([piece])
    assert differing(piece, expected) == {}
    with pytest.raises(ValueError, match="baseline"):
        HostAdam(body="baseline")
    with pytest.raises(ValueError, match="at least one thread"):
        HostAdam(0)


def test_a_library_of_another_version_is_not_used(monkeypatch, caplog):
    if BODIES == ["torch"]:
        pytest.skip("the library was not built")
    host_adam._library.cache_clear()
    host_adam._warn_once.cache_clear()
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        patch.setattr(host_adam, "_VERSION", -1)
        assert HostAdam().body == "torch"
        assert len(caplog.messages) == 1
    host_adam._library.cache_clear()
    host_adam._warn_once.cache_clear()
    assert available_bodies() == BODIES


def test_the_library_is_built_where_there_is_a_compiler():
    """Were it not, the tests of this file would all pass on torch alone."""
    compiler = any(
        (Path(folder) / "c++").exists() for folder in os.environ["PATH"].split(os.pathsep)
    )
    assert ("baseline" in BODIES) == compiler


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("numel", [0, 1, 1023, 1024, 1025, 300_001])
def test_the_squared_norm_has_the_same_bits_everywhere_and_is_right(kernels, numel, dtype):
    tensor = (torch.randn(numel + 3, generator=torch.Generator().manual_seed(numel)) * 3).to(dtype)[
        3:
    ]
    expected = tensor.double().square().sum()
    results = {body: kernel.squared_norm(tensor) for body, kernel in kernels.items()}
    for body, result in results.items():
        assert result.dtype == torch.float64
        assert result.shape == ()
        assert torch.equal(result, results["torch"]), body
        torch.testing.assert_close(result, expected, rtol=1e-14, atol=0)


def test_the_squared_norm_follows_shape_not_memory_and_shows_a_nan(kernels):
    square = torch.arange(12.0).reshape(3, 4)
    for kernel in kernels.values():
        assert float(kernel.squared_norm(square.T)) == float(square.square().sum())
        assert kernel.squared_norm(torch.tensor([1.0, torch.nan])).isnan()
        assert kernel.squared_norm(torch.full((2,), 3e38)) == pytest.approx(1.8e77)
    assert torch_adam.squared_norm(torch.tensor(2.0)) == 4.0


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """Its bits, those of a NaN too."""
    return tensor.view({2: torch.int16, 4: torch.int32}[tensor.element_size()])


def with_undo(piece: Piece, offset: int = 0) -> Piece:
    """The piece with memory for old values, which starts `offset` elements into its storage."""
    kept = {"weight": piece.weight, **piece.states}
    return piece._replace(
        undo={
            n: torch.full((offset + a.numel(),), 7, dtype=a.dtype)[offset:] for n, a in kept.items()
        }
    )


@settings(deadline=None, max_examples=40)
@given(
    numel=st.integers(0, 700),
    offset=st.integers(0, 40),
    form=st.sampled_from([form for form in ALL_FORMS if form[1] != SPLIT]),
    step=st.sampled_from(list(STEPS.values())),
    body=st.sampled_from(BODIES),
)
def test_old_values_are_kept_and_restored_bit_by_bit_and_the_step_is_the_same(
    kernels, numel, offset, form, step, body
):
    grad, weight, moment, out = form
    before = piece_of(numel, step, grad=grad, weight=weight, moment=moment, out=out)
    expected, piece = copied(before), with_undo(copied(before), offset)
    kernels[body].run([expected])
    kernels[body].run([piece])
    assert differing(expected, piece) == {}
    piece.restore_old()
    for name, own in {"weight": piece.weight, **piece.states}.items():
        assert torch.equal(raw(own), raw(before.arrays()[name])), name


@pytest.mark.parametrize("body", BODIES)
def test_threads_keep_the_old_values_of_long_pieces(body):
    pieces = [
        with_undo(piece_of(numel, STEPS["AdamW"], out=BF16)) for numel in (300_001, 5, 64_000)
    ]
    before = [copied(piece) for piece in pieces]
    HostAdam(3, body=body).run(pieces)
    for piece, old in zip(pieces, before, strict=True):
        assert differing(piece, old).keys() >= {"weight", "exp_avg", "exp_avg_sq"}
        assert torch.equal(raw(piece.undo["weight"]), raw(old.weight))
        for name, state in old.states.items():
            assert torch.equal(raw(piece.undo[name]), raw(state))


def test_pieces_with_old_values_join_where_those_are_adjacent_too():
    whole = with_undo(piece_of(400, STEPS["AdamW"]))
    parts = [whole.part(0, 150), whole.part(150, 250)]
    (joined_piece,) = merged(parts)
    assert joined_piece.undo["exp_avg"].numel() == 400
    apart = parts[1]._replace(undo={n: kept.clone() for n, kept in parts[1].undo.items()})
    assert len(merged([parts[0], apart])) == 2


@pytest.mark.parametrize("body", BODIES)
def test_what_cannot_be_carried_out_is_rejected(body):
    kernel = HostAdam(1, body=body)
    piece = piece_of(8, STEPS["AdamW"])
    with pytest.raises(ValueError, match="Expected grad of 8 elements"):
        kernel.run([piece._replace(grad=torch.zeros(7))])
    with pytest.raises(ValueError, match="Expected undo of"):
        kernel.run([piece._replace(undo={"weight": torch.zeros(8)})])
    with pytest.raises(ValueError, match="without a remainder"):
        kernel.run([with_undo(piece_of(8, STEPS["AdamW"], weight=SPLIT))])
    elsewhere = piece.mapped(lambda array: array.to("meta"))
    with pytest.raises(ValueError, match="Expected tensors on the CPU, got meta"):
        kernel.run([elsewhere])
    with pytest.raises(ValueError, match=r"Expected a CPU tensor of .*, got torch.int64 on cpu"):
        kernel.squared_norm(torch.zeros(3, dtype=torch.int64))


def test_by_default_the_ranks_of_a_machine_share_its_cores(monkeypatch):
    cores = len(os.sched_getaffinity(0))
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    assert HostAdam().num_threads == cores
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(4 * cores))
    assert HostAdam().num_threads == 1
    assert shared_host_adam(os.getpid()) is shared_host_adam(os.getpid())
