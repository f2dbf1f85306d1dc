"""The section of docs/offload.md about planning shows what the program prints."""

from __future__ import annotations

import json
import re
import shlex

import pytest

from megatron_hybrid.plan.command import main
from tests.helpers.doc_commands import section_of
from tests.unit_tests.core.models.families.helpers.published import LLAMA_3_2_1B

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
SECTION = section_of("offload.md", "Plan a run")


def test_the_page_shows_what_its_command_prints(tmp_path, monkeypatch, capsys):
    folder = tmp_path / "models" / "Meta-Llama-3-8B"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(LLAMA_3_8B))
    monkeypatch.chdir(tmp_path)

    example = r"```bash\npython -m megatron_hybrid plan ([^`]*)```\n\n```\n([^`]*)```"
    ((command, shown),) = re.findall(example, SECTION)
    assert main(shlex.split(command.replace("\\\n", " "))) == 0
    assert capsys.readouterr().out == shown


def test_every_flag_of_the_plan_is_on_its_page(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    flags = set(re.findall(r"^  (--[a-z-]+)", capsys.readouterr().out, re.M))
    assert len(flags) > 10
    assert [flag for flag in sorted(flags) if flag not in SECTION] == []
