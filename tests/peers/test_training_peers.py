"""Training loops of other libraries on `fully_shard` and on the optimizers, against FSDP2 and
AdamW.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from tests.peers.helpers.peer_runs import Case, PeerRuns, Settings, side

pytestmark = pytest.mark.peer

REFERENCE = ("FSDP2", "AdamW")
Side = tuple[str, str]  # an engine and an optimizer
HALF, ALL = ("ours", "HDO 0.5"), ("ours", "HDO 1")
OURS = [("ours", name) for name in ("AdamW", "FusedAdam", "HDO 0", "HDO 0.5", "HDO 1")]
SIDES = [("FSDP2", "HDO 0.5"), *OURS]


def of_sides(sides: Sequence[Side], **settings: Any) -> dict[str, Case]:
    """Every side against the reference, with the same settings."""
    reference = side(*REFERENCE, **settings)
    return {" with ".join(one): (side(*one, **settings), reference) for one in sides}


def of_settings(settings: Mapping[str, Settings]) -> dict[str, Case]:
    """Settings of a program besides the engine and the optimizer."""
    return {name: (side(*HALF, **own), side(*REFERENCE, **own)) for name, own in settings.items()}


def of_resumes(
    name: str, pairs: Sequence[tuple[Side, Side]], own: Settings, reference: Settings
) -> dict[str, Case]:
    """Saved by the first of two sides and loaded by the second, against an undisturbed run."""
    return {
        f"{name}, {' with '.join(saved)}, then {' with '.join(loaded)}": (
            side(*saved, **own, resume_on=loaded),
            side(*REFERENCE, **reference),
        )
        for saved, loaded in pairs
    }


def accelerate_cases() -> dict[str, Case]:
    whole = {"cpu_ram_efficient_loading": False}
    on_fsdp2 = [("FSDP2", name) for _, name in OURS if name != "AdamW"]
    sharded = [(("FSDP2", "HDO 0.5"), ("FSDP2", "HDO 0.5")), (HALF, HALF), (REFERENCE, HALF)]
    full = [(HALF, HALF), (("ours", "AdamW"), ("ours", "FusedAdam"))]
    pairs = {
        "SHARDED_STATE_DICT": [*sharded, (ALL, REFERENCE)],
        "FULL_STATE_DICT": [*full, (REFERENCE, ("FSDP2", "HDO 1"))],
    }
    settings: dict[str, Settings] = {
        "sharded by the program": {"plugin": None},
        "accumulation": {"plugin": whole, "accumulation": 2},
        "tied weights": {"plugin": whole, "is_tied": True},
        "activation checkpointing": {"plugin": whole | {"activation_checkpointing": True}},
        "loaded on meta": {"plugin": {"cpu_ram_efficient_loading": True}},
        "compiled layers": {"plugin": whole, "is_compiled": True},
    }
    cases = of_sides([*on_fsdp2, *OURS], plugin=whole) | of_settings(settings)
    for kind, both in pairs.items():
        own = {"plugin": whole | {"state_dict_type": kind}}
        cases |= of_resumes(kind, both, own, {"plugin": whole})
    return cases


def fabric_cases() -> dict[str, Case]:
    settings: dict[str, Settings] = {
        "DDP": {"strategy": "ddp"},
        "accumulation": {"accumulation": 2},
        "bf16-mixed": {"precision": "bf16-mixed"},
        "on meta": {"is_on_meta": True},
        "compiled layers": {"is_compiled": True},
    }
    pairs = {
        "sharded": [(HALF, HALF), (REFERENCE, HALF), (ALL, REFERENCE)],
        "one file": [(HALF, HALF), (("ours", "AdamW"), ("ours", "FusedAdam"))],
    }
    cases = of_sides(SIDES) | of_settings(settings)
    in_bf16 = {"precision": "bf16-true"}
    cases["bf16-true"] = (side("ours", "AdamW", **in_bf16), side(*REFERENCE, **in_bf16))
    # AdamW keeps its states in bf16, ours in fp32.
    cast_later = {"strategy": "ddp", "precision": "bf16-true"}
    cases["bf16-true, cast after the optimizer was made"] = (
        side(*HALF, **cast_later),
        side("ours", "FusedAdam", **cast_later),
    )
    for strategy, both in pairs.items():
        cases |= of_resumes(strategy, both, {"strategy": strategy}, {})
    return cases


def peft_cases() -> dict[str, Case]:
    reference = side(*REFERENCE)
    loads = {f"loaded by {way}": way for way in ("shards", "replicas", "whole tensors", "file")}
    cases = of_sides(SIDES)
    cases |= {name: (side(*HALF, load=way), reference) for name, way in loads.items()}
    for flag in ("has_merged", "is_compiled"):
        cases[flag] = (side(*HALF, **{flag: True}), reference)
    cases["bf16"] = (side("ours", "AdamW", is_bf16=True), side(*REFERENCE, is_bf16=True))
    return cases


FULL = {"version": 2, "state_dict_type": "FULL_STATE_DICT"}
SHARDED = {"version": 2, "state_dict_type": "SHARDED_STATE_DICT"}


def trainer_cases() -> dict[str, Case]:
    settings: dict[str, Settings] = {
        "DDP": {"fsdp": None},
        "accumulation": {"fsdp": FULL, "gradient_accumulation_steps": 2},
        "activation checkpointing": {"fsdp": FULL | {"activation_checkpointing": True}},
        "LoRA": {"fsdp": FULL, "has_adapters": True},
        "compiled": {"fsdp": FULL, "torch_compile": True, "torch_compile_backend": "aot_eager"},
    }
    cases = of_sides([("FSDP2", "FusedAdam"), *SIDES], fsdp=FULL) | of_settings(settings)
    for name, fsdp in {"DDP": None, "full": FULL, "sharded": SHARDED}.items():
        run = side(*HALF, fsdp=fsdp, is_resumed=True)
        cases[f"{name}, resumed"] = (run, side(*REFERENCE, fsdp=fsdp))
    return cases


def trl_cases() -> dict[str, Case]:
    settings: dict[str, Settings] = {
        "DPO": {"fsdp": FULL, "method": "DPO"},
        "LoRA": {"fsdp": FULL, "has_adapters": True},
        "DDP": {"fsdp": None},
    }
    sides = [("FSDP2", "HDO 0.5"), ("ours", "AdamW"), ("ours", "FusedAdam"), HALF]
    cases = of_sides(sides, fsdp=FULL) | of_settings(settings)
    cases["resumed"] = (side(*HALF, fsdp=FULL, is_resumed=True), side(*REFERENCE, fsdp=FULL))
    return cases


CASES = {
    "accelerate_job": accelerate_cases(),
    "fabric_job": fabric_cases(),
    "peft_job": peft_cases(),
    "trainer_job": trainer_cases(),
    "trl_job": trl_cases(),
}


@pytest.fixture(scope="module")
def runs(request: pytest.FixtureRequest) -> PeerRuns:
    return PeerRuns(request.param, CASES[request.param])


@pytest.mark.parametrize(
    ("runs", "job", "case"),
    [(job, job, case) for job, cases in CASES.items() for case in cases],
    indirect=["runs"],
    scope="module",
)
def test_a_library_trains_and_resumes_as_with_adamw_on_fsdp2(
    runs: PeerRuns, job: str, case: str
) -> None:
    run, reference = CASES[job][case]
    tolerance = 5e-6 if job in ("trainer_job", "trl_job") else 2e-6
    assert runs[run] == pytest.approx(runs[reference], rel=tolerance)
