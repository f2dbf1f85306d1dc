"""The programs in documents run: every block of Python of README.md and docs/ is a script.

Each runs in new processes without a process group, in an empty directory, under the command in its
first line (`# torchrun --nproc-per-node 2 script.py`), or else as `python script.py`. The processes
are forks of one that has imported torch, with the variables that torchrun sets.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import re
import shutil
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
from torch.distributed import TCPStore

import pretrain_gpt
from tests.helpers.ranks import PRELOADED

ROOT = Path(__file__).resolve().parents[2]
PATIENCE = 600.0  # seconds
_FENCE = re.compile(r"^ *```(\w*)")
_COMMAND = re.compile(r"# torchrun --nproc-per-node (\d+) script\.py$")


class Script(NamedTuple):
    """A block of Python."""

    page: str
    line: int  # that the block starts behind
    text: str

    @property
    def num_ranks(self) -> int | None:
        """Ranks that its first line has torchrun start; None: without torchrun."""
        command = _COMMAND.match(self.text.splitlines()[0])
        return None if command is None else int(command[1])


def scripts_in(page: str, text: str) -> list[Script]:
    """The blocks of Python of a page."""
    found: list[Script] = []
    language: str | None = None  # of the block that is open
    start = 0
    lines = text.splitlines()
    for number, line in enumerate(lines, start=1):
        fence = _FENCE.match(line)
        if fence is None:
            continue
        if language is None:
            language, start = fence[1], number
        else:
            if language in ("python", "py"):
                found.append(Script(page, start, "\n".join(lines[start : number - 1])))
            language = None
    return found


def run(script: Script, folder: Path) -> None:
    """AssertionError with the output unless the script succeeds on all its ranks."""
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    count = script.num_ranks
    store = None if count is None else TCPStore("127.0.0.1", 0, is_master=True)
    processes = []
    for rank in range(count or 1):
        variables = {} if store is None else _variables(rank, count or 1, store.port)
        logs = str(folder / f"rank{rank}.log")
        process = context.Process(target=_execute, args=(script, str(folder), variables, logs))
        process.start()
        processes.append(process)

    for process in processes:
        process.join(PATIENCE)
        if process.is_alive():
            process.kill()
            process.join()
    output = "\n".join(path.read_text() for path in sorted(folder.glob("rank*.log")))
    assert [process.exitcode for process in processes] == [0] * len(processes), output


def _variables(rank: int, world_size: int, port: int) -> dict[str, str]:
    """The environment that torchrun gives a rank, whose agent hosts the store."""
    ranks = {"RANK": rank, "LOCAL_RANK": rank}
    sizes = {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size}
    agent = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_USE_AGENT_STORE": True}
    return {name: str(value) for name, value in {**ranks, **sizes, **agent}.items()}


def _execute(script: Script, folder: str, variables: dict[str, str], logs: str) -> None:
    with Path(logs).open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    os.environ.update(variables)
    os.chdir(folder)
    sys.argv = ["script.py"]
    # Tracebacks, which multiprocessing prints, have the document's lines.
    code = compile("\n" * script.line + script.text, script.page, "exec")
    exec(code, {"__name__": "__main__"})


SCRIPTS = [
    script
    for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
    for script in scripts_in(str(path.relative_to(ROOT)), path.read_text())
]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run's checkpoints at the iterations that the pages name, with weights for Hugging Face."""
    folder = tmp_path_factory.mktemp("runs")
    model = "--num-layers 1 --hidden-size 256 --num-attention-heads 4 --normalization RMSNorm "
    model += "--swiglu --disable-bias-linear --tokenizer-type NullTokenizer --vocab-size 64 "
    data = "--mock-data --seq-length 8 --micro-batch-size 1 --global-batch-size 1 --num-workers 0 "
    steps = "--train-iters 1 --eval-iters 0 --lr 1e-3 --bf16 --save-hf-weights "
    assert pretrain_gpt.main([*(model + data + steps).split(), "--save", str(folder)]) == 0
    for iteration in ("0000100", "0001000"):
        shutil.copytree(folder / "iter_0000001", folder / f"iter_{iteration}")
    return folder


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: f"{script.page}:{script.line}")
def test_a_block_of_a_document_runs_as_a_script(
    script: Script, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if "transformers" in script.text:
        pytest.importorskip("transformers")
    if "runs/gpt" in script.text:
        (tmp_path / "runs").mkdir()
        (tmp_path / "runs" / "gpt").symlink_to(request.getfixturevalue("runs"))
    run(script, tmp_path)


def test_the_pages_that_must_have_programs_have_them() -> None:
    assert {script.page for script in SCRIPTS} >= {
        *(f"docs/{page}.md" for page in ("offload", "checkpoints", "fsdp", "vision")),
        "docs/coming-from.md",
    }


def test_blocks_share_nothing_and_errors_have_their_line(tmp_path: Path) -> None:
    blocks = [("python", "a = 1"), ("bash", "false"), ("python", "c = 2\nb = a")]
    text = "# T\n\n## One\n\n" + "\n\n".join(f"```{kind}\n{own}\n```" for kind, own in blocks)
    first, second = scripts_in("docs/some.md", text)
    assert (first.line, second.line) == (5, 13)
    run(first, tmp_path)
    with pytest.raises(AssertionError, match=r'(?s)"docs/some\.md", line 15.*NameError'):
        run(second, tmp_path)
