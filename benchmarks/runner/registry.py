"""`python -m benchmarks list`, and which benchmarks there are: the modules of `benchmarks/`."""

from __future__ import annotations

import argparse
import ast
import difflib
import json
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.helpers.benchmark import Benchmark

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"
RESULTS = BENCHMARKS / "results"
QUICK_RESULTS = ROOT / "runs" / "benchmarks"  # figures of small sizes are not kept


def main(argv: Sequence[str]) -> int:
    """Prints all benchmarks."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks list", description="Prints all benchmarks."
    )
    parser.parse_args(argv)
    print("\n".join(lines(registered().values(), *map(seconds_of, (RESULTS, QUICK_RESULTS)))))
    return 0


def lines(
    benchmarks: Iterable[Benchmark], full: Mapping[str, float], quick: Mapping[str, float]
) -> Iterator[str]:
    """Each with its question below it, and the seconds that full and quick results took."""
    yield f"{'name':<18} {'ranks':>5} {'full':>7} {'quick':>7}  environment"
    for benchmark in benchmarks:
        yield (
            f"{benchmark.name:<18} {benchmark.ranks:>5} {_seconds(full.get(benchmark.name)):>7} "
            f"{_seconds(quick.get(benchmark.name)):>7}  {benchmark.environment or 'this one'}"
        )
        yield from textwrap.wrap(
            benchmark.question, 96, initial_indent="    ", subsequent_indent="    "
        )


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds:.0f} s"


def seconds_of(folder: Path) -> dict[str, float]:
    """The duration of each benchmark with a stored result, in seconds."""
    contents = (json.loads(path.read_text()) for path in folder.glob("*.json"))
    return {content["benchmark"]: content["seconds"] for content in contents}


def registered(folder: Path = BENCHMARKS) -> dict[str, Benchmark]:
    """By name. ValueError for a module that does not declare itself."""
    modules = sorted(path for path in folder.glob("*.py") if not path.stem.startswith("__"))
    return {path.stem: declaration(path) for path in modules}


def declaration(path: Path) -> Benchmark:
    """The `BENCHMARK` of a module, which is read and not imported.

    Importing would take seconds for each, and fails for a peer's benchmark wherever that peer is
    not installed.

    Raises:
        ValueError: without one, with one that is not made of literals, or under another name.
    """
    for statement in ast.parse(path.read_text(), str(path)).body:
        match statement:
            case ast.Assign(targets=[ast.Name("BENCHMARK")], value=value):
                pass
            case ast.AnnAssign(target=ast.Name("BENCHMARK"), value=value):
                pass
            case _:
                continue
        found = _from_call(value, path)
        if found.name != path.stem:
            raise ValueError(f"Expected the name {path.stem!r} in {path}, got {found.name!r}.")
        return found

    raise ValueError(f"Expected a module with `BENCHMARK = Benchmark(...)`, got {path}.")


def _from_call(value: ast.expr | None, path: Path) -> Benchmark:
    match value:
        case ast.Call(func=ast.Name("Benchmark"), args=[], keywords=keywords):
            pass
        case _:
            raise ValueError(
                f"Expected BENCHMARK in {path} to be Benchmark(...) with keyword arguments."
            )
    try:
        given = {keyword.arg or "**": ast.literal_eval(keyword.value) for keyword in keywords}
        return Benchmark(**given)
    except (ValueError, TypeError) as error:
        raise ValueError(f"Expected literals for BENCHMARK in {path}, got: {error}") from error


def chosen(known: dict[str, Benchmark], names: Sequence[str]) -> list[Benchmark]:
    """The named ones in the order of the names, each once, or all. ValueError with all unknown
    names, and the similar names of benchmarks.
    """
    unknown = [name for name in names if name not in known]
    if unknown:
        guesses = (_with_guesses(name, list(known)) for name in unknown)
        raise ValueError(
            f"Expected names of benchmarks, got {'; '.join(guesses)}. "
            "`python -m benchmarks list` names all."
        )
    return [known[name] for name in dict.fromkeys(names or known)]


def _with_guesses(name: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.5)
    near += [other for other in known if name in other and other not in near]
    return f"{name!r} (near: {', '.join(near)})" if near else repr(name)
