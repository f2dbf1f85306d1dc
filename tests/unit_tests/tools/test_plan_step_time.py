"""The time of a step, from its computation and its transfers."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import gpu_step, offload_model
from benchmarks.helpers.divided_layers import take_parts
from megatron.core.distributed import context, tensor
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.gpt_model import GPTModel, Places
from megatron.core.optimizer.config import OptimizerConfig, Overlap
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron_hybrid.plan.step_time import GroupWork, Machine, StepTime, Work, step_time
from megatron_hybrid.plan.workload import (
    exchanged_by,
    flops_of_microbatch,
    sent_by_layer,
    work_of,
)
from tests.helpers.doc_commands import DOCS
from tests.helpers.ranks import run_ranks

MACHINE = Machine(flops=100.0, device_bytes=1000.0, link_bytes=10.0, host_bytes=50.0)
TOTALS = ("host_pass", "down", "up", "states", "early_pass")


def work(num_groups: int = 1, **fields: Any) -> Work:
    """Work of equal groups: a forward of 1 s and a backward of 2 s, four times.

    Args:
        fields: of all groups together, of each group for collectives, or of `Work`.
    """
    own = {name: fields.pop(name) for name in (*fields,) if name in GroupWork.__annotations__}
    each = {name: value / num_groups if name in TOTALS else value for name, value in own.items()}
    group = GroupWork(100.0 / num_groups, 200.0 / num_groups, **each)
    return replace(Work((group,) * num_groups, 4), **fields)


def exposed(found: StepTime) -> tuple[float, float]:
    """Waits for the host and for the link, to a millionth."""
    return round(found.parts["host pass"], 6), round(found.parts["link"], 6)


@pytest.mark.parametrize("num_groups", [1, 4, 100])
def test_each_group_of_the_first_forward_waits_for_the_hosts_pass_over_it(num_groups):
    # A forward takes a second, and there are four of them. The first group is not hidden.
    one = 1 / num_groups
    assert exposed(step_time(work(num_groups, host_pass=50.0), MACHINE)) == (round(one, 6), 0.0)
    long = work(num_groups, host_pass=150.0)
    assert exposed(step_time(long, MACHINE)) == (round(2.0 + one, 6), 0.0)
    more = step_time(replace(long, num_microbatches=8), MACHINE)
    assert exposed(more) == (round(2.0 + one, 6), 0.0), "more microbatches hide no more"


def test_groups_behind_those_on_the_device_are_hidden():
    on_device, on_host = GroupWork(50.0, 100.0), GroupWork(50.0, 100.0, host_pass=25.0)
    hidden = step_time(Work((on_device, on_host), 1), MACHINE)
    assert (hidden.seconds, hidden.hides_offloading) == (3.0, True)
    longer = replace(on_host, host_pass=26.0)
    assert not step_time(Work((on_device, longer), 1), MACHINE).hides_offloading


def test_states_that_the_device_updates_relieve_the_host_and_load_the_link():
    # The host's pass takes 6 s, of which the first forward hides one; the states 4 s each way.
    many = work(100, host_pass=300.0, up=10.0, states=40.0)
    alone, half, whole = (
        step_time(replace(many, update_on_device=share), MACHINE) for share in (0.0, 0.5, 1.0)
    )
    close = partial(pytest.approx, abs=0.1)
    assert exposed(alone) == (close(5.0), close(0.0))
    # Half of the weights go up on the same link.
    assert sum(exposed(half)) == close(2.0)
    assert exposed(whole) == (0.0, close(3.0))
    best = step_time(replace(many, update_on_device=None), MACHINE)
    assert best.seconds < min(one.seconds for one in (alone, half, whole))
    assert best.update_on_device == pytest.approx(5 / 9, abs=1 / 16)


def test_a_share_without_a_gain_is_not_streamed():
    hidden = work(100, host_pass=40.0, up=4.0, states=20.0, update_on_device=None)
    assert step_time(hidden, replace(MACHINE, link_bytes=1.0)).update_on_device == 0.0
    on_host = replace(MACHINE, device_is_host=True)
    assert step_time(replace(hidden, num_microbatches=1), on_host).update_on_device == 0.0


def test_a_third_chunk_waits_for_the_slot_of_the_first():
    # Up 1 s, down 1 s: the third goes up once the first is down, and the fourth right behind it.
    machine = replace(MACHINE, device_bytes=math.inf)
    chunks = [work(states=10.0 * n, chunks=n, update_on_device=1.0) for n in (1, 2, 3, 4)]
    found = [exposed(step_time(one, machine))[1] for one in chunks]
    assert found == [1.0, 2.0, 3.0, 4.0]
    slow_down = replace(machine, memory_bytes=10.0)  # one way at a time
    found = [exposed(step_time(one, slow_down))[1] for one in chunks]
    assert found == [1.0, 3.0, 5.0, 7.0]


def test_passes_and_copies_share_the_hosts_memory():
    many = work(100, host_pass=300.0, states=60.0, update_on_device=0.5)
    close = partial(pytest.approx, abs=0.1)
    assert sum(exposed(step_time(many, MACHINE))) == close(2.0)
    # In all 150 of the host and 60 of the states, which take 21 s and not 3.
    slow = replace(MACHINE, memory_bytes=10.0)
    assert sum(exposed(step_time(many, slow))) == close(20.0)


def test_early_updates_use_the_last_backward_and_leave_less_for_the_forward():
    # A pass of 4 s: half of it in the last backward. Then the last half of the forward does not
    # wait.
    plain = work(100, host_pass=200.0)
    late = step_time(plain, MACHINE)
    half = [replace(g, early_pass=g.host_pass) for g in plain.groups[50:]]
    early = step_time(replace(plain, groups=(*plain.groups[:50], *half)), MACHINE)
    close = partial(pytest.approx, abs=0.1)
    assert (exposed(late)[0], exposed(early)[0]) == (close(3.0), close(1.5))
    costly = step_time(work(100, host_pass=200.0, early_pass=400.0), MACHINE)
    assert exposed(costly)[0] == close(2.25), "updates that have not started are dropped"
    after_norm = replace(plain, overlap=Overlap.FORWARD)
    groups = tuple(replace(g, early_pass=g.host_pass) for g in plain.groups)
    assert exposed(step_time(replace(after_norm, groups=groups), MACHINE)) == exposed(late)


def test_gradients_hide_behind_the_last_backward_alone():
    # The first group's come last, behind no backward.
    many = work(100, host_pass=1e-9, down=20.0)
    assert exposed(step_time(many, MACHINE)) == (0.0, pytest.approx(0.02, abs=1e-3))
    assert exposed(step_time(work(100, host_pass=1e-9, down=50.0), MACHINE))[1] == pytest.approx(
        3.0, abs=0.05
    )
    assert step_time(work(10, host_pass=1e-9, down=500.0), MACHINE).bound == "link"


def test_weights_that_go_up_longer_than_the_pass_are_the_links():
    found = step_time(work(100, host_pass=50.0, up=200.0), MACHINE)
    assert exposed(found) == (pytest.approx(0.0, abs=0.1), pytest.approx(19.0, abs=0.1))


def test_activations_hide_behind_each_forward_and_each_backward():
    # A forward takes a second, a backward two, and there are four of each.
    found = [
        step_time(work(activations=nbytes), MACHINE).exposed_activations
        for nbytes in (0.0, 10.0, 15.0, 30.0)
    ]
    assert found == [0.0, 0.0, 4 * 0.5, 4 * (2.0 + 1.0)]
    found = step_time(work(activations=30.0), MACHINE)
    assert (found.forward, found.activations, found.parts["link"]) == (1.0, 3.0, 12.0)
    assert found.hides_offloading, "the optimizer does not wait for them"
    few = step_time(work(activations=30.0, hides_activations=True), MACHINE)
    assert few.exposed_activations == 0.0
    on_host = replace(MACHINE, device_is_host=True)
    assert step_time(work(activations=10.0), on_host).exposed_activations == 8.0


@pytest.mark.parametrize(
    ("overlap", "expected"),
    [
        (Overlap.ALL, 2.0),
        (Overlap.FORWARD, 2.0),
        (Overlap.FETCH, 3.0),
        (Overlap.TRANSFERS, 3.0),
        (Overlap.NONE, 5.0),
    ],
)
def test_each_overlap_hides_its_own_part(overlap, expected):
    # Three seconds of the host, one of gradients and one of weights.
    many = work(1000, host_pass=150.0, down=10.0, up=10.0, overlap=overlap)
    assert sum(exposed(step_time(many, MACHINE))) == pytest.approx(expected, abs=0.02)


def test_gradients_that_are_not_fetched_in_backward_go_down_before_the_pass():
    few = work(2, host_pass=10.0, down=100.0)
    in_backward, in_step = (
        step_time(replace(few, overlap=overlap), MACHINE).seconds
        for overlap in (Overlap.ALL, Overlap.FORWARD)
    )
    # The first five of ten seconds start after half of the last backward.
    assert (in_backward, in_step) == (12.0 + 9.1, 12.0 + 10.0)


def test_the_two_overlap_flags_select_three_modes():
    transfers = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
    assert OptimizerConfig().overlap is Overlap.NONE
    assert OptimizerConfig(**transfers).overlap is Overlap.FETCH
    both = OptimizerConfig(**transfers, overlap_optimizer_with_forward=True)
    assert both.overlap is Overlap.ALL


def test_collectives_are_counted_if_the_interconnect_is_known():
    known = replace(MACHINE, interconnect_bytes=10.0)

    def others(machine: Machine, **fields: float) -> float:
        return step_time(work(100, **fields), machine).parts["interconnect"]

    each = {"gathered_forward": 0.3, "gathered_backward": 0.3, "reduced": 0.3}
    assert others(MACHINE, **each) == 0.0
    # Three seconds during a forward of one, six during a backward of two, four times.
    assert others(known, **each) == pytest.approx(24.0, abs=0.2)
    once = others(known, gathered_once=0.3, reduced_once=0.5)
    assert once == pytest.approx(2.0 + 3.0, abs=0.1)
    assert others(known, exchanged=5.0) == pytest.approx(2.0), "exchanges of tokens are exposed"
    # Two seconds during a forward of one, four during a backward of two, and a half, four times.
    small = {"gathered_forward": 1e-9, "gathered_backward": 1e-9, "reduced": 1e-9}
    slow = replace(known, collective_seconds=0.02)
    assert others(slow, **small, exchanges=25) == pytest.approx(4 * (1 + 2 + 0.5), abs=0.1)


def test_weights_are_gathered_once_they_have_gone_up():
    known = replace(MACHINE, interconnect_bytes=10.0)
    found = step_time(work(host_pass=50.0, up=10.0, gathered_forward=20.0), known)
    # The first microbatch exposes a second of the host, one of the link, and two of gathers.
    assert found.parts["host pass"] == found.parts["link"] == pytest.approx(1.0)
    assert found.parts["interconnect"] == pytest.approx(2.0 + 3 * 1.0)


def test_no_update_is_hidden_if_the_host_is_the_device():
    alone = work(host_pass=50.0, down=10.0, up=10.0, reduced=10.0, device_pass=1000.0)
    shared = replace(MACHINE, device_is_host=True, interconnect_bytes=10.0)
    assert step_time(alone, shared).seconds == 12.0 + 1.0 + 2.0 + 4.0 + 1.0


AMOUNTS = st.one_of(st.just(0.0), st.floats(0.1, 1e4))
OFFLOADED = ("host_pass", "down", "up", "states")
GROUPS = st.builds(
    GroupWork,
    forward=st.floats(1.0, 1e4),
    backward=st.floats(1.0, 1e4),
    host_pass=AMOUNTS,
    down=AMOUNTS,
    up=AMOUNTS,
    states=AMOUNTS,
    early_pass=AMOUNTS,
    chunks=st.integers(1, 3),
)
WORKS = st.builds(
    Work,
    st.lists(GROUPS, min_size=1, max_size=6).map(tuple),
    num_microbatches=st.integers(1, 9),
    norm=AMOUNTS,
    device_pass=AMOUNTS,
    update_on_device=st.sampled_from([0.0, 0.5, 1.0]),
    overlap=st.sampled_from([one for one in Overlap if one.has_lanes]),
)
RATES = st.floats(1.0, 1e4)
MACHINES = st.builds(Machine, RATES, RATES, RATES, RATES, memory_bytes=RATES)


@settings(max_examples=40, deadline=None)
@given(WORKS, MACHINES)
def test_no_step_is_shorter_than_the_work_of_each_resource(work, machine):
    found = step_time(work, machine)
    total = found.seconds * (1 + 1e-6)
    device = (work.norm + work.device_pass) / machine.device_bytes
    assert total >= work.flops * work.num_microbatches / machine.flops + device
    assert found.bound in found.parts
    if work.update_on_device:
        return
    # With early updates, as much memory is read and written, or more.
    sums = {
        name: sum(getattr(group, name) for group in work.groups if group.host_pass)
        for name in OFFLOADED
    }
    slower = min(machine.host_bytes, machine.memory_bytes)
    least = sum(min(group.early_pass or group.host_pass, group.host_pass) for group in work.groups)
    assert total >= least / slower
    assert total >= max(sums["down"], sums["up"]) / machine.link_bytes
    assert total >= (least + sums["down"] + sums["up"]) / machine.memory_bytes


@settings(max_examples=40, deadline=None)
@given(WORKS, MACHINES, st.sampled_from(["flops", "host_bytes", "link_bytes", "device_bytes"]))
def test_a_faster_machine_is_never_slower_where_passes_do_not_share(work, machine, name):
    # Early updates may start at another time, and be dropped or not.
    groups = tuple(replace(one, early_pass=0.0, states=one.host_pass) for one in work.groups)
    alone = replace(work, groups=groups, update_on_device=round(work.update_on_device))
    slow = replace(machine, memory_bytes=None)
    fast = replace(slow, **{name: 2 * getattr(slow, name)})
    assert step_time(alone, fast).seconds <= step_time(alone, slow).seconds * (1 + 1e-6)


@settings(max_examples=40, deadline=None)
@given(WORKS, MACHINES, st.floats(0.1, 10.0))
def test_the_time_is_inverse_to_all_rates_together(work, machine, factor):
    rates = ("flops", "device_bytes", "link_bytes", "host_bytes", "memory_bytes")
    faster = replace(machine, **{name: factor * getattr(machine, name) for name in rates})
    one, other = step_time(work, machine), step_time(work, faster)
    assert other.seconds == pytest.approx(one.seconds / factor, rel=1e-6)


def test_groups_are_in_the_order_of_forward_and_have_all_of_the_work():
    run = offload_model.planned_run("30B-A3B", 8, 1.0, spare_gib=8)
    found = work_of(run, 0.5)
    plan, (*groups, loss) = run.plan(0.5), found.groups
    assert [group.host_pass > 0 for group in groups] == [one.is_on_host for one in plan.groups]
    # Sharded over eight ranks, whose rows differ.
    numels = [group.states / 12 for group in groups if group.host_pass]
    expected = [one.numel / 8 for one in plan.groups if one.is_on_host]
    assert numels == pytest.approx(expected, rel=0.01)
    assert found.flops == pytest.approx(flops_of_microbatch(run))
    assert loss.forward == pytest.approx(2 * 2048 * 151936 * 8192)
    on_host = [group for group in groups if group.host_pass]
    costs = [(group.states + group.up, group.early_pass) for group in on_host]
    left = (8 << 30) - sum(cost for cost, early_pass in costs if early_pass)
    assert 0 <= left < min(cost for cost, early_pass in costs if not early_pass)
    last = on_host[-1]
    assert last.early_pass / last.host_pass == pytest.approx(40 / 28)


def test_the_gpu_page_shows_the_planners_results():
    arguments = gpu_step.parsed([])
    machine = Machine(flops=400e12, device_bytes=4.3e12, link_bytes=50e9, host_bytes=150e9)
    page = (DOCS / "gpu.md").read_text()
    on_device = None
    for side in gpu_step.OURS:
        plan = gpu_step.planned_run(arguments, side, "cuda")
        time = step_time(work_of(plan, plan.fraction), machine)
        peak = plan.memory(plan.fraction).device_nbytes
        on_device = on_device or (time.seconds, peak)
        row = (
            f"| {side} | {time.parts['host pass']:.2f} s | {time.parts['link']:.2f} s | "
            f"{time.seconds:.2f} s | {time.seconds / on_device[0]:.2f}x | "
            f"{peak / 1e9:.0f} GB, {peak / on_device[1]:.0%} |"
        )
        assert row in page
    assert f"{plan.numel / 1e9:.2f} billion elements" in page
    assert f"{plan.tokens_per_step:,}" in page
    assert f"{flops_of_microbatch(plan) * plan.num_microbatches / 1e15:.2f} PFLOP" in page


MIXERS = {
    "grouped queries": {"kv_channels": 8, "group_query_attention": True, "num_query_groups": 2},
    "latent attention": {"multi_latent_attention": True, "kv_lora_rank": 8, "v_head_dim": 12},
    "gated delta nets": {
        "linear_attention_freq": "[1]",
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
    },
}


def _sent_by_one_layer(model: TransformerConfig, comm_type: str) -> int:
    """The bytes that a rank sends in a forward and backward of [2, 16] tokens on all ranks."""
    sent, num_ranks = [0], dist.get_world_size()
    all_to_all, all_gather = context.dist.all_to_all_single, context.all_gather_on_device

    def count_parts(received: Tensor, parts: Tensor, **options: Any) -> Any:
        sent[0] += parts.nbytes * (num_ranks - 1) // num_ranks
        return all_to_all(received, parts, **options)

    def count_copies(received: Tensor, part: Tensor, **options: Any) -> Any:
        sent[0] += part.nbytes * (num_ranks - 1)
        return all_gather(received, part, **options)

    layers = GPTModel(model, 32).decoder
    context.divide_context(layers, dist.group.WORLD, comm_type)
    hidden = torch.randn(2, 16 // num_ranks, model.hidden_size, requires_grad=True)
    with (
        mock.patch.object(context.dist, "all_to_all_single", count_parts),
        mock.patch.object(context, "all_gather_on_device", count_copies),
    ):
        layers(hidden)[0].sum().backward()
    return sent[0]


@pytest.mark.parametrize("comm_type", ["a2a", "all_gather"])
@pytest.mark.parametrize("mixer", MIXERS)
def test_planned_bytes_of_context_parallelism_match_the_sent_bytes(mixer, comm_type):
    model = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **MIXERS[mixer])
    gathers = comm_type == "all_gather"
    batch = Microbatch(2, 16, 4, "cpu", context_size=4, gathers=gathers)
    (layer,) = model_spec(model).layers
    for found in run_ranks(4, _sent_by_one_layer, model, comm_type):
        assert found == exchanged_by(layer.mixer, batch)


def _sent_by_divided_layer(model: TransformerConfig) -> int:
    """The bytes that a rank sends in a forward and backward of [2, 16] tokens, whose layer all
    ranks divide.
    """
    sent, num_ranks = [0], dist.get_world_size()
    all_to_all, all_gather = tensor.dist.all_to_all_single, tensor.all_gather

    def count_parts(received: Tensor, parts: Tensor, **options: Any) -> Any:
        sent[0] += parts.nbytes * (num_ranks - 1) // num_ranks
        return all_to_all(received, parts, **options)

    def count_copies(received: Tensor, part: Tensor, *others: Any) -> Any:
        sent[0] += part.nbytes * (num_ranks - 1)
        return all_gather(received, part, *others)

    layers = GPTModel(model, 32).decoder
    tensor.divide_tensor(layers, dist.group.WORLD)
    take_parts(layers, dist.get_rank(), num_ranks)
    hidden = torch.randn(2, 16 // num_ranks, model.hidden_size, requires_grad=True)
    with (
        mock.patch.object(tensor.dist, "all_to_all_single", count_parts),
        mock.patch.object(tensor, "all_gather", count_copies),
    ):
        layers(hidden, Places(torch.arange(16).expand(2, -1)))[0].sum().backward()
    return sent[0]


DIVIDED = {
    **MIXERS,
    "gated delta nets": {**MIXERS["gated delta nets"], "linear_num_key_heads": 4},
    "latents of queries": {**MIXERS["latent attention"], "q_lora_rank": 12},
    "experts": {"num_experts": 4},
    "shared experts": {"num_experts": 4, "moe_shared_expert_intermediate_size": 16},
}


@pytest.mark.parametrize("layer", DIVIDED)
def test_planned_bytes_of_tensor_parallelism_match_the_sent_bytes(layer):
    model = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **DIVIDED[layer])
    batch = Microbatch(2, 16, 4, "cpu", tensor_size=4)
    (spec,) = model_spec(model).layers
    for found in run_ranks(4, _sent_by_divided_layer, model):
        assert found == sent_by_layer(spec, 32, batch)
