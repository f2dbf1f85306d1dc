"""Runs the Jinja program of a chat template and records which message wrote which text.

The environment is that of the transformers library: its filters, functions, extensions and sandbox.
Before a template is compiled, calls without output are added to its loops. They record, at the
current length of the output, which message the loop has reached. A rendering then consists of
segments, each written while the template handled one message. `{% generation %}` is recorded the
same way.

Lengths are known where the template writes to its output. A macro and a `{% set %}` block collect
text first, which then counts as written where the collected text is used: in the segment of the
message whose loop body calls the macro. A template that handles all of its messages inside of one
macro has no segments.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple, NoReturn

import jinja2
from jinja2 import nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace


class RenderedPart(NamedTuple):
    """A part of a rendering, written while the template handled one message.

    Attributes:
        message: its index.
        begin, end: its range of characters in the rendering.
    """

    message: int
    begin: int
    end: int


class MarkedText(NamedTuple):
    """Text that a template wrote between `{% generation %}` and `{% endgeneration %}`.

    Attributes:
        message: index of the message that the template handled; None outside of its loops.
        begin: the offset in characters.
        text: the marked text.
    """

    message: int | None
    begin: int
    text: str


class Traced(NamedTuple):
    """A rendering with the message of each segment. Other text belongs to no message."""

    text: str
    segments: tuple[RenderedPart, ...]
    marks: tuple[MarkedText, ...]


class ChatProgram:
    """A compiled chat template.

    Raises:
        jinja2.TemplateError: the source is no Jinja template.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Tracer, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(
            raise_exception=_raise,
            strftime_now=lambda form: datetime.now().strftime(form),
            namespace=_GuardedNamespace,
            dict=_DictMaker(),
        )
        tracer = environment.extensions[_Tracer.identifier]
        assert isinstance(tracer, _Tracer)
        self._tracer = tracer
        tree = environment.parse(source)
        # Tags in comments and raw blocks do not count.
        self.is_marked = tracer.has_marks
        _add_calls(tree, tracer)
        code = environment.compile(tree)
        globals_ = environment.make_globals(None)
        self._template = environment.template_class.from_code(environment, code, globals_)

    def run(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> Traced:
        """Renders a conversation.

        Args:
            messages: distinct objects, since the trace distinguishes them by identity.
            variables: further names for the template.

        Raises:
            Exception: nearly any kind, from a template that does not support the conversation.
        """
        trace = self._tracer.trace = _Trace(messages)
        pieces = []
        for piece in self._template.generate(messages=messages, **variables):
            pieces.append(piece)
            trace.length += len(piece)
        return Traced("".join(pieces), tuple(trace.segments), tuple(trace.marks))


@dataclasses.dataclass
class _Loop:
    """A running loop.

    Attributes:
        message: index of the message that this iteration handles; None if it handles none.
        furthest: the last message that a loop over indices has reached.
    """

    message: int | None = None
    furthest: int = -1


class _Trace:
    """The records of one rendering.

    Attributes:
        length: characters that the template has written so far.
    """

    def __init__(self, messages: Sequence[Mapping[str, Any]]) -> None:
        self.length = 0
        self.segments: list[RenderedPart] = []
        self.marks: list[MarkedText] = []
        self._indices = {id(message): index for index, message in enumerate(messages)}
        self._loops: list[_Loop] = []
        self._begin = 0  # of the current segment

    @property
    def current(self) -> int | None:
        """Index of the message that the innermost loop over messages handles."""
        return _innermost(self._loops)

    def index_of(self, value: object) -> int | None:
        """Index of a message; None for other values."""
        return self._indices.get(id(value))

    def open_loop(self) -> None:
        self._loops.append(_Loop())

    def close_loop(self) -> None:
        self._finish_segment()
        self._loops.pop()

    def reach(self, message: int | None) -> None:
        """Starts the next iteration of the innermost loop.

        A loop inside of a message that looks at earlier messages, as for the name of a tool, writes
        for the message outside.
        """
        self._finish_segment()
        outer = _innermost(self._loops[:-1])
        is_earlier = message is not None and outer is not None and message < outer
        self._loops[-1].message = None if is_earlier else message

    def fetch(self, message: int) -> None:
        """Records that a message is assigned to a name, as in loops over indices.

        An iteration handles the first message that no earlier iteration has reached. Other messages
        that it assigns are ignored, as in loops over messages.
        """
        loop = self._loops[-1] if self._loops else None
        if loop is not None and loop.message is None and message > loop.furthest:
            self.reach(message)
            loop.furthest = message

    def _finish_segment(self) -> None:
        begin, self._begin = self._begin, self.length
        message = self.current
        if message is None or self.length == begin:
            return
        last = self.segments[-1] if self.segments else None
        if last is not None and (last.message, last.end) == (message, begin):
            # A loop inside of a message, over parts or tool calls, does not divide it.
            begin = self.segments.pop().begin
        self.segments.append(RenderedPart(message, begin, self.length))


def _innermost(loops: Sequence[_Loop]) -> int | None:
    return next((loop.message for loop in reversed(loops) if loop.message is not None), None)


class _Tracer(Extension):
    """The calls that templates make while they run, and the tag `{% generation %}`.

    Attributes:
        trace: of the current rendering.
        has_marks: whether the template has the tag.
    """

    tags = {"generation"}  # noqa: RUF012  as in the class it derives from
    trace: _Trace
    has_marks = False

    def parse(self, parser: Parser) -> nodes.Node:
        self.has_marks = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("mark"), [], [], body).set_lineno(line)

    def mark(self, caller: Callable[[], str]) -> str:
        text = caller()
        self.trace.marks.append(MarkedText(self.trace.current, self.trace.length, text))
        return text

    def open_loop(self) -> None:
        self.trace.open_loop()

    def close_loop(self) -> None:
        self.trace.close_loop()

    def reach(self, *targets: object) -> None:
        """Called with the values of the names in a loop's target."""
        found = map(self.trace.index_of, targets)
        self.trace.reach(next((one for one in found if one is not None), None))

    def fetch(self, value: object) -> None:
        if (message := self.trace.index_of(value)) is not None:
            self.trace.fetch(message)


def _add_calls(tree: nodes.Template, tracer: _Tracer) -> None:
    """Adds the tracer's calls to all loops, and to what loops assign, as in
    `{% set message = messages[i] %}`.
    """

    def call(method: str, *arguments: nodes.Expr) -> nodes.Node:
        return nodes.ExprStmt(tracer.call_method(method, list(arguments)))

    def loaded(target: nodes.Node) -> list[nodes.Name]:
        names = [target] if isinstance(target, nodes.Name) else target.find_all(nodes.Name)
        return [nodes.Name(one.name, "load") for one in names]

    def visit(node: nodes.Node, in_loop: bool) -> None:
        is_loop = isinstance(node, nodes.For) and not node.recursive
        in_loop = is_loop or (in_loop and not isinstance(node, nodes.Macro))
        for child in node.iter_child_nodes():
            visit(child, in_loop)
        # Lists of statements: body, else_ and elif_ of a node.
        for field in ("body", "else_"):
            statements = getattr(node, field, None)
            if isinstance(statements, list):
                setattr(node, field, [new for one in statements for new in traced(one, in_loop)])
        if is_loop:
            assert isinstance(node, nodes.For)
            node.body.insert(0, call("reach", *loaded(node.target)))

    def traced(node: nodes.Node, in_loop: bool) -> list[nodes.Node]:
        if isinstance(node, nodes.For) and not node.recursive:
            return [call("open_loop"), node, call("close_loop")]
        if in_loop and isinstance(node, nodes.Assign) and isinstance(node.node, nodes.Getitem):
            return [node, *(call("fetch", name) for name in loaded(node.target))]
        return [node]

    visit(tree, in_loop=False)
    tree.set_lineno(1)
    tree.set_environment(tracer.environment)


class _GuardedNamespace(Namespace):
    """`namespace()` of templates, without names that start with an underscore."""

    # Jinja's sandbox lets templates set them: markupsafe would call a `__html_format__`, for
    # instance `str.format`, outside of the sandbox.

    def __init__(*args: Any, **kwargs: Any) -> None:
        # A template may name an attribute `self`.
        self, *others = args
        values = dict(*others, **kwargs)
        for name in values:
            _refuse_underscore(name)
        Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        super().__setitem__(name, value)


def _refuse_underscore(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace has no attributes like {name!r}")


class _DictMaker:
    """`dict()` of templates: not the class, whose `update` would change messages in spite of the
    sandbox.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, *args: Any) -> dict[Any, Any]:
        return dict.fromkeys(*args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Unlike Jinja's own filter, which escapes for HTML and sorts keys.
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)
