"""Pickles of plain data and of records, read without running anything, in bounded memory and time.

[Note: unpickling] A pickle is a program for a stack machine. Its opcodes may name any function of
any module and call it, set attributes of what they have named, ask for memory for a memo of four
billion places, spell an integer of a million digits, or nest tuples until hashing one of them takes
years or all of the C stack. Python's unpickler lets a subclass look up names, but executes all the
rest itself.

So this is another machine. `pickletools` takes the opcodes apart, and executes nothing. The machine
knows only those that `pickle` writes for plain data and dataclasses:

- A name stands for what the caller has listed under it; every other name is refused.
- Only a `Call` of that list can be called. An object of a class becomes a `Record`, which holds
  what it is given until its reader has checked every field.
- Integers have at most 128 bits, keys of a dict are scalars or flat, and nothing is allocated
  because the pickle states a number: memory and time are proportional to its own length.
- A pickle recalls an object of any length in two bytes. An opcode that has to walk what it recalls
  (the hash of a tuple, the arguments of a call) would make the time quadratic. So all such steps
  together are bounded, and equal long strings are one object, which makes comparing them free.

The result may still refer to one object from many places, or to itself. `expect_tree` refuses
values that would take too long, or too many levels, to walk.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Iterable, Mapping, Sized
from typing import Any, cast

import torch

from megatron.core.dist_checkpointing.errors import (
    CheckpointDamagedError,
    CheckpointError,
    UntrustedReader,
    reason,
)

MAX_DIMS = 64  # of a tensor: torch's own bound

_MAX_INTEGER_BITS = 128
_MAX_PROTOCOL = 5
_MAX_DEPTH = 100  # of a value
_MAX_SHARED = 1_000_000  # values beyond those that a pickle spells: it may refer to some again
_MAX_ARGUMENTS = 1000  # of a call: a path has an argument for each of its folders

# Keys of a dict are these, or flat tuples of them: hashing them takes no longer than they are.
_SCALARS = (str, int, float, bool, type(None))
_FLAT_KEYS = (tuple, torch.Size)


class RecordClass:
    """A class that a pickle names: making an object of it makes a `Record`."""

    __slots__ = ("kind",)

    def __init__(self, kind: type) -> None:
        self.kind = kind


class Record:
    """Stands for an object of `kind`, and holds the state that the pickle gives it."""

    __slots__ = ("kind", "state")

    def __init__(self, kind: type) -> None:
        self.kind = kind
        self.state: Any = None


class Call:
    """A function that a pickle names and may call. It must check its arguments."""

    __slots__ = ("_function",)

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function

    def result(self, args: tuple[object, ...]) -> object:
        """Calls the function. ValueError for more arguments than any of these functions has."""
        if len(args) > _MAX_ARGUMENTS:
            raise ValueError(f"Expected at most {_MAX_ARGUMENTS} arguments, got {len(args)}.")
        return self._function(*args)


def size_of(sizes: object) -> torch.Size:
    """The function that the pickle of a torch.Size calls. ValueError if `sizes` are not sizes."""
    if type(sizes) is not tuple or len(sizes) > MAX_DIMS:
        raise ValueError(f"Expected a size as a tuple of at most {MAX_DIMS} integers.")
    if not all(type(size) is int for size in sizes):
        raise ValueError("Expected a size as a tuple of integers.")
    return torch.Size(sizes)


Admitted = Mapping[tuple[str, str], object]  # what a pickle may name, by module and name


def read_pickle(
    content: bytes,
    source: str,
    admitted: Admitted,
    what: str,
    persistent: Callable[[object], object] | None = None,
) -> object:
    """Reads a pickle. See [Note: unpickling].

    Args:
        source: the file's name, for messages.
        admitted: what it may name, and what each name stands for.
        what: the same in words: "the classes of DCP's metadata".
        persistent: what a persistent id stands for. Default: there must be none.

    Raises:
        CheckpointDamagedError: if it is not exactly one pickle of the opcodes that are known here.
        CheckpointError: if it names something else.
    """
    machine = _Machine(content, source, admitted, what, persistent)
    try:
        value = machine.run()
    except CheckpointError:
        raise
    except Exception as error:  # a damaged program raises anything, IndexError for example
        raise CheckpointDamagedError(
            f"Expected a pickle in {source}, got {reason(error)}."
        ) from None
    # Other readers may look at bytes behind the first pickle, and find something else there.
    if machine.position != len(content):
        raise CheckpointDamagedError(
            f"Expected {source} to end with its pickle at byte {machine.position}, got "
            f"{len(content)} bytes."
        )
    return value


def expect_tree(value: object, nbytes: int, leaves: tuple[type, ...], source: str) -> None:
    """Checks that a value can be walked: of bounded size and depth, and all of it plain data.

    Args:
        nbytes: of the pickle that it comes from, which spells no more values than that.
        leaves: the types of what may be in its lists, tuples and dicts.

    Raises:
        CheckpointDamagedError: if it is too deep, or too large once every reference is followed.
        CheckpointError: if it has parts of another type.
    """
    # Level by level: a recursion into a prepared value could exhaust the stack.
    max_nodes, num_nodes, level = nbytes + _MAX_SHARED, 0, [value]
    for _ in range(_MAX_DEPTH):
        if not level:
            return
        num_nodes += len(level)
        below: list[object] = []
        for item in level:
            if type(item) in (list, tuple):
                below += item  # type: ignore[arg-type]  # as just checked
            elif type(item) is dict:
                below += item.values()
                num_nodes += sum(len(key) for key in item if type(key) in _FLAT_KEYS)
            elif type(item) not in leaves:
                raise CheckpointError(
                    f"Expected plain data in {source}, got a {type(item).__name__}."
                )
            # A single container may be referred to a million times.
            if num_nodes + len(below) > max_nodes:
                raise CheckpointDamagedError(
                    f"Expected at most {max_nodes} values in {source}, got more."
                )
        level = below
    raise CheckpointDamagedError(
        f"Expected at most {_MAX_DEPTH} levels of values in {source}, got more."
    )


class _Machine(UntrustedReader):
    """One pickle being read."""

    def __init__(
        self,
        content: bytes,
        source: str,
        admitted: Admitted,
        what: str,
        persistent: Callable[[object], object] | None,
    ) -> None:
        super().__init__(source)
        self.position = 0  # of the opcode that is being executed; behind the last one in the end
        self._content = content
        self._admitted = admitted
        self._what = what
        self._persistent = persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}
        self._texts: dict[str, str] = {}  # by themselves
        self._num_steps = 0  # taken through what may have been recalled

    def run(self) -> object:
        """Executes opcode by opcode, up to the one that ends the pickle."""
        # It takes opcodes apart, and reads no more for an argument than there is.
        for opcode, argument, position in pickletools.genops(self._content):
            self.position = position or 0
            action = _ACTIONS.get(opcode.name)
            if action is None:
                self._fail("opcodes of plain data", f"{opcode.name} at byte {position}")
            action(self, argument)
        self.position += 1
        (value,) = self._stack
        return value

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _push_integer(self, value: int) -> None:
        if value.bit_length() > _MAX_INTEGER_BITS:
            self._fail(f"integers of at most {_MAX_INTEGER_BITS} bits", f"{value.bit_length()}")
        self._stack.append(value)

    def _push_text(self, text: str) -> None:
        # A dict compares equal keys character by character, unless they are one object.
        self._stack.append(self._texts.setdefault(text, text))

    def _check_protocol(self, protocol: int) -> None:
        if protocol > _MAX_PROTOCOL:
            self._fail(f"a protocol of at most {_MAX_PROTOCOL}", f"{protocol}")

    def _check_frame(self, nbytes: int) -> None:
        # A hint for reading from a file, which has been read already.
        if nbytes > len(self._content) - self.position:
            self._fail("a frame within the file", "one that is larger")

    # Containers. One contains what was pushed since the last mark.

    def _mark(self, _: None) -> None:
        self._below.append(self._stack)
        self._stack = []

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _pop(self, _: None) -> None:
        self._stack.pop()

    def _tuple(self, _: None) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _append(self, _: None) -> None:
        item = self._stack.pop()
        self._expect(self._stack[-1], list).append(item)

    def _appends(self, _: None) -> None:
        items = self._since_mark()
        self._expect(self._stack[-1], list).extend(items)

    def _set_item(self, _: None) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self, _: None) -> None:
        self._update(self._since_mark())

    def _update(self, items: list[Any]) -> None:
        content = self._expect(self._stack[-1], dict)
        keys = items[::2]
        # Almost all keys are strings, which need no further check.
        if {*map(type, keys)} != {str}:
            for key in keys:
                self._check_key(key)
        content.update(zip(keys, items[1::2], strict=True))

    def _check_key(self, key: object) -> None:
        parts = key if type(key) in _FLAT_KEYS else (key,)
        self._take_steps(len(cast(Sized, parts)))
        if not all(isinstance(part, (*_SCALARS, Record)) for part in cast(Iterable[object], parts)):
            self._fail("scalars as keys", f"a {type(key).__name__}")

    def _take_steps(self, count: int) -> None:
        """Counts steps through something that two bytes of the pickle may have recalled."""
        self._num_steps += count
        most = len(self._content) + _MAX_SHARED
        if self._num_steps > most:
            self._fail(f"at most {most} parts of keys and arguments", "more")

    # The memo: objects to recall, by number.

    def _put(self, number: int | None) -> None:
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def _get(self, number: int) -> None:
        self._stack.append(self._memo[number])

    # Names, and objects made of what they stand for.

    def _global(self, names: str) -> None:
        module, _, name = names.partition(" ")
        self._push_named(module, name)

    def _stack_global(self, _: None) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_named(self._expect(module, str), self._expect(name, str))

    def _push_named(self, module: str, name: str) -> None:
        if (module, name) not in self._admitted:
            raise CheckpointError(
                f"Expected nothing but {self._what} in {self._source}, got {module}.{name}."
            )
        self._stack.append(self._admitted[module, name])

    def _reduce(self, _: None) -> None:
        args, function = self._expect(self._stack.pop(), tuple), self._stack.pop()
        self._take_steps(len(args))
        self._stack.append(self._expect(function, Call).result(args))

    def _new_object(self, _: None) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        if args != () or type(kind) is not RecordClass:
            got = f"a {type(kind).__name__} and a {type(args).__name__}"
            self._fail("a class and no arguments", got)
        self._stack.append(Record(kind.kind))

    def _build(self, _: None) -> None:
        state = self._stack.pop()
        record = self._stack[-1]
        if type(record) is dict:
            return  # attributes of an OrderedDict, in which torch keeps the versions of modules
        if type(record) is not Record:
            self._fail("state of a record", f"a {type(record).__name__} that is given some")
        record.state = state

    def _persistent_id(self, _: None) -> None:
        if self._persistent is None:
            self._fail("no persistent ids", "one")
        self._stack.append(self._persistent(self._stack.pop()))

    def _expect(self, found: Any, kind: type) -> Any:
        if type(found) is not kind:
            wanted = f"a {kind.__name__} at byte {self.position}"
            self._fail(wanted, f"a {type(found).__name__}")
        return found


def _pushing(make: Callable[[], object]) -> Callable[[_Machine, Any], None]:
    return lambda machine, _: machine._push(make())


def _tuple_of(length: int) -> Callable[[_Machine, Any], None]:
    def push(machine: _Machine, _: None) -> None:
        items = [machine._stack.pop() for _ in range(length)]
        machine._push(tuple(reversed(items)))

    return push


# By their names in `pickletools`; the second argument is the opcode's own, or None.
_ACTIONS: dict[str, Callable[[_Machine, Any], None]] = {
    "PROTO": _Machine._check_protocol,
    "FRAME": _Machine._check_frame,
    "STOP": lambda *_: None,
    **dict.fromkeys(("BININT", "BININT1", "BININT2", "LONG1"), _Machine._push_integer),
    "BINFLOAT": _Machine._push,
    **dict.fromkeys(("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8"), _Machine._push_text),
    "NONE": _Machine._push,
    "NEWTRUE": _pushing(lambda: True),
    "NEWFALSE": _pushing(lambda: False),
    "EMPTY_TUPLE": _pushing(tuple),
    "EMPTY_LIST": _pushing(list),
    "EMPTY_DICT": _pushing(dict),
    "MARK": _Machine._mark,
    "POP": _Machine._pop,
    "TUPLE": _Machine._tuple,
    "TUPLE1": _tuple_of(1),
    "TUPLE2": _tuple_of(2),
    "TUPLE3": _tuple_of(3),
    "APPEND": _Machine._append,
    "APPENDS": _Machine._appends,
    "SETITEM": _Machine._set_item,
    "SETITEMS": _Machine._set_items,
    **dict.fromkeys(("MEMOIZE", "BINPUT", "LONG_BINPUT"), _Machine._put),
    **dict.fromkeys(("BINGET", "LONG_BINGET"), _Machine._get),
    "GLOBAL": _Machine._global,
    "STACK_GLOBAL": _Machine._stack_global,
    "REDUCE": _Machine._reduce,
    "NEWOBJ": _Machine._new_object,
    "BUILD": _Machine._build,
    "BINPERSID": _Machine._persistent_id,
}
