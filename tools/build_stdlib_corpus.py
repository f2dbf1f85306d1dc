"""Writes a real corpus that every CPython brings along: its standard library and the topics of its
help system.

One JSON object per line, {"text": ...}: first the English topics of `pydoc_data.topics`, then the
.py sources of the standard library, each group in sorted order. About 11 MB; the same Python gives
the same file.

    python tools/build_stdlib_corpus.py --output data/stdlib.jsonl
"""

from __future__ import annotations

import argparse
import json
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from pydoc_data import topics

from megatron.core.files import published
from megatron_hybrid.endings import run

# Installed packages, tests (broken sources on purpose, generated tables) and the file the topics
# come from.
_LEFT_OUT = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "__pycache__",
    "pydoc_data",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Writes the corpus and prints its size; returns the exit code."""
    parser = argparse.ArgumentParser(description="Writes the standard library as a JSONL corpus.")
    parser.add_argument("--output", type=Path, required=True, help="the .jsonl file to write")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    output.parent.mkdir(parents=True, exist_ok=True)
    num_documents = 0
    with published(output) as stream:
        for text in _texts(Path(sysconfig.get_path("stdlib"))):
            stream.write(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n")
            num_documents += 1
    print(f"{output}: {num_documents} documents, {output.stat().st_size / 1e6:.1f} MB")
    return 0


def _texts(library: Path) -> Iterator[str]:
    for _, text in sorted(topics.topics.items()):
        yield text
    for path in sorted(library.rglob("*.py")):
        if _LEFT_OUT.isdisjoint(path.relative_to(library).parts):
            try:
                text = path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue  # a few sources declare another encoding
            if text.strip():
                yield text


if __name__ == "__main__":
    sys.exit(run(main))
