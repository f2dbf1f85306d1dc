"""accelerate's `Accelerator` on `fully_shard` and on the optimizers, against FSDP2 and AdamW."""

from __future__ import annotations

import itertools

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = ("FSDP2", "AdamW")
WHOLE = {"cpu_ram_efficient_loading": False}
SIDES = [
    *itertools.product(("FSDP2", "ours"), ("HDO 0", "HDO 0.5", "HDO 1", "FusedAdam")),
    ("ours", "AdamW"),
]

# What a program may choose besides the engine and the optimizer.
SETTINGS: dict[str, Settings] = {
    "sharded by the program": {"plugin": None},
    "accumulation": {"plugin": WHOLE, "accumulation": 2},
    "tied weights": {"plugin": WHOLE, "is_tied": True},
    "activation checkpointing": {"plugin": WHOLE | {"activation_checkpointing": True}},
    "loaded on meta": {"plugin": {"cpu_ram_efficient_loading": True}},
    "compiled layers": {"plugin": WHOLE, "is_compiled": True},
}
# Saved by one, loaded by the other.
RESUMED = {
    "SHARDED_STATE_DICT": [
        (("FSDP2", "HDO 0.5"), ("FSDP2", "HDO 0.5")),
        (("ours", "HDO 0.5"), ("ours", "HDO 0.5")),
        (("FSDP2", "AdamW"), ("ours", "HDO 0.5")),
        (("ours", "HDO 1"), ("FSDP2", "AdamW")),
    ],
    "FULL_STATE_DICT": [
        (("ours", "HDO 0.5"), ("ours", "HDO 0.5")),
        (("ours", "AdamW"), ("ours", "FusedAdam")),
        (("FSDP2", "AdamW"), ("FSDP2", "HDO 1")),
    ],
}


def _cases() -> dict[str, Case]:
    cases = {}
    for one in SIDES:
        cases[" with ".join(one)] = (side(*one, plugin=WHOLE), side(*REFERENCE, plugin=WHOLE))
    for name, settings in SETTINGS.items():
        run = side("ours", "HDO 0.5", **settings)
        cases[name] = (run, side(*REFERENCE, **settings))
    for kind, pairs in RESUMED.items():
        for saved, loaded in pairs:
            run = side(*saved, plugin=WHOLE | {"state_dict_type": kind}, resume_on=loaded)
            name = f"{kind}, {' with '.join(saved)}, then {' with '.join(loaded)}"
            cases[name] = (run, side(*REFERENCE, plugin=WHOLE))
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs() -> PeerRuns:
    return PeerRuns("accelerate_job", CASES)


@pytest.mark.parametrize("case", CASES)
def test_accelerate_trains_and_resumes_as_with_adamw_on_fsdp2(runs: PeerRuns, case: str) -> None:
    run, reference = CASES[case]
    assert runs[run] == pytest.approx(runs[reference], rel=2e-6)
