"""PEFT's adapters over models that `fully_shard` has sharded, against FSDP2 and AdamW."""

from __future__ import annotations

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = side("FSDP2", "AdamW")
SIDES = [
    ("FSDP2", "HDO 0.5"),
    *(("ours", optimizer) for optimizer in ("AdamW", "FusedAdam", "HDO 0", "HDO 0.5", "HDO 1")),
]
SETTINGS: dict[str, Settings] = {
    "shards are loaded": {"load": "shards"},
    "replicas are loaded": {"load": "replicas"},
    "whole tensors are loaded": {"load": "whole tensors"},
    "saved adapters are loaded": {"load": "file"},
    "adapters are merged": {"has_merged": True},
    "compiled layers": {"is_compiled": True},
}


def _cases() -> dict[str, Case]:
    cases = {" with ".join(one): (side(*one), REFERENCE) for one in SIDES}
    for name, settings in SETTINGS.items():
        cases[name] = (side("ours", "HDO 0.5", **settings), REFERENCE)
    cases["bf16"] = (side("ours", "AdamW", is_bf16=True), side("FSDP2", "AdamW", is_bf16=True))
    return cases


CASES = _cases()


@pytest.fixture(scope="module")
def runs() -> PeerRuns:
    return PeerRuns("peft_job", CASES)


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_and_load_as_with_adamw_on_fsdp2(runs: PeerRuns, case: str) -> None:
    run, reference = CASES[case]
    assert runs[run] == pytest.approx(runs[reference], rel=2e-6)
