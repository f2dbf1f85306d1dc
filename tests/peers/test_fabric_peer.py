"""Lightning Fabric on `fully_shard` and on the optimizers, against FSDP2 and AdamW."""

from __future__ import annotations

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = ("FSDP2", "AdamW")
SIDES = [
    ("FSDP2", "HDO 0.5"),
    *(("ours", optimizer) for optimizer in ("AdamW", "FusedAdam", "HDO 0", "HDO 0.5", "HDO 1")),
]
# What a program may choose besides the engine and the optimizer.
SETTINGS: dict[str, Settings] = {
    "DDP": {"strategy": "ddp"},
    "accumulation": {"accumulation": 2},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "on meta": {"is_on_meta": True},
    "compiled layers": {"is_compiled": True},
}
# Saved by one, loaded by the other.
RESUMED = {
    "sharded": [
        (("ours", "HDO 0.5"), ("ours", "HDO 0.5")),
        (("FSDP2", "AdamW"), ("ours", "HDO 0.5")),
        (("ours", "HDO 1"), ("FSDP2", "AdamW")),
    ],
    "one file": [
        (("ours", "HDO 0.5"), ("ours", "HDO 0.5")),
        (("ours", "AdamW"), ("ours", "FusedAdam")),
    ],
}


def _cases() -> dict[str, Case]:
    cases = {" with ".join(one): (side(*one), side(*REFERENCE)) for one in SIDES}
    for name, settings in SETTINGS.items():
        cases[name] = (side("ours", "HDO 0.5", **settings), side(*REFERENCE, **settings))
    in_bf16 = {"precision": "bf16-true"}
    cases["bf16-true"] = (side("ours", "AdamW", **in_bf16), side(*REFERENCE, **in_bf16))
    # AdamW keeps its states in bf16, ours in fp32.
    cast_later = {"strategy": "ddp", "precision": "bf16-true"}
    cases["bf16-true, cast after the optimizer was made"] = (
        side("ours", "HDO 0.5", **cast_later),
        side("ours", "FusedAdam", **cast_later),
    )
    for strategy, pairs in RESUMED.items():
        for saved, loaded in pairs:
            run = side(*saved, strategy=strategy, resume_on=loaded)
            name = f"{strategy}, {' with '.join(saved)}, then {' with '.join(loaded)}"
            cases[name] = (run, side(*REFERENCE))
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs() -> PeerRuns:
    return PeerRuns("fabric_job", CASES)


@pytest.mark.parametrize("case", CASES)
def test_fabric_trains_and_resumes_as_with_adamw_on_fsdp2(runs: PeerRuns, case: str) -> None:
    run, reference = CASES[case]
    assert runs[run] == pytest.approx(runs[reference], rel=2e-6)
