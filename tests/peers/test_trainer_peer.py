"""transformers' `Trainer` on `fully_shard` and on the optimizers, against FSDP2 and AdamW."""

from __future__ import annotations

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = ("FSDP2", "AdamW")
FULL = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}
SIDES = [
    ("FSDP2", "HDO 0.5"),
    ("FSDP2", "FusedAdam"),
    *(("ours", optimizer) for optimizer in ("AdamW", "FusedAdam", "HDO 0", "HDO 0.5", "HDO 1")),
]
# What a program may choose besides the engine and the optimizer.
SETTINGS: dict[str, Settings] = {
    "DDP": {"fsdp": None},
    "accumulation": {"fsdp": FULL, "gradient_accumulation_steps": 2},
    "activation checkpointing": {"fsdp": FULL | {"activation_checkpointing": True}},
    "LoRA": {"fsdp": FULL, "has_adapters": True},
    "compiled": {"fsdp": FULL, "torch_compile": True, "torch_compile_backend": "aot_eager"},
}
RESUMED = {"DDP, resumed": None, "full, resumed": FULL, "sharded, resumed": SHARDED}


def _cases() -> dict[str, Case]:
    cases = {}
    for one in SIDES:
        cases[" with ".join(one)] = (side(*one, fsdp=FULL), side(*REFERENCE, fsdp=FULL))
    for name, settings in SETTINGS.items():
        cases[name] = (side("ours", "HDO 0.5", **settings), side(*REFERENCE, **settings))
    for name, fsdp in RESUMED.items():
        run = side("ours", "HDO 0.5", fsdp=fsdp, is_resumed=True)
        cases[name] = (run, side(*REFERENCE, fsdp=fsdp))
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs() -> PeerRuns:
    return PeerRuns("trainer_job", CASES)


@pytest.mark.parametrize("case", CASES)
def test_trainer_trains_and_resumes_as_with_adamw_on_fsdp2(runs: PeerRuns, case: str) -> None:
    run, reference = CASES[case]
    assert runs[run] == pytest.approx(runs[reference], rel=5e-6)
