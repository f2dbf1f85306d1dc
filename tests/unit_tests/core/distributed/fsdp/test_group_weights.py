"""Memory phases of a group's full weights, and deliveries, without ranks."""

from __future__ import annotations

import itertools
import weakref

import pytest

from megatron.core.distributed.fsdp.group_weights import Delivery, MemoryPhase
from megatron.core.lanes import ThreadEvent

LEGAL = {
    ("SHARDED", "RESERVED"),
    ("SHARDED", "GATHERING"),
    ("RESERVED", "SHARDED"),
    ("RESERVED", "GATHERING"),
    ("GATHERING", "GATHERING"),
    ("GATHERING", "WHOLE"),
    ("GATHERING", "FAILED"),
    ("WHOLE", "GATHERING"),
    ("WHOLE", "SHARDED"),
    ("FAILED", "SHARDED"),
}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(MemoryPhase, repeat=2)))
def test_a_memory_phase_leads_to_the_phases_of_the_table_only(
    before: MemoryPhase, after: MemoryPhase
) -> None:
    if (before.name, after.name) in LEGAL:
        assert before.to(after) is after
        return
    with pytest.raises(RuntimeError) as refused:
        before.to(after)
    assert before.value in str(refused.value)
    assert after.value in str(refused.value)


def test_full_weights_are_unsharded_from_the_start_of_their_gather():
    assert {phase.name for phase in MemoryPhase if phase.is_unsharded} == {"GATHERING", "WHOLE"}


def failed_event() -> ThreadEvent:
    event = ThreadEvent()
    event.finish(OSError("the update failed"))
    return event


def test_a_delivery_is_announced_awaited_and_then_idle_again_and_its_user_is_told_once():
    delivery, used = Delivery(), []
    updated = ThreadEvent.done()
    delivery.announce(updated, before_use=lambda: used.append(delivery.status))
    assert delivery.events == [updated]
    delivery.synchronize()
    assert delivery.events == [updated], "a gather must still be queued after it"

    delivery.gather_queued()
    assert (delivery.status, delivery.events) == (Delivery.Status.AWAITED, [])
    for _ in range(2):
        delivery.wait(ThreadEvent.done())
        assert delivery.status is Delivery.Status.IDLE
    assert used == [Delivery.Status.IDLE]


def test_a_gather_without_an_update_leaves_a_delivery_idle_and_a_newer_update_is_still_announced():
    delivery, used = Delivery(), []
    delivery.gather_queued()
    assert delivery.status is Delivery.Status.IDLE

    delivery.announce(ThreadEvent.done(), before_use=lambda: used.append("old"))
    delivery.gather_queued()
    newer = ThreadEvent.done()
    delivery.announce(newer, before_use=lambda: used.append("new"))
    delivery.wait(ThreadEvent.done())
    assert (delivery.events, used) == ([newer], [])


@pytest.mark.parametrize("is_awaited", [True, False])
def test_a_gather_that_fails_fails_the_delivery_that_it_came_after(is_awaited):
    delivery = Delivery()
    if is_awaited:
        delivery.announce(failed_event())
        delivery.gather_queued()
    with pytest.raises(OSError, match="the update failed"):
        delivery.wait(failed_event())
    assert (delivery.status is Delivery.Status.FAILED) == is_awaited


def test_a_delivery_that_has_failed_stays_failed():
    delivery = Delivery()
    delivery.announce(ThreadEvent.done(), before_use=failed_event().wait)
    delivery.gather_queued()
    with pytest.raises(OSError, match="the update failed"):
        delivery.wait(ThreadEvent.done())
    delivery.announce(ThreadEvent.done())
    assert (delivery.status, delivery.events) == (Delivery.Status.FAILED, [])


def test_synchronizing_with_an_update_that_failed_fails_every_time():
    delivery = Delivery()
    delivery.announce(failed_event())
    for _ in range(2):
        with pytest.raises(OSError, match="the update failed"):
            delivery.synchronize()


def test_a_gather_waits_for_the_updates_of_every_owner():
    delivery, used = Delivery(), []
    events = [ThreadEvent.done() for _ in range(3)]
    for number, first in enumerate((0, 2, 0)):
        delivery.announce(events[number], lambda number=number: used.append(number), first)
    assert set(map(id, delivery.events)) == {id(events[1]), id(events[2])}
    delivery.gather_queued()
    delivery.wait(ThreadEvent.done())
    assert sorted(used) == [1, 2], "a newer update takes the place of the first"
    delivery.synchronize()
    assert delivery.status is Delivery.Status.IDLE


def test_the_last_to_claim_a_delivery_has_it_and_it_is_held_weakly():
    class Owner:
        pass

    delivery, first, second = Delivery(), Owner(), Owner()
    assert not delivery.is_claimed_by(first)
    delivery.claim(first, [0, 1])
    delivery.claim(second, [1, 2])
    assert delivery.is_claimed_by(first)
    assert not delivery.is_claimed_by(first, [0, 1])
    assert delivery.is_claimed_by(second, [1, 2])
    gone = weakref.ref(second)
    del second
    assert gone() is None
