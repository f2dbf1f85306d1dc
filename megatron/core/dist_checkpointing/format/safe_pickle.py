"""Pickles of plain data and of records, read without running anything, in bounded memory and time.

[Note: unpickling] A pickle is a program for a stack machine. Its opcodes may name any function of
any module and call it, set attributes of what they have named, ask for memory for a memo of four
billion places, spell an integer of a million digits, or nest tuples until hashing one of them takes
years or all of the C stack. Python's unpickler lets a subclass look up names, but executes all the
rest itself.

So this is another machine. It knows only the opcodes that `pickle` writes for plain data and
dataclasses:

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

import pickle
import struct
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

_MAX_INTEGER_BYTES = 16
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
        self.position = 0
        self._content = content
        self._admitted = admitted
        self._what = what
        self._persistent = persistent
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each mark
        self._memo: dict[int, Any] = {}
        self._texts: dict[str, str] = {}  # long strings, each by itself
        self._num_steps = 0  # taken through what may have been recalled

    def run(self) -> object:
        """Executes opcode by opcode, up to the one that ends the pickle."""
        content, memo = self._content, self._memo
        actions = [_ACTIONS.get(number, _Machine._unknown) for number in range(256)]

        while True:
            opcode = content[self.position]
            self.position += 1

            # Most opcodes of a large `.metadata` recall something or begin a record. They are
            # executed here, because a method call costs more than all the rest of them.
            if opcode == _BINGET:
                self._stack.append(memo[content[self.position]])
                self.position += 1
            elif opcode == _LONG_BINGET:
                self._stack.append(memo[_unsigned4_at(content, self.position)[0]])
                self.position += 4
            elif opcode == _EMPTY_TUPLE:
                self._stack.append(())
            elif opcode == _EMPTY_DICT:
                self._stack.append({})
            elif opcode == _MARK:
                self._below.append(self._stack)
                self._stack = []
            elif opcode == _STOP:
                (value,) = self._stack
                return value
            else:
                actions[opcode](self)

    def _unknown(self) -> None:
        opcode = self._content[self.position - 1 : self.position]
        self._fail("opcodes of plain data", f"{opcode!r} at byte {self.position - 1}")

    # Arguments of opcodes.

    def _take(self, nbytes: int) -> bytes:
        begin = self.position
        self.position = end = begin + nbytes
        # A slice beyond the end would just be shorter.
        if end > len(self._content):
            self._fail(f"{nbytes} more bytes from byte {begin} on", f"{len(self._content) - begin}")
        return self._content[begin:end]

    def _take_number(self, nbytes: int) -> int:
        return int.from_bytes(self._take(nbytes), "little")

    def _protocol(self) -> None:
        protocol = self._take_number(1)
        if protocol > _MAX_PROTOCOL:
            self._fail(f"a protocol of at most {_MAX_PROTOCOL}", f"{protocol}")

    def _frame(self) -> None:
        # A hint for reading from a file, which has been read already.
        if self._take_number(8) > len(self._content) - self.position:
            self._fail("a frame within the file", "one that is larger")

    # Scalars.

    def _signed(self) -> None:
        # Without `_take`: a large `.metadata` has a million of these. A pickle that is cut off
        # here lacks its STOP and is refused for that.
        end = self.position + 4
        number = int.from_bytes(self._content[self.position : end], "little", signed=True)
        self._stack.append(number)
        self.position = end

    def _unsigned1(self) -> None:
        self._stack.append(self._take_number(1))

    def _unsigned2(self) -> None:
        self._stack.append(self._take_number(2))

    def _long(self) -> None:
        nbytes = self._take_number(1)
        if nbytes > _MAX_INTEGER_BYTES:
            self._fail(f"integers of at most {_MAX_INTEGER_BYTES} bytes", f"one of {nbytes}")
        self._stack.append(int.from_bytes(self._take(nbytes), "little", signed=True))

    def _float(self) -> None:
        self._stack.append(struct.unpack(">d", self._take(8))[0])

    def _text1(self) -> None:
        self._stack.append(self._take(self._take_number(1)).decode("utf-8", "surrogatepass"))

    def _text4(self) -> None:
        self._long_text(self._take_number(4))

    def _text8(self) -> None:
        self._long_text(self._take_number(8))

    def _long_text(self, nbytes: int) -> None:
        # A dict compares equal keys character by character, unless they are one object.
        text = self._take(nbytes).decode("utf-8", "surrogatepass")
        self._stack.append(self._texts.setdefault(text, text))

    # Containers. One contains what was pushed since the last mark.

    def _since_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _pop(self) -> None:
        self._stack.pop()

    def _empty_list(self) -> None:
        self._stack.append([])

    def _tuple(self) -> None:
        items = self._since_mark()
        self._stack.append(tuple(items))

    def _tuple1(self) -> None:
        self._stack[-1] = (self._stack[-1],)

    def _tuple2(self) -> None:
        last = self._stack.pop()
        self._stack[-1] = (self._stack[-1], last)

    def _tuple3(self) -> None:
        last, middle = self._stack.pop(), self._stack.pop()
        self._stack[-1] = (self._stack[-1], middle, last)

    def _append(self) -> None:
        item = self._stack.pop()
        self._expect(self._stack[-1], list).append(item)

    def _appends(self) -> None:
        items = self._since_mark()
        self._expect(self._stack[-1], list).extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._update([key, value])

    def _set_items(self) -> None:
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

    def _memoize(self) -> None:
        self._memo[len(self._memo)] = self._stack[-1]

    def _put1(self) -> None:
        self._memo[self._take_number(1)] = self._stack[-1]

    def _put4(self) -> None:
        self._memo[self._take_number(4)] = self._stack[-1]

    # Names, and objects made of what they stand for.

    def _global(self) -> None:
        module, name = self._take_line(), self._take_line()
        self._push_named(module, name)

    def _take_line(self) -> str:
        end = self._content.index(b"\n", self.position)
        return self._take(end + 1 - self.position)[:-1].decode()

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        self._push_named(self._expect(module, str), self._expect(name, str))

    def _push_named(self, module: str, name: str) -> None:
        if (module, name) not in self._admitted:
            raise CheckpointError(
                f"Expected nothing but {self._what} in {self._source}, got {module}.{name}."
            )
        self._stack.append(self._admitted[module, name])

    def _reduce(self) -> None:
        args, function = self._expect(self._stack.pop(), tuple), self._stack.pop()
        self._take_steps(len(args))
        self._stack.append(self._expect(function, Call).result(args))

    def _new_object(self) -> None:
        args, kind = self._stack.pop(), self._stack.pop()
        if args != () or type(kind) is not RecordClass:
            got = f"a {type(kind).__name__} and a {type(args).__name__}"
            self._fail("a class and no arguments", got)
        self._stack.append(Record(kind.kind))

    def _build(self) -> None:
        state = self._stack.pop()
        record = self._stack[-1]
        if type(record) is dict:
            return  # attributes of an OrderedDict, in which torch keeps the versions of modules
        if type(record) is not Record:
            self._fail("state of a record", f"a {type(record).__name__} that is given some")
        record.state = state

    def _persistent_id(self) -> None:
        if self._persistent is None:
            self._fail("no persistent ids", "one")
        self._stack.append(self._persistent(self._stack.pop()))

    def _expect(self, found: Any, kind: type) -> Any:
        if type(found) is not kind:
            wanted = f"a {kind.__name__} at byte {self.position - 1}"
            self._fail(wanted, f"a {type(found).__name__}")
        return found


def _pushing(value: object) -> Callable[[_Machine], None]:
    return lambda machine: machine._stack.append(value)


_BINGET, _LONG_BINGET, _STOP = map(ord, (pickle.BINGET, pickle.LONG_BINGET, pickle.STOP))
_EMPTY_TUPLE, _EMPTY_DICT, _MARK = map(ord, (pickle.EMPTY_TUPLE, pickle.EMPTY_DICT, pickle.MARK))
_unsigned4_at = struct.Struct("<I").unpack_from
_ACTIONS: dict[int, Callable[[_Machine], None]] = {
    ord(opcode): action  # besides those of `_Machine.run`
    for opcode, action in (
        (pickle.PROTO, _Machine._protocol),
        (pickle.FRAME, _Machine._frame),
        (pickle.BININT, _Machine._signed),
        (pickle.BININT1, _Machine._unsigned1),
        (pickle.BININT2, _Machine._unsigned2),
        (pickle.LONG1, _Machine._long),
        (pickle.BINFLOAT, _Machine._float),
        (pickle.NONE, _pushing(None)),
        (pickle.NEWTRUE, _pushing(True)),
        (pickle.NEWFALSE, _pushing(False)),
        (pickle.SHORT_BINUNICODE, _Machine._text1),
        (pickle.BINUNICODE, _Machine._text4),
        (pickle.BINUNICODE8, _Machine._text8),
        (pickle.POP, _Machine._pop),
        (pickle.EMPTY_LIST, _Machine._empty_list),
        (pickle.TUPLE, _Machine._tuple),
        (pickle.TUPLE1, _Machine._tuple1),
        (pickle.TUPLE2, _Machine._tuple2),
        (pickle.TUPLE3, _Machine._tuple3),
        (pickle.APPEND, _Machine._append),
        (pickle.APPENDS, _Machine._appends),
        (pickle.SETITEM, _Machine._set_item),
        (pickle.SETITEMS, _Machine._set_items),
        (pickle.MEMOIZE, _Machine._memoize),
        (pickle.BINPUT, _Machine._put1),
        (pickle.LONG_BINPUT, _Machine._put4),
        (pickle.GLOBAL, _Machine._global),
        (pickle.STACK_GLOBAL, _Machine._stack_global),
        (pickle.REDUCE, _Machine._reduce),
        (pickle.NEWOBJ, _Machine._new_object),
        (pickle.BUILD, _Machine._build),
        (pickle.BINPERSID, _Machine._persistent_id),
    )
}
