"""Which layers are of a kind: a number, or a list of zeros and ones in Python's syntax.

Megatron's flags have either form. For 8 layers:

    "4"                1 1 1 0 1 1 1 0     all but every fourth
    "[1,1,1,0]*2"      1 1 1 0 1 1 1 0
    "([1]*3+[0])*2"    1 1 1 0 1 1 1 0
"""

from __future__ import annotations

import ast

from megatron.core.options import ConfigError, expect

# What such an option admits, in messages.
PATTERN_NOUN = 'a number, or zeros and ones such as "([1]*3+[0])*6"'

_MOST_CHARACTERS = 2**18  # as many layers as there may be, one by one
_MOST_OPERATIONS = 200
_MOST_LAYERS = 2**16


def layer_pattern(
    flag: str, text: str, num_layers: int, *, every_nth: bool, from_first: bool = False
) -> tuple[bool, ...]:
    """For each layer, whether it is of the flag's kind.

    Args:
        flag: for messages.
        text: a number N or a list of zeros and ones, one for each layer.
        every_nth: of a number N, whether every N-th layer is of the kind; else all other layers
            are.
        from_first: of a number N, whether layer 0 is the first of these; else it is layer N - 1.

    Raises:
        ConfigError: for anything else, or for a list that is not `num_layers` long.
    """
    text = text.strip()
    if text.isascii() and text.isdecimal():
        number = int(text[:20])
        expect(number >= 1, flag, "a number of layers >= 1, or a list of zeros and ones", text)
        start = 0 if from_first else 1
        numbers = range(start, start + num_layers)
        return tuple((index % number == 0) == every_nth for index in numbers)

    found = _evaluated(flag, text)
    expect(
        len(found) == num_layers,
        flag,
        f"a number, or zeros and ones for --num-layers {num_layers}",
        len(found),
    )
    return tuple(found)


def _evaluated(flag: str, text: str) -> list[bool]:
    """The list that an expression of lists, +, * and parentheses represents."""
    try:
        if len(text) > _MOST_CHARACTERS:
            raise ValueError("too long")
        tree = ast.parse(text, mode="eval")
        if sum(isinstance(node, ast.BinOp) for node in ast.walk(tree)) > _MOST_OPERATIONS:
            raise ValueError("too many operations")
        return _value_of(tree.body)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise ConfigError(
            f'{flag}: expected a number, or zeros and ones such as "([1]*3+[0])*6", got '
            f"{text[:80]!r}."
        ) from error


def _value_of(node: ast.expr) -> list[bool]:
    """ValueError for other expressions, and for lists of too many layers."""
    match node:
        case ast.List(elts=elements):
            found = [_bit(element) for element in elements]
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            found = _value_of(left) + _value_of(right)
        case ast.BinOp(op=ast.Mult(), left=left, right=ast.Constant(value=int() as times)):
            part = _value_of(left)
            # Before the list is made: a factor may have many digits.
            if isinstance(times, bool) or times < 1 or times * len(part) > _MOST_LAYERS:
                raise ValueError("too long")
            found = part * times
        case _:
            raise ValueError("not a list")
    if len(found) > _MOST_LAYERS:
        raise ValueError("too long")
    return found


def _bit(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value in (0, 1):
        return node.value == 1
    raise ValueError("not 0 or 1")
