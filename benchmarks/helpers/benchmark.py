"""`Benchmark`: the declaration of a benchmark module."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Benchmark:
    """The module-level constant `BENCHMARK`.

    Its arguments are literals, because the registry reads them without importing the module:
    listing needs no torch, and a module may import packages that this interpreter lacks.

    Attributes:
        name: The module's name.
        question: One sentence that names the compared sides.
        ranks: 1 for a plain process; more for torchrun with so many ranks, one thread each.
        full: The command line of the full run.
        quick: The command line of `--quick`.
        environment: None for this interpreter, or the name of a peer whose environment
            `.venv-peers/NAME` runs the benchmark where it has been made. Elsewhere this interpreter
            does, and the peer's side is not run.
        needs_accelerator: Whether figures without an accelerator are useless. Without one, the
            benchmark runs with `--quick` only, on the CPU, to show that it runs.
    """

    name: str
    question: str
    ranks: int
    full: tuple[str, ...]
    quick: tuple[str, ...]
    environment: str | None = None
    needs_accelerator: bool = False

    def __post_init__(self) -> None:
        if self.ranks < 1:
            raise ValueError(f"Expected at least 1 rank for {self.name}, got {self.ranks}.")
