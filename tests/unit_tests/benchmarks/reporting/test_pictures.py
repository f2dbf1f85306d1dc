"""What pictures show, and that they can be drawn from any finite figures."""

from __future__ import annotations

import math
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from benchmarks.helpers.result import Measurement, NotRun, Ratio
from benchmarks.reporting.contents import Memory, Peers, Ratios, Scaling, margin, pictures
from benchmarks.reporting.drawing import side_colors, svg_of
from benchmarks.reporting.stored import stored_results
from megatron_hybrid.charts import THEMES
from tests.helpers.result_files import write_result_file

SIDES = ("FSDP2 + CPUOffloadPolicy", "ours", "DeepSpeed ZeRO-3 offload")


def write_results(folder: Path, figures: list[float]) -> None:
    """A result for each picture, of eight figures."""
    *values, at_least, at_most = figures
    ratios = [Ratio("a < b & c", value, at_least, at_most) for value in values]
    ratios += [
        Ratio("floor $x_1$", values[0], at_least),
        Ratio("ceiling", values[1], None, at_most),
    ]
    write_result_file(folder, "offload_step", ratios=ratios, facts=memory_facts(values))

    end_to_end = [
        Measurement(group, side, unit, tuple(values[index:]))
        for group, unit in (("tokens/s", "tokens/s"), ("peak memory", "bytes"), ("stall", "s"))
        for index, side in enumerate(SIDES)
    ]
    not_run = [NotRun("Megatron-LM", "it needs CUDA, " * 12)]
    write_result_file(folder, "end_to_end", end_to_end, not_run=not_run)
    growing = [
        Measurement(f"{2**index} ranks", side, "s", (value,))
        for side in ("rank 0", "DCP", "DCP, even")
        for index, value in enumerate(values)
    ]
    write_result_file(folder, "checkpoint_plan", growing)


def memory_facts(values: list[float]) -> dict[str, object]:
    kinds = ("compute weights", "gradients", "exp_avg")
    sides = {
        side: {
            kind: {"device": values[0], "host": value}
            for kind, value in zip(kinds, values, strict=False)
        }
        for side in ("on the device", "offloaded")
    }
    return {"memory_by_kind": sides}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_results(tmp_path, [1.5, 0.5, 3.0, 40.0, 0.0, 2.0, 1.0, 4.0])
    return tmp_path


def test_each_picture_takes_what_it_needs(folder: Path) -> None:
    found = pictures(stored_results(folder))
    ratios, peers, scaling, memory = found.values()
    assert isinstance(ratios, Ratios)
    assert isinstance(peers, Peers)
    assert isinstance(scaling, Scaling)
    assert isinstance(memory, Memory)

    assert list(ratios.groups) == ["offload_step"]
    assert peers.sides[0] == "ours"
    assert [panel.is_rate for panel in peers.panels] == [True, False, False]
    line = scaling.panels[0].lines[0]
    assert (line.side, line.is_ours, line.points[:2]) == (
        "rank 0",
        True,
        ((1, 1.5), (2, 0.5)),
    )
    assert [line.is_ours for line in scaling.panels[0].lines] == [True, False]
    assert [(bar.side, bar.place) for bar in memory.bars][:2] == [
        ("on the device", "device"),
        ("on the device", "host"),
    ]


@pytest.mark.parametrize(
    ("ratio", "times"),
    [
        (Ratio("", 3.0, at_least=1.5), 2.0),
        (Ratio("", 3.0, at_most=1.5), 0.5),
        (Ratio("", 1.0, at_least=0.5, at_most=1.25), 1.25),
        (Ratio("", 0.0, at_most=16), math.inf),
        (Ratio("", 0.0, at_most=0), 1.0),
        (Ratio("", -1.0, at_least=2), 0.0),
    ],
)
def test_a_margin_is_how_many_times_better_than_the_bar_a_ratio_is(
    ratio: Ratio, times: float
) -> None:
    assert margin(ratio) == times


def test_without_figures_there_is_no_picture(tmp_path: Path) -> None:
    write_result_file(tmp_path, "end_to_end", ratios=[Ratio("without a bar", 1.0)])
    write_result_file(tmp_path, "offload_step", facts={"memory_by_kind": {}})
    write_result_file(tmp_path, "checkpoint_plan", [Measurement("8 ranks", "ours", "s", (1.0,))])
    assert pictures(stored_results(tmp_path)) == {}


def texts_of(svg: str) -> list[str]:
    return [
        element.text or ""
        for element in ET.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_pictures_say_their_machine_and_date_and_are_drawn_the_same_each_time(
    folder: Path,
) -> None:
    for contents in pictures(stored_results(folder)).values():
        light, dark = (svg_of(contents, theme) for theme in THEMES)
        assert "A CPU, 2 cores, 24 GiB, torch 2.13.0 · 2026-05-03 · commit 0123456" in texts_of(
            light
        )
        assert texts_of(light) == texts_of(dark)
        assert light != dark
        assert len(light.encode()) < 60_000
        assert svg_of(contents, "light") == light


def test_what_missed_its_bar_is_said_in_words(folder: Path) -> None:
    texts = texts_of(svg_of(pictures(stored_results(folder))["ratios"], "light"))
    assert texts.count("missed") == 3  # of 1.5, 0.5, 3, 40, 0 and 2 between 1 and 4
    assert "≥ 1 and ≤ 4" in texts
    assert "a < b & c" in texts


def test_a_peer_keeps_its_colour_and_ours_is_its_own() -> None:
    for theme in THEMES.values():
        few = side_colors(["ours", "FSDP2"], theme)
        many = side_colors(["a", "b", "DeepSpeed", "FSDP2 + CPUOffloadPolicy", "ours"], theme)
        assert few["ours"] == many["ours"] == theme.ours
        assert few["FSDP2"] == many["FSDP2 + CPUOffloadPolicy"]
        assert len({*many.values()}) == len(many)


# Of which sums are finite, too.
FIGURES = st.lists(st.floats(-1e300, 1e300), min_size=8, max_size=8)


def draw_all(folder: Path, figures: list[float]) -> None:
    write_results(folder, figures)
    for contents in pictures(stored_results(folder)).values():
        svg = svg_of(contents, "dark")
        ET.fromstring(svg)
        assert "nan" not in svg.replace("nanosecond", "")


# To shrink an example takes minutes, and any example says what is wrong.
PHASES = (Phase.explicit, Phase.reuse, Phase.generate)
SETTINGS = {"deadline": None, "suppress_health_check": [HealthCheck.function_scoped_fixture]}


@settings(max_examples=5, phases=PHASES, **SETTINGS)
@given(FIGURES)
def test_any_finite_figures_can_be_drawn(tmp_path: Path, figures: list[float]) -> None:
    draw_all(tmp_path, figures)


@pytest.mark.wide
@settings(max_examples=60, phases=PHASES, **SETTINGS)
@given(FIGURES)
def test_any_finite_figures_can_be_drawn_widely(tmp_path: Path, figures: list[float]) -> None:
    draw_all(tmp_path, figures)
