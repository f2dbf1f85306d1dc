"""TRL's trainers on `fully_shard` and on the optimizers, against FSDP2 and AdamW."""

from __future__ import annotations

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = ("FSDP2", "AdamW")
FULL = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
SIDES = [("FSDP2", "HDO 0.5"), ("ours", "AdamW"), ("ours", "FusedAdam"), ("ours", "HDO 0.5")]
# What a program may choose besides the engine and the optimizer.
SETTINGS: dict[str, Settings] = {
    "DPO": {"fsdp": FULL, "method": "DPO"},
    "LoRA": {"fsdp": FULL, "has_adapters": True},
    "DDP": {"fsdp": None},
}


def _cases() -> dict[str, Case]:
    reference = side(*REFERENCE, fsdp=FULL)
    cases = {" with ".join(one): (side(*one, fsdp=FULL), reference) for one in SIDES}
    for name, settings in SETTINGS.items():
        cases[name] = (side("ours", "HDO 0.5", **settings), side(*REFERENCE, **settings))
    cases["resumed"] = (side("ours", "HDO 0.5", fsdp=FULL, is_resumed=True), reference)
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs() -> PeerRuns:
    return PeerRuns("trl_job", CASES)


@pytest.mark.parametrize("case", CASES)
def test_trl_trains_and_resumes_as_with_adamw_on_fsdp2(runs: PeerRuns, case: str) -> None:
    run, reference = CASES[case]
    assert runs[run] == pytest.approx(runs[reference], rel=5e-6)
