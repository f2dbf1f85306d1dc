"""`--dcp-key-map`: a table that maps tensors of another program's checkpoint to our tensors.

    keys:                                   # their name: our name
      tok_embeddings.weight: embedding.word_embeddings.weight
      layers.{n}.attention.wq.weight:       # {n} is a number
        {to: "decoder.layers.{n}.self_attention.query.weight",
         heads: num_attention_heads, rotary: interleaved}
      layers.{n}.feed_forward.w13.weight:   # rows of several tensors, consecutive
        - decoder.layers.{n}.mlp.gate.weight
        - decoder.layers.{n}.mlp.up.weight
      layers.{n}.attention.wqkv.weight:     # the same in each group of rows
        groups: num_query_groups
        parts:
          - {to: "decoder.layers.{n}.self_attention.query.weight", heads: num_attention_heads}
          - {to: "decoder.layers.{n}.self_attention.key.weight", heads: num_query_groups}
          - {to: "decoder.layers.{n}.self_attention.value.weight", heads: num_query_groups}
      layers.{n}.moe.experts.w1:            # a matrix for each expert, in one tensor
        stack: expert
        parts: decoder.layers.{n}.mlp.experts.{expert}.gate.weight
    weights: model.{name}                   # the position of a name in their keys
    moments: optim.state.{name}.{moment}    # false: not loaded
    tied: {output.weight: tok_embeddings.weight}
    ignore: [ema.*]

The table describes their tensors. The conversion of rows follows from our model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn

import yaml

from megatron.core.log import printable
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.training.settings_file import parse_yaml

FLAG = "--dcp-key-map"

# Settings of the run that tables may name.
COUNTS = ("num_attention_heads", "num_query_groups")
_FIELDS = ("keys", "weights", "moments", "tied", "ignore")
_PLACEHOLDER = re.compile(r"\{(\w+)\}")
_YAML_NUMBER = re.compile(r"[1-9]\d{0,8}")

# The keys that PyTorch's helpers, torchtitan and the DCP tutorials write.
_USUAL_WEIGHTS = ("{name}", "model.{name}", "app.model.{name}", "state.model.{name}")
_USUAL_MOMENTS = tuple(
    f"{prefix}{{name}}.{{moment}}"
    for prefix in (
        *("optimizer.state.", "optim.state.", "app.optimizer.state.", "app.optim.state."),
        *("optimizer.", "optim."),
    )
)
_USUALLY_IGNORED = ("*param_groups.*", "lr_scheduler.*", "dataloader.*", "train_state.*", "rng.*")


@dataclass(frozen=True)
class Heads:
    """The numbers of heads that a table may name, and our model's rotary embedding.

    Attributes:
        counts: the numbers, by the name of the run's setting.
        rotary_percent: the share of a head's channels that are rotated.
        is_interleaved: whether our model pairs neighboring channels.
    """

    counts: Mapping[str, int]
    rotary_percent: float = 1.0
    is_interleaved: bool = False

    @classmethod
    def of(cls, config: TransformerConfig) -> Heads:
        """Returns the heads of a run's model."""
        counts = {name: getattr(config, name) for name in COUNTS}
        return cls(counts, config.rotary_percent, config.is_rotary_interleaved)


class RulePart(NamedTuple):
    """Rows of one of their tensors that are one of our tensors.

    Attributes:
        to: our name, with placeholders.
        heads: the number of heads in the rows; None if unspecified.
        is_interleaved: whether their model pairs channels 2i and 2i + 1 of a head, and our model
            i and i + half.
    """

    to: str
    heads: int | None = None
    is_interleaved: bool = False


class KeyRule(NamedTuple):
    """The parts of one of their tensors, or of one in each layer.

    Attributes:
        parts: the consecutive parts of each group of rows.
        stack: the placeholder that counts the matrices of a tensor with an additional dim, if any.
    """

    pattern: re.Pattern[str]
    parts: tuple[RulePart, ...]
    groups: int = 1
    stack: str | None = None


class KeyPattern(NamedTuple):
    """The position of names in their keys. Without `moment`, the pattern has a group for it."""

    pattern: re.Pattern[str]
    moment: str | None = None


class Match(NamedTuple):
    """The rule for a name, and our names of its parts, with the placeholder of a stack."""

    rule: KeyRule
    names: tuple[str, ...]

    def names_of(self, num_matrices: int) -> list[str]:
        """Returns our names, for a stack matrix by matrix."""
        if self.rule.stack is None:
            return list(self.names)
        counter = f"{{{self.rule.stack}}}"
        return [
            name.replace(counter, str(number))
            for number in range(num_matrices)
            for name in self.names
        ]


@dataclass(frozen=True)
class KeyMap:
    """A parsed table.

    Attributes:
        path: the path of the file, for messages.
        weights: alternatives, of which the one that fits most keys is used.
        moments: likewise, each with several patterns. Empty if moments are not loaded.
        tied: their names of weights, by their second names.
        ignored: shell patterns of keys.
    """

    path: str
    rules: tuple[KeyRule, ...]
    weights: tuple[tuple[KeyPattern, ...], ...]
    moments: tuple[tuple[KeyPattern, ...], ...]
    tied: Mapping[str, str]
    ignored: tuple[str, ...]
    heads: Heads
    _matches: dict[str, Match | None] = field(default_factory=dict, repr=False, compare=False)

    @classmethod
    def read(cls, path: str, heads: Heads) -> KeyMap:
        """Reads a table.

        Args:
            heads: the heads of our model.

        Raises:
            ConfigError: for an invalid table.
        """
        return _Reader(path, heads).read()

    def match(self, name: str) -> Match | None:
        """Returns the rule for one of their names, if any."""
        # Each name is looked up for its weight and for each moment.
        if name not in self._matches:
            self._matches[name] = self._find(name)
        return self._matches[name]

    def _find(self, name: str) -> Match | None:
        for rule in self.rules:
            found = rule.pattern.fullmatch(name)
            if found is not None:
                values = found.groupdict()
                return Match(rule, tuple(_filled(part.to, values) for part in rule.parts))
        return None


def _filled(text: str, values: Mapping[str, str]) -> str:
    return _PLACEHOLDER.sub(lambda each: values.get(each[1], each[0]), text)


class _Reader:
    """Reads one table."""

    def __init__(self, path: str, heads: Heads) -> None:
        self._path = path
        self._heads = heads

    def read(self) -> KeyMap:
        table = self._plain(parse_yaml(self._path, FLAG))
        if not isinstance(table, dict) or not isinstance(table.get("keys"), dict):
            self._fail("the table", "a mapping with `keys`", table)
        if unknown := [name for name in table if name not in _FIELDS]:
            self._fail("the table", f"only {', '.join(_FIELDS)}", unknown)

        return KeyMap(
            self._path,
            tuple(self._rule(name, value) for name, value in table["keys"].items()),
            self._weights(table.get("weights")),
            self._moments(table.get("moments")),
            self._tied(table.get("tied", {})),
            (*_USUALLY_IGNORED, *self._texts("ignore", table.get("ignore", []))),
            self._heads,
        )

    def _plain(self, node: yaml.Node | None) -> Any:
        """Returns a node as dicts, lists and texts."""
        seen: set[int] = set()

        def plain(node: yaml.Node | None) -> Any:
            if node is None or isinstance(node, yaml.ScalarNode):
                return None if node is None else node.value
            # 33 nested aliases may expand to eight billion values.
            if id(node) in seen:
                self._fail("the table", "no aliases", f"one in line {node.start_mark.line + 1}")
            seen.add(id(node))
            if isinstance(node, yaml.SequenceNode):
                return [plain(each) for each in node.value]

            found: dict[str, Any] = {}
            for key, value in node.value:
                name = plain(key)
                if not isinstance(name, str) or name in found:
                    self._fail("the table", "each name once", name)
                found[name] = plain(value)
            return found

        return plain(node)

    def _rule(self, name: str, value: Any) -> KeyRule:
        groups, stack, parts = 1, None, value
        if isinstance(value, dict) and "parts" in value:
            self._expect_fields(name, value, ("groups", "stack", "parts"))
            groups, parts = self._number(name, value.get("groups", "1")), value["parts"]
            stack = value.get("stack")
        if not isinstance(parts, list):
            parts = [parts]
        if not parts:
            self._fail(name, "at least one of our names", parts)

        pattern = self._pattern(name, lambda _: r"\d+")
        known = {*pattern.groupindex, *([] if stack is None else [stack])}
        own = tuple(self._part(name, each, known) for each in parts)
        if stack is not None and not all(f"{{{stack}}}" in part.to for part in own):
            self._fail(f"{name}: stack", "a placeholder of all parts", stack)
        if len({part.heads is None for part in own}) > 1:
            self._fail(name, "heads of all parts, or of none", parts)
        return KeyRule(pattern, own, groups, stack)

    def _part(self, name: str, value: Any, known: set[str]) -> RulePart:
        if isinstance(value, str):
            value = {"to": value}
        if not isinstance(value, dict) or not isinstance(value.get("to"), str):
            self._fail(name, "one of our names, or a mapping with `to`", value)
        self._expect_fields(name, value, ("to", "heads", "rotary"))

        to = value["to"].removeprefix("model.")
        if lacking := set(_PLACEHOLDER.findall(to)) - known:
            self._fail(name, f"the placeholders of {to}", f"none for {sorted(lacking)}")
        heads = self._number(name, value["heads"]) if "heads" in value else None
        rotary = value.get("rotary", "halves")
        if rotary not in ("halves", "interleaved"):
            self._fail(f"{name}: rotary", "halves or interleaved", rotary)
        is_interleaved = rotary == "interleaved" and not self._heads.is_interleaved
        if is_interleaved and heads is None:
            self._fail(name, "heads, since it is interleaved", value)
        return RulePart(to, heads, is_interleaved)

    def _weights(self, value: Any) -> tuple[tuple[KeyPattern, ...], ...]:
        texts = _USUAL_WEIGHTS if value is None else (value,)
        return tuple((self._key_pattern("weights", text, ("name",)),) for text in texts)

    def _moments(self, value: Any) -> tuple[tuple[KeyPattern, ...], ...]:
        if value == "false":
            return ()
        if isinstance(value, dict):
            found = [
                self._key_pattern("moments", text, ("name",), moment)
                for moment, text in value.items()
            ]
            return (tuple(found),)
        texts = _USUAL_MOMENTS if value is None else (value,)
        return tuple((self._key_pattern("moments", text, ("name", "moment")),) for text in texts)

    def _key_pattern(
        self, what: str, text: Any, needed: tuple[str, ...], moment: str | None = None
    ) -> KeyPattern:
        if not isinstance(text, str) or sorted(_PLACEHOLDER.findall(text)) != sorted(needed):
            words = " and ".join(f"{{{each}}}" for each in needed)
            self._fail(what, f"a key with {words} in it", text)
        # A moment has no dots in its name; a parameter may have.
        return KeyPattern(
            self._pattern(text, {"name": ".+", "moment": r"[^.]+"}.__getitem__), moment
        )

    def _tied(self, value: Any) -> dict[str, str]:
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            self._fail("tied", "second names, and the first names", value)
        return value

    def _texts(self, what: str, value: Any) -> list[str]:
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            self._fail(what, "a list of patterns", value)
        return value

    def _number(self, what: str, value: Any) -> int:
        if value in COUNTS:
            return self._heads.counts[value]
        if not isinstance(value, str) or _YAML_NUMBER.fullmatch(value) is None:
            self._fail(what, f"a number, or {' or '.join(COUNTS)}", value)
        return int(value)

    def _expect_fields(self, name: str, value: Mapping[str, Any], known: tuple[str, ...]) -> None:
        if unknown := [each for each in value if each not in known]:
            self._fail(name, f"only {', '.join(known)}", unknown)

    def _pattern(self, text: str, meaning: Callable[[str], str]) -> re.Pattern[str]:
        """Returns a pattern of keys as a regular expression."""
        try:
            return re.compile("".join(_expressions(text, meaning)))
        except (re.error, KeyError):  # for example, a group whose name starts with a digit
            self._fail(text, "placeholders like {n}", text)

    def _fail(self, what: str, expected: str, got: object) -> NoReturn:
        where = f"{FLAG}: {printable(what, 200)} in {self._path}"
        raise ConfigError(f"{where}: expected {expected}, got {shown(got)}.")


def _expressions(text: str, meaning: Callable[[str], str]) -> Iterator[str]:
    seen: set[str] = set()
    for number, part in enumerate(_PLACEHOLDER.split(text)):
        if number % 2 == 0:
            yield re.escape(part)
        elif part in seen:
            yield f"(?P={part})"
        else:
            seen.add(part)
            yield f"(?P<{part}>{meaning(part)})"
