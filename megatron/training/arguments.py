"""The command line and YAML files, both generated from the fields of `RunConfig`.

A flag given on the command line overrides the file of `--config`, which overrides the default. The
directory of `--hf-model` sets flags that are not given; a flag that contradicts it is rejected
(hf_config.py). A file's keys are the flags' names without the dashes in front
(`lr-warmup-iters` or `lr_warmup_iters`). Whatever is wrong is a `ConfigError` before anything has
been built.

A launch script written for Megatron-LM may need many changes, so one error names all of them that
can be detected at once. Suggested replacements (flag_answers.py) are checked as if they had been
written.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import yaml

from megatron.core.datasets.config import missing_files
from megatron.core.log import printable
from megatron.core.options import ConfigError, ConfigErrors, Field, options_of, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.training.checkpoint.hf_config import read_folder, take_settings
from megatron.training.config import RunConfig, all_options, section_classes
from megatron.training.flag_answers import Answer, Given, Ruling, answer, meant_by
from megatron.training.flag_report import RefusedSettings
from megatron.training.settings_file import Setting, read_settings
from megatron.training.tokenizer import TokenizerConfig

logger = logging.getLogger(__name__)

C = TypeVar("C")
_SHOWN_KEY = 80  # characters of a key or a number in a message
_MOST_LINES = 60  # of a message; a launch script has as many flags
_OFF = ("false",)  # the value of a flag that a file turns off
_IS_OCTAL = re.compile(r"[-+]?0[0-9_]+")


@dataclass(frozen=True)
class _Switch:
    """The field that a YAML key or a flag sets, and whether it sets the opposite
    (`no-load-optim`).
    """

    field: Field
    is_negated: bool = False


class ParsedCommandLine(NamedTuple):
    """A command line, parsed."""

    config: RunConfig  # resolved
    without_effect: tuple[Given, ...]  # flags of Megatron-LM without effect here

    def log_without_effect(self) -> None:
        """Logs the flags without effect in one line."""
        if self.without_effect:
            flags = printable(", ".join(map(str, self.without_effect)), limit=4000)
            logger.info(
                "no effect here (accepted; may be deleted; reasons: docs/coming-from.md): %s",
                flags,
            )


def parse_config(argv: Sequence[str], world_size: int, *, needs_files: bool = True) -> RunConfig:
    """The resolved configuration of a run from its command line; see `parse_command_line`."""
    return parse_command_line(argv, world_size, needs_files=needs_files).config


def parse_command_line(
    argv: Sequence[str], world_size: int, *, needs_files: bool = True
) -> ParsedCommandLine:
    """The resolved configuration of a run from its command line.

    Args:
        argv: the arguments, without the program's name.
        world_size: ranks in the run.
        needs_files: whether data and tokenizer must exist. If not, made-up text and a tokenizer of
            as many ids replace missing ones: a plan reads neither.

    Raises:
        ConfigError: one line for each error, with the flag or key, and either the expected and the
            given value or the remedy.
    """
    given, stray = _split(argv)
    settings = _Settings()
    for word in stray:
        shown_word = printable(word, _SHOWN_KEY)
        settings.errors.append(
            f"{shown_word}: expected a flag, which starts with --, or its value."
        )
    paths = [one for one in given if one.flag == "--config"]
    if paths:
        settings.read_file(_only_value(paths[-1], "a YAML file"))

    settings.take([one for one in given if one.flag != "--config"])
    settings.answer_strangers(world_size)
    if not needs_files:
        settings.stand_in_for_files()
    return ParsedCommandLine(settings.build(world_size), tuple(settings.without_effect))


def build_config(values: dict[str, Any]) -> RunConfig:
    """An unresolved configuration from converted values by field name, and defaults."""
    sections: dict[str, Any] = {}
    errors: list[str] = []
    for name, config_class in section_classes().items():
        is_optional = name in _optional_sections()
        if is_optional and not any(field.name in values for field in options_of(config_class)):
            continue
        try:
            sections[name] = _build_section(config_class, values)
        except ConfigError as error:
            errors += error.lines
    _raise(errors)
    return RunConfig(**sections)


def section_from_values(config_class: type[C], values: dict[str, Any]) -> C:
    """One owner's config from `RunConfig.values()`, a checkpoint's for example. ConfigError as
    `build_config`.
    """
    mine = {
        field.name: field.convert(values[field.name])
        for field in options_of(config_class)
        if field.name in values
    }
    return _build_section(config_class, mine)


def read_yaml(path: str) -> dict[str, Any]:
    """The settings in a YAML file, converted, by field name. ConfigError for unusable ones."""
    settings = _Settings()
    settings.read_file(path)
    settings.answer_strangers(world_size=1)
    settings.take_hf_model()
    settings.check()
    return settings.values


class _Stranger(NamedTuple):
    """A flag without a field, or with a value that its field does not have."""

    given: Given
    path: str | None  # of the file that contains it; None: the command line


@dataclass
class _Settings:
    """Settings as they are collected from a file and a command line."""

    values: dict[str, Any] = dataclasses.field(default_factory=dict)  # converted, by field name
    strangers: list[_Stranger] = dataclasses.field(default_factory=list)
    errors: list[str] = dataclasses.field(default_factory=list)
    # Rejected flags of Megatron-LM, each with its file as a prefix.
    refused: list[tuple[str, Answer]] = dataclasses.field(default_factory=list)
    without_effect: list[Given] = dataclasses.field(default_factory=list)
    # Flags that a message names already; a second error about one is left out.
    spoken_of: set[str] = dataclasses.field(default_factory=set)

    def read_file(self, path: str) -> None:
        """Takes the settings of a YAML file."""
        switches = {flag.lstrip("-"): switch for flag, switch in _switches().items()}
        for key, setting in read_settings(path).items():
            given = _given_by_file(key, setting)
            switch = switches.get(given.flag[2:])
            if switch is None or _is_megatrons(given):
                # A false key of Megatron-LM is a flag that is not given.
                is_off = given.values == _OFF and _is_megatrons(Given(given.flag, ()))
                if not is_off:
                    self.strangers.append(_Stranger(given, path))
                continue

            try:
                value = _convert_setting(switch.field, setting)
            except ConfigError as error:
                self._refuse(switch.field, error)
                continue
            if switch.field.name in self.values:
                shown_key = printable(key, _SHOWN_KEY)
                expected = f"{switch.field.flag} to be set once"
                self.errors.append(f"{path}: {shown_key}: expected {expected}, got it twice.")
            self.values[switch.field.name] = not value if switch.is_negated else value

    def take(self, given: Sequence[Given]) -> None:
        """Takes flags of a command line. Of several that set one field, the last counts."""
        switches = _switches()
        for one in given:
            switch = switches.get(one.flag)
            if switch is None or _is_megatrons(one):
                self.strangers.append(_Stranger(one, None))
                continue
            try:
                self.values[switch.field.name] = _convert_given(switch, one)
            except ConfigError as error:
                self._refuse(switch.field, error)

    def answer_strangers(self, world_size: int) -> None:
        """Sorts flags without a field into flags without effect and errors, and applies the
        suggested replacements, so that they are checked too.
        """
        lines: list[str] = []
        for given, path in self.strangers:
            if len(lines) > _MOST_LINES:
                continue  # a file may hold thousands
            where = "" if path is None else f"{path}: "
            found = answer(given, self.values, self._samples_per_iteration(world_size))
            if found is None and _is_megatrons(Given(given.flag, ())):
                got = shown(" ".join(given.values))
                lines.append(f"{where}{given.flag}: expected at most one value, got {got}.")
            elif found is None:
                lines.append(where + _unknown(given, is_key=path is not None))
            elif found.ruling is Ruling.NO_EFFECT:
                self.without_effect.append(given)
            else:
                lines.append(where + str(found))
                self.refused.append((where, found))
                if found.is_complete:
                    self.take(_split(found.use)[0])
                else:
                    self.spoken_of |= {word for word in found.use if word.startswith("--")}

        self.errors = lines + self.errors

    def build(self, world_size: int) -> RunConfig:
        """The resolved configuration. ConfigError for all that has been wrong so far, too."""
        self.take_hf_model()
        errors = list(self.errors)
        try:
            config = build_config(self.values).resolve(world_size)
        except ConfigError as error:
            errors += [line for line in error.lines if line.split(":")[0] not in self.spoken_of]
        self._raise(errors)
        return config

    def take_hf_model(self) -> None:
        """Applies the settings of the `--hf-model` directory where files and flags set none."""
        folder = self.values.get("hf_model")
        if folder is None:
            return
        try:
            lines = take_settings(self.values, read_folder(folder))
            self.errors += lines
            self.spoken_of |= {line.split(":")[0] for line in lines}
        except ConfigError as error:
            if folder:  # an empty name is an error of the option itself
                self.errors.append(f"--hf-model: {error}")
            # No second error for each setting that the directory would have set.
            self.spoken_of |= {field.flag for field in options_of(TransformerConfig)}
            self.spoken_of |= {field.flag for field in options_of(TokenizerConfig)}

    def stand_in_for_files(self) -> None:
        """Replaces data that are not given or do not exist by made-up text, and such a tokenizer by
        one of `--vocab-size` ids.
        """
        given = self.values.get("data_path") or ()
        prefixes = given[1::2] if len(given) > 1 else given
        is_told = bool(given) or bool(self.values.get("mock_data"))
        if not is_told or any(missing_files(prefix) for prefix in prefixes):
            ends = ("reset_attention_mask", "reset_position_ids", "eod_mask_loss")
            self.values |= {"data_path": None, "mock_data": True, "sft": False}
            self.values |= dict.fromkeys(ends, False)

        model, size = self.values.get("tokenizer_model"), self.values.get("vocab_size")
        if model is None:
            needs_file = self.values.get("tokenizer_type") in (None, "HuggingFaceTokenizer")
            if size is None or not needs_file or self.values.get("hf_model") is not None:
                return
        # Path.exists raises for names that are too long and for unreadable directories.
        elif os.path.exists(model):  # noqa: PTH110
            return
        if size is None:
            self.errors.append(
                f"--vocab-size: expected a number, since the tokenizer {shown(model)} does not "
                "exist, got none."
            )
            self.spoken_of.add("--tokenizer-model")
        else:
            # Which has one id more, the end of a document.
            self.values |= {
                "tokenizer_type": "NullTokenizer",
                "tokenizer_model": None,
                "vocab_size": size - 1,
            }

    def check(self) -> None:
        """ConfigError for all that has been wrong so far."""
        self._raise(self.errors)

    def _raise(self, errors: Sequence[str]) -> None:
        """Raises ConfigError for a list of errors, grouped if some concern flags of Megatron-LM."""
        if not self.refused:
            _raise(errors)
            return
        raise RefusedSettings(_cut(errors), self.refused, self.without_effect)

    def _refuse(self, field: Field, error: ConfigError) -> None:
        self.errors += error.lines
        self.spoken_of.add(field.flag)

    def _samples_per_iteration(self, world_size: int) -> int:
        """0 if the flags for it are missing or wrong."""
        names = (
            "micro_batch_size",
            "global_batch_size",
            "context_parallel_size",
            "tensor_model_parallel_size",
        )
        if not self.spoken_of.isdisjoint("--" + name.replace("_", "-") for name in names):
            return 0
        micro, whole, *parts = (self.values.get(name) or 0 for name in names)
        num_parts = math.prod(max(part, 1) for part in parts)
        return int(max(whole or micro * (world_size // num_parts), 0))


def _split(argv: Sequence[str]) -> tuple[list[Given], list[str]]:
    """The flags with their values, and the words that are neither. `--flag=value` and negative
    numbers are understood.
    """
    stray: list[str] = []
    given: list[tuple[str, list[str]]] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            given.append((name, [value] if equals else []))
        elif given and (not word.startswith("-") or word == "-" or _is_number(word)):
            given[-1][1].append(word)
        else:
            stray.append(word)
    return [Given(flag, tuple(values)) for flag, values in given], stray


def _is_number(word: str) -> bool:
    """Whether a word is a number, or several with commas between them."""
    try:
        for part in word.split(","):
            float(part)
    except ValueError:
        return False
    return True


def _is_megatrons(given: Given) -> bool:
    """Whether the table has a row for this flag of Megatron-LM, or this value of a flag."""
    return answer(given, {}, 1) is not None


def _only_value(given: Given, expected: str) -> str:
    number = len(given.values)
    if number == 0:
        raise ConfigError(f"{given.flag}: expected {expected}, got no value.")
    if number > 1:
        got = shown(" ".join(given.values))
        raise ConfigError(
            f"{given.flag}: expected one value, got {number}: {got}. One with blanks needs quotes."
        )
    return given.values[0]


def _convert_given(switch: _Switch, given: Given) -> Any:
    """The value that a flag of the command line gives to its field."""
    if switch.field.scalar is bool:
        if given.values:
            got = shown(" ".join(given.values))
            raise ConfigError(f"{given.flag}: expected no value, got {got}.")
        return not switch.is_negated
    if switch.field.is_list and given.values:
        return switch.field.convert(given.values)
    if not given.values and switch.field.option.bare is not None:
        return switch.field.option.bare
    return switch.field.convert(_only_value(given, switch.field.expected))


def _given_by_file(key: str, setting: Setting | list[Setting]) -> Given:
    """Converts a key of a file to its flag. A key that is null or false is a flag that is not
    given.
    """
    flag = "--" + key.replace("_", "-")
    if isinstance(setting, list):
        return Given(flag, tuple(one.text for one in setting))
    if setting.truth is not None or setting.is_null:
        return Given(flag, () if setting.truth else _OFF)
    return Given(flag, (setting.text,))


def _convert_setting(field: Field, setting: Setting | list[Setting]) -> Any:
    """A setting of a YAML file as the field's type: its text is read as on the command line."""

    def plain(one: Setting) -> Any:
        if one.is_null:
            return None
        if field.scalar is int and _IS_OCTAL.fullmatch(one.text):
            got = f"{printable(one.text, _SHOWN_KEY)}, which YAML 1.1 takes for octal"
            raise ConfigError(f"{field.flag}: expected {field.expected}, got {got}.")
        if field.option.bare is not None and one.truth is not None:
            return field.option.bare if one.truth else None
        return one.truth if field.scalar is bool and one.truth is not None else one.text

    return field.convert(
        [plain(one) for one in setting] if isinstance(setting, list) else plain(setting)
    )


def known_flags() -> dict[str, Field]:
    """Every flag of the command line, bools' opposites included, and the field that it sets."""
    return {flag: switch.field for flag, switch in _switches().items()}


def as_yaml(config: RunConfig) -> str:
    """The effective configuration by owner, as a file that `--config` takes. Settings without a
    value are left out.
    """
    values, lines = config.values(), ["# The settings of the last start of this run.\n"]
    for name, section in config.sections():
        own = {
            field.name: values[field.name]
            for field in dataclasses.fields(section)
            if values[field.name] is not None
        }
        if own:
            text = yaml.safe_dump(own, sort_keys=False, width=10**6)
            lines.append(f"\n# {name}\n{text}")
    return "".join(lines)


def _build_section(config_class: type[C], values: dict[str, Any]) -> C:
    mine: dict[str, Any] = {}
    errors: list[str] = []
    for field in options_of(config_class):
        if field.name in values:
            mine[field.name] = values[field.name]
            try:
                field.check(values[field.name])
            except ConfigError as error:
                errors += error.lines
        elif field.default is dataclasses.MISSING:
            errors.append(f"{field.flag}: expected {field.expected}, got none; it has no default.")
    _raise(errors)
    return config_class(**mine)


def _raise(errors: Sequence[str]) -> None:
    """Raises ConfigError for a list of errors, unless it is empty."""
    errors = _cut(errors)
    if len(errors) == 1:
        raise ConfigError(errors[0])
    if errors:
        raise ConfigErrors(errors)


def _cut(errors: Sequence[str]) -> Sequence[str]:
    """The first lines, as many as somebody may read."""
    if len(errors) > _MOST_LINES:
        return [*errors[:_MOST_LINES], "There may be more."]
    return errors


def _optional_sections() -> set[str]:
    """Sections of optional parts of a model, absent unless one of their flags is given."""
    return {
        field.name
        for field in dataclasses.fields(RunConfig)
        if field.default is not dataclasses.MISSING
    }


@functools.cache
def _switches() -> dict[str, _Switch]:
    """Every flag and every bool's opposite, by name; and field names that differ from the flag."""
    switches: dict[str, _Switch] = {}
    for field in all_options().values():
        switches[field.flag] = _Switch(field)
        switches.setdefault("--" + field.name.replace("_", "-"), _Switch(field))
        if field.scalar is bool:
            switches[field.off_flag] = _Switch(field, is_negated=True)
    return switches


def _unknown(given: Given, *, is_key: bool) -> str:
    """The error message for an unknown flag or key."""
    strip = "-" if is_key else ""
    name = printable(given.flag, _SHOWN_KEY).lstrip(strip)
    kind = "a known key" if is_key else "a known flag"
    meant = meant_by(given.flag, _switches())
    hint = "" if meant is None else f" Did you mean {meant.lstrip(strip)}?"
    return f"{name}: expected {kind}, got one that does not exist.{hint}"
