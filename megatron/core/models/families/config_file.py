"""A config.json with checked access: errors have the name and the value of the field."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.log import printable
from megatron.core.options import ConfigError, shown

_MOST_LAYERS = 2**16  # as TransformerConfig
_MOST = 2**63 - 1  # of any number, which may become an int64 or a float
_MOST_SHOWN = 8  # fields in a message


@dataclass(frozen=True)
class ConfigFile:
    """The content of a config.json.

    Attributes:
        source: the file, for messages.
    """

    content: Mapping[str, Any]
    source: str

    def wanted(self, name: str) -> Any:
        """A field's value. ConfigError if there is no such field, or if it is null."""
        if name not in self.content:
            raise ConfigError(f"Expected {name} in {self.source}, got none.")
        if self.content[name] is None:
            raise self.error(name, "a value", None)
        return self.content[name]

    def get(self, name: str) -> Any:
        """A field's value; None if it is null or there is no such field."""
        return self.content.get(name)

    def integer(self, name: str) -> int:
        """A positive number of channels, heads or positions. ConfigError for anything else."""
        value = self.wanted(name)
        if type(value) is not int or value < 1:
            raise self.error(name, "an integer >= 1", value)
        if value > _MOST:
            raise self.error(name, "an integer of at most 63 bits", value)
        return value

    def positive(self, name: str) -> float:
        """A positive number. ConfigError for anything else."""
        value = self.wanted(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= _MOST:
            raise self.error(name, "a number > 0", value)
        return value

    def boolean(self, name: str, absent: bool | None = None) -> bool:
        """A switch. ConfigError for other values, and if it is missing while `absent` is None."""
        value = self.get(name)
        if value is None and absent is not None:
            return absent
        if not isinstance(value, bool):
            raise self.error(name, "true or false", self.wanted(name))
        return value

    def section(self, name: str) -> Mapping[str, Any]:
        """An object inside the file; empty if it is missing. ConfigError for other values."""
        value = self.get(name)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(name, "an object", value)
        return value

    def num_layers(self) -> int:
        """Returns the number of layers, which is bounded: lists of this length are created before
        the model's options are checked.
        """
        count = self.integer("num_hidden_layers")
        if count > _MOST_LAYERS:
            raise self.error("num_hidden_layers", f"an integer <= {_MOST_LAYERS}", count)
        return count

    def error(self, name: str, expected: str, got: object) -> ConfigError:
        """Returns the error for a field with an invalid value."""
        return ConfigError(f"Expected {name} in {self.source} to be {expected}, got {shown(got)}.")

    def refuse_others(self, content: Mapping[str, Any], known: Collection[str], owner: str) -> None:
        """Raises ConfigError for unknown fields, which may affect the arithmetic.

        Unknown fields that are false, null or empty have no effect and are accepted.

        Args:
            content: fields of the file, or of a section in it.
            known: the fields that are read, and fields without effect.
            owner: owner of the fields, for messages.
        """
        unknown = sorted(name for name, value in content.items() if name not in known and value)
        if unknown:
            got = ", ".join(
                f"{printable(name)} {shown(content[name])}" for name in unknown[:_MOST_SHOWN]
            )
            more = len(unknown) - _MOST_SHOWN
            raise ConfigError(
                f"Expected only fields of {owner} that are known here in {self.source}, got {got}"
                + (f" and {more} more." if more > 0 else ".")
            )
