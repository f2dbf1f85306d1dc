"""docs/coming-from.md: its flags exist, its commands and tables are those of the code.

test_documentation.py runs its programs. `python -m tests.unit_tests.test_coming_from_page` prints
the table of Megatron-LM's flags.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule, fully_shard

from megatron.core.options import ConfigError
from megatron.training.arguments import known_flags, parse_command_line, parse_config
from megatron.training.config import RunConfig
from megatron.training.flag_answers import Ruling, answer_rows
from megatron.training.tokenizer import train_bpe
from tests.helpers.doc_commands import commands_in, section_of

PAGE = "coming-from.md"
# Flags of torchrun and of DeepSpeed.
ELSEWHERE = {"--max-restarts", "--nnodes", "--safe_serialization"}
# As transformers saves it; the sizes do not matter here.
MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 0,
}


def config_of(section: str, folder: Path) -> RunConfig:
    """The configuration that a section's command sets, in a directory with the files it names."""
    (command,) = commands_in(section_of(PAGE, section))
    model = folder / command.argv[command.argv.index("--hf-model") + 1]
    model.mkdir(parents=True)
    (model / "config.json").write_text(json.dumps(MODEL))
    train_bpe(["a text"], 300, str(model / "tokenizer.json"))
    data = folder / command.argv[command.argv.index("--data-path") + 1]
    data.parent.mkdir()
    for suffix in (".bin", ".idx"):
        data.with_suffix(suffix).touch()
    return parse_config(command.argv, command.num_ranks)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("section", ["DeepSpeed", "torchtitan"])
def test_every_flag_of_a_section_exists(section: str) -> None:
    text = re.sub(r"torchrun .*|launch .*pretrain_gpt.py", "", section_of(PAGE, section))
    named = set(re.findall(r"(?<=[\s`])--[a-z][\w-]*", text))
    assert len(named) > 30
    assert named - ELSEWHERE <= known_flags().keys()


def test_the_command_for_a_configuration_of_deepspeed_sets_the_same(folder: Path) -> None:
    (block,) = re.findall(r"```json\n(.*?)```", section_of(PAGE, "DeepSpeed"), re.S)
    theirs: dict[str, Any] = json.loads(block)
    ours = config_of("DeepSpeed", folder)

    assert ours.training.global_batch_size == theirs["train_batch_size"]
    assert ours.training.micro_batch_size == theirs["train_micro_batch_size_per_gpu"]
    assert ours.training.bf16
    assert ours.optimizer.clip_grad == theirs["gradient_clipping"]
    adam = theirs["optimizer"]["params"]
    assert [ours.optimizer.adam_beta1, ours.optimizer.adam_beta2] == adam["betas"]
    assert ours.optimizer.adam_eps == adam["eps"]
    assert ours.optimizer.weight_decay == adam["weight_decay"]
    schedule = theirs["scheduler"]["params"]
    assert ours.schedule.lr == adam["lr"]
    assert ours.schedule.min_lr == pytest.approx(adam["lr"] * schedule["cos_min_ratio"])
    assert ours.schedule.lr_warmup_iters == schedule["warmup_num_steps"]
    assert ours.training.train_iters == schedule["total_num_steps"]
    offload = theirs["zero_optimization"]["offload_optimizer"]
    assert ours.optimizer.optimizer_cpu_offload
    assert ours.optimizer.optimizer_offload_fraction == offload["ratio"]
    assert ours.parallel.data_parallel_sharding_strategy == "optim_grads_params"


def test_the_command_for_a_checkpoint_of_torchtitan_is_understood(folder: Path) -> None:
    config = config_of("torchtitan", folder)
    assert config.checkpoint.load_dcp == "outputs/checkpoint/step-1000"


def test_the_section_on_fsdp2_names_all_that_fsdp2_offers() -> None:
    section = section_of(PAGE, "PyTorch FSDP2")
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    assert len(methods) > 10
    arguments = inspect.signature(fully_shard).parameters
    assert [name for name in (*methods, *arguments) if name not in section] == []


def test_the_message_about_a_script_of_megatrons_is_the_one_that_is_shown() -> None:
    section = section_of(PAGE, "Megatron-LM")
    (command,) = commands_in(section)
    with pytest.raises(ConfigError) as error:
        parse_command_line(command.argv, command.num_ranks)
    assert f"```\npretrain_gpt.py: {error.value.report()}\n```" in section


def test_the_table_of_megatrons_flags_is_that_of_the_code() -> None:
    table = section_of(PAGE, "Megatron-LM").split("\n### Flags with another name\n")[1]
    assert [line for line in table.splitlines() if line.startswith("| `--")] == table_lines()


def table_lines() -> list[str]:
    """The rows of the table of flags that have another name here."""
    lines = []
    for row in answer_rows():
        if row.ruling is Ruling.REPLACE:
            flags = " ".join(f"`{flag}`" for flag in row.flags)
            values = " ".join(f"`{value}`" for value in row.values)
            flags = f"{flags} with {values}" if values else flags
            unless = f", unless `{row.unless}` is given" if row.unless else ""
            lines.append(f"| {flags}{unless} | `{row.use}` |")
    return lines


if __name__ == "__main__":
    print(*table_lines(), sep="\n")
