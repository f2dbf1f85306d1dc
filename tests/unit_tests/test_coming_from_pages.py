"""The pages for those who come from DeepSpeed and torchtitan: their flags exist, and their commands
mean what the tables say. test_documentation.py runs their programs.
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.fsdp import FSDPModule, fully_shard

from megatron.training.arguments import known_flags, parse_config
from megatron.training.config import RunConfig
from megatron.training.tokenizer import train_bpe
from tests.helpers.doc_commands import DOCS, commands_in, section_of

PAGES = ("coming-from-deepspeed.md", "coming-from-torchtitan.md")
ELSEWHERE = {"--max-restarts", "--nnodes", "--safe_serialization"}  # torchrun's, DeepSpeed's
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


def config_of(page: str, folder: Path) -> RunConfig:
    """What the page's command sets, in a folder where the files that it names are."""
    (command,) = commands_in((DOCS / page).read_text())
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
    """The current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_of_a_page_exists(page: str) -> None:
    text = re.sub(r"torchrun .*|launch .*pretrain_gpt.py", "", (DOCS / page).read_text())
    named = set(re.findall(r"(?<=[\s`])--[a-z][\w-]*", text))
    assert len(named) > 30
    assert named - ELSEWHERE <= {"--config", *known_flags()}


def test_the_command_for_a_configuration_of_deepspeed_says_the_same(folder: Path) -> None:
    page = (DOCS / PAGES[0]).read_text()
    (block,) = re.findall(r"```json\n(.*?)```", page, re.S)
    theirs: dict[str, Any] = json.loads(block)
    ours = config_of(PAGES[0], folder)

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


def test_the_command_for_what_torchtitan_has_saved_is_understood(folder: Path) -> None:
    config = config_of(PAGES[1], folder)
    assert config.checkpoint.load_dcp == "outputs/checkpoint/step-1000"


def test_the_section_on_fsdp2_names_all_that_fsdp2_offers() -> None:
    section = section_of("coming-from.md", "PyTorch FSDP2")
    methods = [name for name in vars(FSDPModule) if not name.startswith("_")]
    assert len(methods) > 10
    arguments = inspect.signature(fully_shard).parameters
    assert [name for name in (*methods, *arguments) if name not in section] == []
