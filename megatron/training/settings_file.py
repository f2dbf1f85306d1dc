"""Files of settings: YAML of keys with a value, or a list of values, each kept as it is written.

YAML 1.1, which PyYAML reads, makes 90 of `1:30`, 15 of `017`, a date of `2026-11-22` and true of
`on`; YAML 1.2 reads most of these in another way. As on the command line, each option defines the
meaning of its value. So this module returns texts, and marks only YAML's true, false and null.

No other objects are built from the file. Neither an alias, of which 33 doublings are eight billion
values, nor a list in a list can therefore take more memory or time than the file's size.
"""

from __future__ import annotations

from typing import NamedTuple

import yaml

from megatron.core.files import read_regular
from megatron.core.log import printable
from megatron.core.options import ConfigError

_MAX_BYTES = 1 << 18  # a blend of some thousand datasets; PyYAML takes seconds for as much
_TAG = "tag:yaml.org,2002:"
_PLAIN_TAGS = {_TAG + name for name in ("str", "int", "float", "bool", "null")}
_SHOWN = 80  # characters of a key in a message


class Setting(NamedTuple):
    """A value of a file of settings."""

    text: str  # as it is written, without quotes
    truth: bool | None = None  # what YAML takes it for where that is true or false
    is_null: bool = False


Settings = dict[str, "Setting | list[Setting]"]


class _Loader(yaml.SafeLoader):
    """Resolves only truths and null; everything else stays text."""


_Loader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag in (_TAG + "bool", _TAG + "null")]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def read_settings(path: str) -> Settings:
    """The settings in a YAML file by key, in its order.

    Raises:
        ConfigError: no regular file of at most 256 KiB, no YAML, a key that occurs twice, or
            anything else than keys with plain values and lists of these.
    """
    root = parse_yaml(path, "--config")
    if root is None or (isinstance(root, yaml.ScalarNode) and root.tag == _TAG + "null"):
        return {}
    if not isinstance(root, yaml.MappingNode):
        got = "a list" if isinstance(root, yaml.SequenceNode) else "a single value"
        raise ConfigError(f"--config: expected keys and values in {path}, got {got}.")

    settings: Settings = {}
    for key_node, value in root.value:
        if not isinstance(key_node, yaml.ScalarNode):
            got = _place(key_node)
            raise ConfigError(f"--config: expected plain keys in {path}, got another one{got}.")
        key = key_node.value
        if key in settings:
            got = f"the key {printable(key, _SHOWN)!r} twice{_place(key_node)}"
            raise ConfigError(f"--config: expected each key once in {path}, got {got}.")
        settings[key] = _value(path, key, value)

    return settings


def parse_yaml(path: str, flag: str) -> yaml.Node | None:
    """Returns the root node of a YAML file; None if it is empty. Raises ConfigError, prefixed with
    the flag that names the file, if it cannot be read.
    """
    try:
        content = read_regular(path, max_bytes=_MAX_BYTES, what="a YAML file").decode("utf-8")
        return _Loader(content).get_single_node()
    except OSError as failure:
        reason = failure.strerror
        raise ConfigError(f"{flag}: expected a readable file, got {path!r} ({reason}).") from None
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{flag}: expected UTF-8 in {path}, got {failure}.") from None
    except (yaml.YAMLError, ValueError, OverflowError, RecursionError) as failure:
        # PyYAML also passes on errors of int() and chr(), for the numbers in
        # directives and escapes.
        reason = printable(" ".join(str(failure).split()))
        raise ConfigError(f"{flag}: expected YAML in {path}, got {reason}.") from None


def _value(path: str, key: str, node: yaml.Node) -> Setting | list[Setting]:
    """The value or the values of a key."""
    if isinstance(node, yaml.SequenceNode):
        return [_setting(path, key, each) for each in node.value]
    return _setting(path, key, node)


def _setting(path: str, key: str, node: yaml.Node) -> Setting:
    shown = printable(key, _SHOWN)
    if not isinstance(node, yaml.ScalarNode):
        kind = "a list in a list" if isinstance(node, yaml.SequenceNode) else "nested keys"
        expected = "a value or a list of values"
        raise ConfigError(f"{path}: {shown}: expected {expected}, got {kind}{_place(node)}.")

    if node.tag not in _PLAIN_TAGS:
        tag = printable(node.tag.replace(_TAG, "!!"), _SHOWN)
        raise ConfigError(f"{path}: {shown}: expected a plain value, got one with the tag {tag}.")

    truth = None
    if node.tag == _TAG + "bool":
        truth = yaml.SafeLoader.bool_values.get(node.value.lower())
    return Setting(node.value, truth, is_null=node.tag == _TAG + "null")


def _place(node: yaml.Node) -> str:
    return f" in line {node.start_mark.line + 1}"
