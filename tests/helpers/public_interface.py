"""The public interface as text: names with their signatures, and programs with their flags.

    python -m tests.helpers.public_interface

writes the two files of tests/public_interface, with which test_public_interface.py compares the
code. Annotations are left out: callers depend on names, order and defaults.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import enum
import importlib
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any, NoReturn
from unittest import mock

from megatron.core.distributed.fsdp.fsdp2_methods import Fsdp2Methods
from megatron.core.help_format import OnOffAction
from megatron.training.arguments import known_flags
from megatron_hybrid.command_line import COMMANDS
from megatron_hybrid.parsers import TRAINERS, parser_of

FOLDER = Path(__file__).resolve().parents[1] / "public_interface"
NAMES, FLAGS = FOLDER / "names.txt", FOLDER / "flags.txt"
COMMAND = "python -m tests.helpers.public_interface"
_WIDTH = 100  # columns of a signature in one line

# Modules whose names are in `__all__`, and the public names of others.
PACKAGES = (
    "megatron.core.distributed.fsdp",
    "megatron.core.optimizer",
    "megatron.core.optimizer.cpu_offloading",
)
MEMBERS: dict[str, tuple[str, ...]] = {
    "megatron.core.activation_offload": ("ActivationOffload",),
    "megatron.core.datasets.answer_dataset": ("AnswerDataset",),
    "megatron.core.datasets.blended_dataset": ("BlendedDataset",),
    "megatron.core.datasets.gpt_dataset": ("GPTDataset",),
    "megatron.core.datasets.indexed_dataset": (
        "IndexedDataset",
        "IndexedDatasetBuilder",
        "bin_path",
        "idx_path",
        "optimal_dtype",
    ),
    "megatron.core.datasets.sampler": ("GlobalBatchSampler", "build_data_loader"),
    "megatron.core.device": ("Device",),
    "megatron.core.dist_checkpointing.errors": ("CheckpointError",),
    "megatron.core.dist_checkpointing.fsdp_checkpoint": ("load_checkpoint", "save_checkpoint"),
    "megatron.core.dist_checkpointing.save.manager": ("CheckpointManager",),
    "megatron.core.dist_checkpointing.state.collect": ("collect",),
    "megatron.core.dist_checkpointing.state.dcp_state": ("DCPState",),
    "megatron.core.distributed.config": ("DataParallelConfig",),
    "megatron.core.mesh": ("build_mesh",),
    "megatron.core.models.gpt.gpt_model": ("GPTModel",),
    "megatron.core.models.multimodal.patch_grid": ("PatchGrid", "decoder_positions"),
    "megatron.core.models.multimodal.vision_config": ("VisionConfig",),
    "megatron.core.models.multimodal.vision_language_model": ("Images", "VisionLanguageModel"),
    "megatron.core.optimizer.clip_grads": ("clip_coefficient", "global_grad_norm"),
    "megatron.core.optimizer.lr_schedule": ("LRSchedule", "LRScheduleConfig"),
    "megatron.core.timeline": ("Timeline",),
    "megatron.core.trace_file": ("Trace",),
    "megatron.core.transformer.config": ("TransformerConfig",),
    "megatron.training.checkpoint.dcp_import": ("load_dcp",),
    "megatron.training.checkpoint.hf_weights": ("load_hf", "save_hf"),
    "megatron.training.config": ("BatchSizes", "EngineConfig"),
    "megatron.training.engine": ("SaveLoadMeta",),
    "megatron.training.engines": (
        "FSDPEngine",
        "MegatronEngine",
        "ModuleEngine",
        "build_engine",
    ),
    "megatron.training.launch": ("Launch", "process_group"),
    "megatron.training.step": ("StepInfo", "StepResult"),
    "megatron.training.tokenizer": ("train_bpe",),
    "megatron_hybrid.checkpoint.audit": ("Audit",),
    "megatron_hybrid.checkpoint.comparison": ("KeyComparison", "compare"),
}
# Classes that programs get from functions and pass on, and their public members.
NEVER_CONSTRUCTED = ("FsdpContext", "FsdpModule")
SHOWN_MEMBERS: dict[str, tuple[str, ...]] = {
    "FsdpContext": ("device",),
    "FsdpModule": (
        *(name for name in vars(Fsdp2Methods) if not name.startswith("_")),
        "context",
        "is_root",
        "zero_grad",
    ),
}
# Special methods that are called by syntax.
_SPECIAL = ("__bool__", "__call__", "__enter__", "__getitem__", "__iter__", "__len__")

# By name, the modules whose `main` is the program. `launch` has torchrun's flags.
PROGRAMS = {
    **{
        name: f"megatron_hybrid.{command.module}"
        for name, command in COMMANDS.items()
        if name != "launch"
    },
    "tools/merge_datasets.py": "tools.merge_datasets",
}


def main() -> None:
    """Writes both files."""
    FOLDER.mkdir(exist_ok=True)
    for path, lines in ((NAMES, names()), (FLAGS, flags())):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        print(f"wrote {path}")


def names() -> list[str]:
    """The public names of each module with their signatures, sorted."""
    lines: list[str] = []
    homes: dict[int, str] = {}  # by id: where a value was described first
    for module, members in sorted(public_members().items()):
        lines.append(f"# {module}")
        for name in sorted(members):
            value = getattr(importlib.import_module(module), name)
            home = homes.setdefault(id(value), module)
            lines += _described(name, value) if home == module else [f"{name} is that of {home}"]
        lines.append("")
    return lines[:-1]


def public_members() -> dict[str, tuple[str, ...]]:
    """The public names of each module."""
    exported = {name: tuple(importlib.import_module(name).__all__) for name in PACKAGES}
    return {**MEMBERS, **exported}


def flags() -> list[str]:
    """The flags of each program with their defaults, sorted."""
    run_flags = known_flags()
    lines = ["# flags of a run"]
    for flag, field in sorted(run_flags.items()):
        lines.append(_flag_line(flag, None if flag == field.off_flag else field.default))

    for program, module in PROGRAMS.items():
        lines += ["", f"# {program}"]
        found = _program_flags(parser_of(program, program) or _parser_of(module, program))
        if program in TRAINERS:
            lines.append("flags of a run")
            lines += [f"without {flag}" for flag in sorted(run_flags.keys() - found.keys())]
        own = found.keys() - (run_flags if program in TRAINERS else {})
        lines += [_flag_line(flag, found[flag]) for flag in sorted(own)]
    return lines


def _described(name: str, value: Any) -> list[str]:
    """The lines of a name and, for a class, of its members."""
    if not value.__module__.startswith("megatron"):
        return [f"{name} is {value.__module__}.{value.__qualname__}"]
    if not isinstance(value, type):
        return _call_lines(name, value)
    if issubclass(value, enum.Enum):
        return [f"{name}.{member.name} = {member.value!r}" for member in value]

    bases = ", ".join(base.__name__ for base in value.__bases__ if base is not object)
    lines = [f"class {name}({bases})" if bases else f"class {name}"]
    own_classes = [one for one in value.__mro__ if one.__module__.startswith("megatron")]
    if name not in NEVER_CONSTRUCTED and _has_constructor(value, own_classes):
        lines += _call_lines(name, value)
    members = {member for one in own_classes for member in _members_of(one)}
    for member in sorted(members & {*SHOWN_MEMBERS.get(name, members)}):
        lines += _member_lines(f"{name}.{member}", inspect.getattr_static(value, member, None))
    return lines


def _has_constructor(value: type, own_classes: Sequence[type]) -> bool:
    # Protocols are never constructed, and a class that only inherits has its parent's arguments.
    is_protocol = getattr(value, "_is_protocol", False)
    return not is_protocol and any(
        "__init__" in vars(one) or "__new__" in vars(one) for one in own_classes
    )


def _members_of(owner: type) -> set[str]:
    """The public members that a class itself declares, without those its constructor takes."""
    taken = {field.name for field in fields(owner)} if _is_dataclass(owner) else set()
    taken |= set(getattr(owner, "_fields", ()))
    declared = {*vars(owner), *inspect.get_annotations(owner), *_set_in_constructor(owner)}
    public = {name for name in declared if not name.startswith("_")}
    return (public | (declared & set(_SPECIAL))) - taken


def _is_dataclass(owner: type) -> bool:
    return "__dataclass_fields__" in vars(owner)


def _set_in_constructor(owner: type) -> set[str]:
    """The attributes that the class's own `__init__` sets."""
    constructor = vars(owner).get("__init__")
    if constructor is None or constructor.__module__ != owner.__module__ or _is_dataclass(owner):
        return set()
    tree = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(constructor))))
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if isinstance(node.value, ast.Name) and node.value.id == "self"
    }


def _member_lines(name: str, value: Any) -> list[str]:
    if isinstance(value, classmethod):
        return _call_lines(f"classmethod {name}", value.__func__, is_bound=True)
    if isinstance(value, staticmethod):
        return _call_lines(f"staticmethod {name}", value.__func__)
    if isinstance(value, types.FunctionType):
        return _call_lines(name, value, is_bound=True)
    return _described(name, value) if isinstance(value, type) else [name]


def _call_lines(name: str, function: Any, is_bound: bool = False) -> list[str]:
    """`name(arguments)`, in one line if it is short enough."""
    signature = inspect.signature(function)
    parameters = [
        parameter.replace(annotation=parameter.empty, default=_default(parameter.default))
        for parameter in signature.parameters.values()
    ][is_bound:]
    # `replace` keeps the order, and str writes the marks of positional and keyword-only ones.
    text = str(signature.replace(parameters=parameters, return_annotation=signature.empty))
    if len(name + text) <= _WIDTH:
        return [name + text]
    return [f"{name}(", *(f"    {part}," for part in _parts(parameters)), ")"]


def _parts(parameters: Sequence[inspect.Parameter]) -> Iterator[str]:
    """The parameters one by one, with a `*` before those that are keywords only."""
    has_star = False
    for parameter in parameters:
        has_star |= parameter.kind is parameter.VAR_POSITIONAL
        if parameter.kind is parameter.KEYWORD_ONLY and not has_star:
            has_star = True
            yield "*"
        yield str(parameter)


class _Text:
    """A default that prints as this text."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _default(value: Any) -> Any:
    if value is inspect.Parameter.empty:
        return value
    if isinstance(value, (type, types.FunctionType, types.BuiltinFunctionType)):
        return _Text(value.__qualname__)
    is_internal = type(value).__module__.startswith("megatron")
    return _Text("..." if is_internal and not isinstance(value, enum.Enum) else repr(value))


def _parser_of(module: str, program: str) -> argparse.ArgumentParser:
    """The parser with which a program reads its command line."""
    found: list[argparse.ArgumentParser] = []

    def stop(parser: argparse.ArgumentParser, *_: Any, **__: Any) -> NoReturn:
        found.append(parser)
        raise SystemExit(0)

    with (
        mock.patch.object(argparse.ArgumentParser, "parse_known_args", stop),
        mock.patch.object(sys, "argv", [program, "--help"]),
        contextlib.suppress(SystemExit),
    ):
        importlib.import_module(module).main(["--help"])
    return found[0]


def _program_flags(parser: argparse.ArgumentParser, command: str = "") -> dict[str, Any]:
    """The flags and arguments of a parser, and of its commands' parsers, with their defaults."""
    found: dict[str, Any] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, inner in action.choices.items():
                found |= _program_flags(inner, f"{name} ")
        elif not isinstance(action, argparse._HelpAction):
            written = action.option_strings or [str(action.metavar or action.dest)]
            is_switch = isinstance(action, OnOffAction)
            for number, flag in enumerate(written):
                default = None if is_switch and number > 0 else action.default
                found[command + flag] = default
    return found


def _flag_line(flag: str, default: Any) -> str:
    has_default = default not in (None, "", (), argparse.SUPPRESS) and default is not False
    return f"{flag} = {default}" if has_default and default is not MISSING else flag


if __name__ == "__main__":
    sys.exit(main())
