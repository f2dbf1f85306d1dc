"""`--help` of the programs that train: every flag of a run, by subject."""

from __future__ import annotations

import argparse
import dataclasses
import inspect
from collections.abc import Collection
from typing import Any

from megatron.core.config import DeviceConfig, ExecutionConfig
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.dist_checkpointing.config import CheckpointConfig
from megatron.core.distributed.config import DataParallelConfig
from megatron.core.help_format import OnOffAction, ProgramParser
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRScheduleConfig
from megatron.core.options import Field, options_of
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.latent_config import LatentAttentionOptions
from megatron.core.transformer.moe_config import MoeOptions
from megatron.core.transformer.rotary_config import RotaryOptions
from megatron.training.config import (
    LoggingConfig,
    RecoverConfig,
    StopConfig,
    TrainingConfig,
    all_options,
    section_classes,
)
from megatron.training.health.inject import InjectConfig
from megatron.training.tokenizer import TokenizerConfig

# Groups in the order in which a user needs them. A group has the options of the classes that
# declare them, but for options that another group names.
GROUPS: dict[str, tuple[type[Any] | str, ...]] = {
    "model": (TransformerConfig,),
    "model: positions": (RotaryOptions,),
    "model: mixture of experts": (MoeOptions,),
    "model: multi-head latent attention": (LatentAttentionOptions,),
    "model: vision tower": (VisionConfig,),
    "data and tokenizer": (GPTDatasetConfig, TokenizerConfig),
    "training": (TrainingConfig,),
    "learning rate": (LRScheduleConfig,),
    "parallelism": (DataParallelConfig,),
    "optimizer": (OptimizerConfig,),
    "offload to host memory": (
        "optimizer_cpu_offload",
        "optimizer_offload_fraction",
        "optimizer_offload_experts_first",
        "overlap_cpu_optimizer_d2h_h2d",
        "overlap_optimizer_with_forward",
        "optimizer_update_on_device",
        "optimizer_early_update_gib",
        "pin_cpu_grads",
        "pin_cpu_params",
        "host_threads",
        "activation_offload",
        "activation_offload_fraction",
        "activation_offload_gib",
        "activation_offload_min_kib",
    ),
    "precision": (
        "bf16",
        "fp16",
        "tf32",
        "loss_scale",
        "initial_loss_scale",
        "min_loss_scale",
        "loss_scale_window",
        "hysteresis",
        "main_params_dtype",
        "main_grads_dtype",
        "exp_avg_dtype",
        "exp_avg_sq_dtype",
        "megatron_fsdp_grad_comm_dtype",
        LowPrecisionConfig,
    ),
    "checkpoints": (CheckpointConfig,),
    "logging": (LoggingConfig,),
    "recovery and the end of a run": (RecoverConfig, StopConfig),
    "device": (DeviceConfig, ExecutionConfig, "recompute_granularity"),
    "faults for tests and drills": (InjectConfig,),
    "compatibility with other programs": (
        "use_torch_fsdp2",
        "torch_fsdp2_reshard_after_forward",
        "ckpt_format",
        "dist_ckpt_strictness",
        "load_skip_keys",
        "load_dcp",
        "dcp_key_map",
        "hf_architecture",
        "moe_expert_rows",
        "video_token_id",
        "override_opt_param_scheduler",
        "use_checkpoint_opt_param_scheduler",
    ),
}
# Their options without a default are set by --hf-model, too.
_FROM_HF_MODEL = {
    field.name for each in (TransformerConfig, VisionConfig) for field in options_of(each)
}
_EPILOG = """Megatron-LM's other flags: flags without effect here are accepted, and an error names
what to write instead of the rest (docs/coming-from.md)."""


def build_parser(description: str, rejected: Collection[str] = ()) -> argparse.ArgumentParser:
    """A parser that shows the flags, by group.

    Args:
        description: one sentence about the program.
        rejected: names of options that the program rejects, which are left out.
    """
    parser = ProgramParser(description=description, epilog=_EPILOG, allow_abbrev=False)
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="YAML file with any of these flags as keys, without the dashes in front; a flag on "
        "the command line overrides the file",
    )
    for title, fields in _grouped().items():
        shown = [field for field in fields if field.name not in rejected]
        if shown:
            group = parser.add_argument_group(title)
            for field in shown:
                _add_flags(group, field)
    return parser


def _grouped() -> dict[str, list[Field]]:
    """Options by group, in the order of `GROUPS` and, within a class, of declaration."""
    named = {member for members in GROUPS.values() for member in members}
    by_member: dict[type[Any] | str, list[Field]] = {}
    for config_class in section_classes().values():
        for field in options_of(config_class):
            is_named = field.name in named
            member = field.name if is_named else _declaring_class(config_class, field)
            by_member.setdefault(member, []).append(field)
    return {
        title: [field for member in members for field in by_member.pop(member)]
        for title, members in GROUPS.items()
    }


def _declaring_class(config_class: type[Any], field: Field) -> type[Any]:
    bases = config_class.__mro__
    return next(base for base in bases if field.name in inspect.get_annotations(base))


def _add_flags(group: argparse._ArgumentGroup, field: Field) -> None:
    if field.scalar is bool:
        group.add_argument(
            field.flag,
            field.off_flag,
            action=OnOffAction,
            dest=field.name,
            default=argparse.SUPPRESS,
            help=_help_line(field),
        )
        return
    group.add_argument(
        field.flag,
        dest=field.name,
        nargs="+" if field.is_list else "?" if field.option.bare is not None else None,
        metavar=field.metavar,
        default=argparse.SUPPRESS,
        help=_help_line(field),
    )


def _help_line(field: Field) -> str:
    """The help line of a flag: its effect, its default, and the flags that it needs."""
    line, notes = field.option.help, []
    if field.default not in (None, (), dataclasses.MISSING):
        is_switch = field.scalar is bool
        default = ("off", "on")[field.default] if is_switch else field.default
        notes.append(f"default: {default}")
    elif "(default: " in line and line.endswith(")"):
        line, _, derived = line[:-1].rpartition(" (default: ")
        notes.append(f"default: {derived}")
    if field.default is dataclasses.MISSING:
        has_model = field.name in _FROM_HF_MODEL
        notes.append("required, unless --hf-model sets it" if has_model else "required")
    if needed := _needed_flags(field):
        notes.append(f"needs {' and '.join(needed)}")
    return (f"{line} ({'; '.join(notes)})" if notes else line).replace("%", "%%")


def _needed_flags(field: Field) -> list[str]:
    """Flags without which this one is an error, but for values that are the default."""
    fields = all_options()
    needed = []
    if field.option.requires:
        needed.append(" or ".join(fields[name].flag for name in field.option.requires))
    for name, wanted in field.option.no_effect_unless:
        other = fields[name]
        # None: resolved to what most runs have.
        if other.default not in (None, wanted):
            needed.append(other.flag if wanted is True else f"{other.flag} {wanted}")
    return needed
