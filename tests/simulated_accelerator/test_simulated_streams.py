"""The simulated accelerator's streams and kernels: as on a GPU, property by property."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from tests.helpers.ranks import run_ranks
from tests.simulated_accelerator.helpers.threads import A_MOMENT, ends, started

pytestmark = pytest.mark.sim


def on_one_rank(body: Callable[[], None]) -> None:
    run_ranks(1, body, device="sim")


# Streams


def _two_streams(waits: bool) -> list[float]:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    found = []
    for changes in (
        {"schedule": sim.Schedule.LANES_LAST},
        {"schedule": sim.Schedule.PAUSES, "max_pause_us": 20_000, "seed": 3},
    ):
        value = torch.zeros((), device="sim")
        torch.accelerator.synchronize()
        with sim.configured(**changes):
            with side:
                for _ in range(20):
                    value.add_(1)
            if waits:
                torch.accelerator.current_stream().wait_stream(side)
            found.append(value.item())
            side.synchronize()
    return found


def test_a_stream_that_does_not_wait_for_another_sees_what_is_not_finished():
    assert run_ranks(1, _two_streams, True, device="sim") == [[20.0, 20.0]]
    [[late, paused]] = run_ranks(1, _two_streams, False, device="sim")
    assert late == 0
    assert paused < 20


def _default_last() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(schedule=sim.Schedule.DEFAULT_LAST, patience_ms=10_000):
        value.add_(1)
        with side:
            assert value.item() == 0
            side.wait_stream(torch.accelerator.current_stream())
        side.wait_stream(torch.sim.current_stream())
        with side:
            assert value.item() == 1


def test_the_default_stream_may_come_last():
    on_one_rank(_default_last)


def _patience() -> None:
    import tests.simulated_accelerator.device as sim

    side = torch.Stream("sim")
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(schedule=sim.Schedule.LANES_LAST, patience_ms=20):
        with side:
            value.add_(1)
        waiting = started(lambda: [None for _ in iter(lambda: sim.peek(value).item() == 1, True)])
        assert ends(waiting), "another rank may wait for what nothing here waits for"


def test_a_stream_that_comes_last_comes_some_time():
    on_one_rank(_patience)


def _launch_queue() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    value = torch.zeros((), device="sim")
    torch.accelerator.synchronize()
    with sim.configured(queue_depth=4):
        with sim.held(stream):
            issued = []
            issuing = started(lambda: [issued.append(value.add_(1)) for _ in range(10)])
            assert not ends(issuing, A_MOMENT)
            assert 3 <= len(issued) <= 4
        assert ends(issuing)
    assert value.item() == 10
    assert sim.counters().full_queues > 0


def test_a_launch_waits_while_the_queue_is_full():
    on_one_rank(_launch_queue)


def _events() -> None:
    import tests.simulated_accelerator.device as sim

    stream = torch.accelerator.current_stream()
    begin, end = (torch.Event("sim", enable_timing=True) for _ in range(2))
    plain = torch.Event("sim")
    begin.record()
    begin.synchronize()  # its time is taken when the stream comes to it
    with sim.held(stream):
        torch.ones(3, device="sim")
        plain.record()
        end.record()
        assert not plain.query()
        assert not stream.query()
        waiting = started(plain.synchronize)
        assert not ends(waiting, A_MOMENT)
    assert ends(waiting)
    end.synchronize()
    assert begin.elapsed_time(end) >= 1000 * A_MOMENT


def test_events_are_done_when_their_stream_has_come_to_them():
    on_one_rank(_events)


# Threads, counters


def _current_devices() -> None:
    import tests.simulated_accelerator.device as sim

    torch.accelerator.set_device_index(2)
    sim.forget_touched_devices()
    torch.ones(2, device="sim").add_(1)
    assert sim.touched_devices() == {2: {"MainThread"}}

    def work() -> None:
        torch.sim.current_stream()
        torch.sim.set_device(1)
        assert sim.touched_devices().keys() == {2}, "to choose a device is not to use it"
        torch.sim.set_device(0)
        torch.Event("sim").record()

    thread = threading.Thread(target=work, name="worker")
    thread.start()
    assert ends(thread)
    assert sim.touched_devices() == {
        0: {"worker"},
        2: {"MainThread"},
    } or sim.touched_devices().keys() == {0, 2}
    torch.accelerator.set_device_index(0)


def test_every_thread_begins_on_the_first_device_and_its_use_is_noted():
    on_one_rank(_current_devices)


def _synchronisations() -> None:
    import tests.simulated_accelerator.device as sim

    tensor = torch.ones(4, device="sim")
    before, by_thread = sim.counters(), sim.syncs_by_thread()
    tensor.sum()
    assert (sim.counters() - before).stream_syncs == 0
    tensor.sum().item()
    tensor.cpu()
    torch.accelerator.current_stream().synchronize()
    event = torch.Event("sim")
    event.record()
    event.synchronize()
    done = sim.counters() - before
    assert (done.stream_syncs, done.event_syncs, done.kernels) == (3, 1, 2)
    assert sim.syncs_by_thread()["MainThread"] - by_thread.get("MainThread", 0) == 4

    tensor.nonzero()
    assert (sim.counters() - before).sync_operators == 1
    assert "aten::nonzero" in sim.sync_operator_names()


def test_what_makes_the_host_wait_is_counted():
    on_one_rank(_synchronisations)


# Kernels


def _random_numbers() -> None:
    import tests.simulated_accelerator.device as sim

    torch.manual_seed(5)
    expected = [torch.randn(100), torch.rand(3), torch.randperm(9)]
    torch.manual_seed(5)
    got = [
        torch.randn(100, device="sim"),
        torch.rand(3, device="sim"),
        torch.randperm(9, device="sim"),
    ]
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.equal(ours.cpu(), theirs)

    state = torch.sim.get_rng_state()
    first = torch.nn.functional.dropout(torch.ones(50, device="sim"))
    torch.sim.set_rng_state(state)
    assert torch.equal(torch.nn.functional.dropout(torch.ones(50, device="sim")), first)

    # Drawn when they are asked for, not when the stream comes to it.
    torch.manual_seed(5)
    with sim.held(torch.accelerator.current_stream()):
        late = torch.randn(100, device="sim")
        torch.manual_seed(6)
    assert torch.equal(late.cpu(), expected[0])


def test_random_numbers_are_those_of_the_cpu_in_the_order_of_the_program():
    on_one_rank(_random_numbers)


def _training() -> list[list[float]]:
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.Tanh(), torch.nn.LayerNorm(16), torch.nn.Linear(16, 1)
    )
    results = []
    for device in ("cpu", "sim"):
        own = [torch.nn.Parameter(p.detach().to(device)) for p in model.parameters()]
        names = [name for name, _ in model.named_parameters()]
        x = torch.linspace(-1, 1, 32).view(4, 8).to(device)
        loss = (
            torch.func.functional_call(model, dict(zip(names, own, strict=True)), x).square().mean()
        )
        loss.backward()
        results.append([loss.item(), *(p.grad.norm().item() for p in own)])
    return results


def test_autograd_on_the_device_computes_what_it_does_on_the_cpu():
    [[cpu, device]] = run_ranks(1, _training, device="sim")
    assert device == pytest.approx(cpu, rel=1e-6)


def _norms() -> list[list[float]]:
    results = []
    for device, dtype in itertools.product(("cpu", "sim"), (torch.float32, torch.bfloat16)):
        x = torch.linspace(-1, 1, 32).view(4, 8).to(device, dtype).requires_grad_()
        norm = torch.nn.LayerNorm(8, device=device, dtype=dtype)
        norm(x).square().mean().backward()
        results.append([float(x.grad.abs().max()), float(norm.weight.grad.sum())])
    return results


def test_a_layer_norm_is_the_cpus_in_every_dtype():
    [[fp32, bf16, fp32_on_device, bf16_on_device]] = run_ranks(1, _norms, device="sim")
    assert (fp32_on_device, bf16_on_device) == (fp32, bf16)


def _failing_kernel() -> None:
    import tests.simulated_accelerator.device as sim

    value, event = torch.zeros((), device="sim"), torch.Event("sim")
    event.record()
    torch.accelerator.synchronize()
    try:
        with sim.held(torch.accelerator.current_stream()):
            sim.fail_on_stream("the cause")  # says nothing yet
            value.add_(1)
        for call in (torch.accelerator.synchronize, lambda: value + 1, value.item, event.query):
            with pytest.raises(RuntimeError, match="the cause"):
                call()
        assert sim.peek(value) == 0, "nothing runs any more"
    finally:
        sim.reset_error()
    assert value.item() == 0


def test_the_failure_of_a_kernel_surfaces_in_later_calls_and_stays():
    on_one_rank(_failing_kernel)
