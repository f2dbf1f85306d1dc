"""The time of a step, from what it computes and moves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks import gpu_step
from megatron.core.distributed import context
from megatron.core.models.gpt.activations import Microbatch
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer.config import OptimizerConfig, Overlap
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron_hybrid.plan.step_time import Machine, Work, step_time
from megatron_hybrid.plan.workload import exchanged_by, flops_of_microbatch, work_of
from tests.helpers.doc_commands import DOCS
from tests.helpers.ranks import run_ranks

MACHINE = Machine(flops=100.0, device_bytes=1000.0, link_bytes=10.0, host_bytes=50.0)
WORK = Work(forward_flops=100.0, backward_flops=200.0, num_microbatches=4)


def test_the_hosts_pass_hides_behind_the_first_forward_alone():
    # A forward takes a second, and there are four of them.
    assert step_time(replace(WORK, host_pass=50.0), MACHINE).exposed_host == 0.0
    assert step_time(replace(WORK, host_pass=150.0), MACHINE).exposed_host == 2.0
    more = replace(WORK, host_pass=150.0, num_microbatches=8)
    assert step_time(more, MACHINE).exposed_host == 2.0, "more microbatches hide no more"


def test_states_that_the_device_updates_relieve_the_host_and_load_the_link():
    # The host's pass takes 6 s, of which the first forward hides one; the states 4 s each way.
    work = replace(WORK, host_pass=300.0, up=10.0, states=40.0, update_on_device=0.5)
    half = step_time(work, MACHINE)
    assert (half.host_pass, half.up) == (3.0, 0.5 * 1 + 0.5 * 4)
    assert half.exposed_host == 2.0

    best = step_time(replace(work, update_on_device=None), MACHINE)
    assert best.host_pass == pytest.approx(best.up)
    assert (
        best.seconds
        < half.seconds
        < step_time(replace(work, update_on_device=0.0), MACHINE).seconds
    )
    assert best.update_on_device == pytest.approx(5 / 9)


def test_gradients_hide_behind_the_last_backward_alone():
    assert step_time(replace(WORK, down=20.0), MACHINE).exposed_link == 0.0
    assert step_time(replace(WORK, down=50.0), MACHINE).exposed_link == 3.0
    assert step_time(replace(WORK, down=500.0), MACHINE).bound == "link"


def test_weights_that_go_up_longer_than_the_pass_are_the_links():
    time = step_time(replace(WORK, host_pass=50.0, up=200.0), MACHINE)
    assert time.exposed_host == 19.0
    assert (time.parts["host pass"], time.parts["link"]) == (0.0, 19.0)


def test_activations_hide_behind_each_forward_and_each_backward():
    # A forward takes a second, a backward two, and there are four of each.
    waits = [
        step_time(replace(WORK, activations=nbytes), MACHINE).exposed_activations
        for nbytes in (0.0, 10.0, 15.0, 30.0)
    ]
    assert waits == [0.0, 0.0, 4 * 0.5, 4 * (2.0 + 1.0)]
    time = step_time(replace(WORK, activations=30.0), MACHINE)
    assert (time.forward, time.activations, time.parts["link"]) == (1.0, 3.0, 12.0)
    assert time.hides_offloading, "the optimizer does not wait for them"
    few = step_time(replace(WORK, activations=30.0, hides_activations=True), MACHINE)
    assert few.exposed_activations == 0.0
    on_host = replace(MACHINE, device_is_host=True)
    assert step_time(replace(WORK, activations=10.0), on_host).exposed_activations == 8.0


@pytest.mark.parametrize(
    ("overlap", "exposed"),
    [
        (Overlap.ALL, (2.0, 0.0)),
        (Overlap.FORWARD, (2.0, 1.0)),
        (Overlap.FETCH, (3.0, 0.0)),
        (Overlap.TRANSFERS, (3.0, 1.0)),
        (Overlap.NONE, (3.0, 2.0)),
    ],
)
def test_each_overlap_hides_its_own_part(overlap, exposed):
    work = replace(WORK, host_pass=150.0, down=10.0, up=10.0, overlap=overlap)
    time = step_time(work, MACHINE)
    assert (time.exposed_host, time.exposed_link) == exposed


def test_two_flags_have_three_answers():
    transfers = {"optimizer_cpu_offload": True, "overlap_cpu_optimizer_d2h_h2d": True}
    assert OptimizerConfig().overlap is Overlap.NONE
    assert OptimizerConfig(**transfers).overlap is Overlap.FETCH
    both = OptimizerConfig(**transfers, overlap_optimizer_with_forward=True)
    assert both.overlap is Overlap.ALL


def test_collectives_are_counted_if_the_interconnect_is_known():
    work = replace(WORK, gathered_forward=30.0, gathered_backward=30.0, reduced=30.0)
    assert step_time(work, MACHINE).collectives == 0.0
    known = replace(MACHINE, interconnect_bytes=10.0)
    time = step_time(work, known)
    # Three seconds beside a forward of one, six beside a backward of two, four times.
    assert (time.collectives, time.exposed_collectives) == (36.0, 24.0)
    once = step_time(replace(WORK, gathered_once=30.0, reduced_once=50.0), known)
    assert once.exposed_collectives == 2.0 + 3.0
    tokens = step_time(replace(WORK, exchanged=5.0), known)
    assert tokens.exposed_collectives == 2.0, "nothing hides the way of tokens"


def test_many_small_collectives_take_their_time():
    known = replace(MACHINE, interconnect_bytes=10.0, collective_seconds=0.5)
    work = replace(WORK, collectives_forward=4, collectives_backward=6, exchanges=1)
    # Two seconds beside a forward of one, three beside a backward of two, and a half, four times.
    assert step_time(work, known).exposed_collectives == 4 * (1.0 + 1.0 + 0.5)


def test_a_host_that_is_the_device_hides_nothing():
    work = replace(WORK, host_pass=50.0, down=10.0, up=10.0, reduced=10.0, device_pass=1000.0)
    shared = replace(MACHINE, device_is_host=True, interconnect_bytes=10.0)
    assert step_time(work, shared).seconds == 12.0 + 1.0 + 2.0 + 4.0 + 1.0


AMOUNTS = st.floats(0.0, 1e6)
WORKS = st.builds(
    Work,
    forward_flops=st.floats(1.0, 1e6),
    backward_flops=st.floats(1.0, 1e6),
    num_microbatches=st.integers(1, 9),
    host_pass=AMOUNTS,
    device_pass=AMOUNTS,
    down=AMOUNTS,
    up=AMOUNTS,
    gathered_forward=AMOUNTS,
    gathered_backward=AMOUNTS,
    reduced=AMOUNTS,
    gathered_once=AMOUNTS,
    reduced_once=AMOUNTS,
    exchanged=AMOUNTS,
    overlap=st.sampled_from(Overlap),
)
RATES = st.floats(1.0, 1e6)
MACHINES = st.builds(
    Machine,
    RATES,
    RATES,
    RATES,
    RATES,
    st.one_of(st.none(), RATES),
    st.floats(0.0, 1.0),
    st.booleans(),
)
GROWING = ("host_pass", "device_pass", "down", "up", "reduced", "gathered_once", "exchanged")


@given(WORKS, MACHINES, st.sampled_from(GROWING), AMOUNTS)
def test_more_work_is_never_faster(work, machine, name, more):
    before = step_time(work, machine)
    after = step_time(replace(work, **{name: getattr(work, name) + more}), machine)
    assert after.seconds >= before.seconds * (1 - 1e-12)
    assert before.seconds >= before.compute
    assert before.bound in before.parts


@given(WORKS, MACHINES)
def test_a_faster_machine_is_never_slower(work, machine):
    for name in ("flops", "host_bytes", "link_bytes", "device_bytes"):
        faster = replace(machine, **{name: 2 * getattr(machine, name)})
        # With less computation less is hidden, but never more than is saved: what runs beside the
        # same forward or backward is waited for once.
        assert step_time(work, faster).seconds <= step_time(work, machine).seconds * (1 + 1e-12)


def test_what_the_gpu_page_expects_is_what_the_planner_computes():
    arguments = gpu_step.parsed([])
    machine = Machine(flops=400e12, device_bytes=4.3e12, link_bytes=50e9, host_bytes=150e9)
    page = (DOCS / "gpu.md").read_text()
    on_device = None
    for fraction in (0.0, 0.5, 0.8, 1.0):
        plan = gpu_step.planned_run(arguments, fraction, "cuda")
        time = step_time(work_of(plan, plan.fraction), machine)
        peak = plan.memory(plan.fraction).device_nbytes
        on_device = on_device or (time.seconds, peak)
        row = (
            f"| {fraction:g} | {time.host_pass:.2f} s | {time.up:.2f} s | "
            f"{time.exposed_host:.2f} s | {time.seconds:.2f} s | "
            f"{time.seconds / on_device[0]:.2f}x | "
            f"{peak / 1e9:.0f} GB, {peak / on_device[1]:.0%} |"
        )
        assert row in page
    assert f"{plan.numel / 1e9:.2f} billion elements" in page
    assert f"{plan.tokens_per_step:,}" in page
    assert f"{flops_of_microbatch(plan) * plan.num_microbatches / 1e15:.2f} PFLOP" in page


def test_measured_seconds_take_the_place_of_operations():
    time = step_time(replace(WORK, host_pass=150.0), MACHINE, compute=24.0)
    assert (time.compute, time.exposed_host) == (24.0, 1.0)


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
def test_planned_bytes_of_context_parallelism_are_those_that_a_rank_sends(mixer, comm_type):
    model = TransformerConfig(num_layers=1, hidden_size=32, num_attention_heads=4, **MIXERS[mixer])
    gathers = comm_type == "all_gather"
    batch = Microbatch(2, 16, 4, "cpu", context_size=4, gathers_keys=gathers)
    (layer,) = model_spec(model).layers
    for found in run_ranks(4, _sent_by_one_layer, model, comm_type):
        assert found == exchanged_by(layer.mixer, batch)
