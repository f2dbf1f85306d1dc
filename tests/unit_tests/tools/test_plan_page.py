"""The examples of docs/planning.md are what the program prints."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from megatron_hybrid.plan.command import main
from tests.helpers.doc_commands import DOCS, section_of
from tests.unit_tests.core.models.families.helpers.published import LLAMA_3_2_1B, QWEN3_30B_A3B

# Llama 3 came before 3.2: no scaling of positions, untied, heads of the usual width.
LLAMA_3_8B = {
    name: value for name, value in LLAMA_3_2_1B.items() if name not in ("rope_scaling", "head_dim")
} | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
MODELS = {"Meta-Llama-3-8B": LLAMA_3_8B, "Qwen3-30B-A3B": QWEN3_30B_A3B}


@pytest.mark.parametrize("title", ["One GPU of 80 GB: Llama 3 8B", "Eight GPUs: Qwen3 30B-A3B"])
def test_the_page_shows_what_its_commands_print(tmp_path, monkeypatch, capsys, title):
    for name, config in MODELS.items():
        folder = tmp_path / "models" / name
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(config))
    monkeypatch.chdir(tmp_path)

    section = section_of("planning.md", title)
    (command,) = re.findall(r"```bash\npython -m megatron_hybrid plan (.*?)```", section, re.S)
    (shown,) = re.findall(r"```\n\n```\n(.*?)```", section, re.S)
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    assert capsys.readouterr().out == shown


def test_every_flag_of_the_plan_is_on_its_page(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    page = (DOCS / "planning.md").read_text()
    assert len(flags) > 10
    assert [flag for flag in sorted(flags) if flag not in page] == []
