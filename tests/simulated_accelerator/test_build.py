"""Building the simulated accelerator: once, or not at all with a reason."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import pytest

from tests.helpers.ranks import RankError, prepare_simulator, run_ranks
from tests.simulated_accelerator import build

COMPILER = """#!{python}
import sys, time
with open({log!r}, "a") as log:
    log.write("compiled\\n")
time.sleep(0.1)
open(sys.argv[sys.argv.index("-o") + 1], "w").write("a library")
"""


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache, and a compiler that takes no time."""
    compiler = tmp_path / "compiler"
    compiler.write_text(COMPILER.format(python=sys.executable, log=str(tmp_path / "log")))
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("SIMULATED_ACCELERATOR_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_processes_that_build_at_once_all_find_a_whole_library(cache):
    texts: list[str] = []
    threads = [
        threading.Thread(target=lambda: texts.append(build.ensure_built().read_text()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert texts == ["a library"] * 4
    assert [path.suffix for path in cache.iterdir()] == [".so"], "temporary files are removed"


@pytest.mark.usefixtures("cache")
def test_it_is_built_again_for_other_sources_only(monkeypatch, tmp_path):
    first = build.ensure_built()
    assert build.ensure_built() == first
    sources = tmp_path / "sources"
    sources.mkdir()
    (sources / "other.cpp").write_text("// other")
    monkeypatch.setattr(build, "_SOURCES", sources)
    assert build.ensure_built() != first
    assert (tmp_path / "log").read_text().count("compiled") == 2


@pytest.mark.usefixtures("cache")
def test_without_a_compiler_there_is_a_reason_to_skip(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "g++" in build.missing_for_build()
    with pytest.raises(build.BuildError):
        build.ensure_built()


@pytest.mark.sim
def test_ranks_of_the_cpu_refuse_a_function_that_makes_the_accelerator_known() -> None:
    def makes_it_known() -> None:
        import tests.simulated_accelerator.device  # noqa: F401

    prepare_simulator()
    with pytest.raises(RankError, match=r"makes_it_known.*run it with device='sim'"):
        run_ranks(2, makes_it_known)
