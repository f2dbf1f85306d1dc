"""Words of bash scripts, what variables may hold, and edits that leave a script a script."""

from __future__ import annotations

import subprocess

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_hybrid.launch_script import DELETED, without_deleted
from megatron_hybrid.shell_words import ShellSyntaxError, Variables, tokens_of

# What scripts are made of, in any order.
PIECES = st.sampled_from(
    [
        *"--flag --other=1 ' \" $X ${X} ${X:- } $( ) ` A=( A+=( ( (( )) <<EOF EOF <<<".split(),
        *"; | && \\ torchrun pretrain_gpt.py word ${A[@]} $@ fi ;; esac done $((1+2))".split(),
        *(" ", "\n", "\\\n", "\t", "\r\n", "# note", "'a b'", '"a b"'),
        *("if x; then", "case a in b)", "for X in 1 2; do"),
    ]
)
TEXTS = st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=200)


def words(text: str) -> list[str]:
    return [token.raw for token in tokens_of(text) if token.kind == "word"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a 'b c' d", ["a", "'b c'", "d"]),
        ('"a \\" b" c', ['"a \\" b"', "c"]),
        ("a#b # c", ["a#b"]),
        ("a\\ b \\\n c", ["a\\ b", "c"]),
        ("x=$(echo 'a)' \"$(b c)\") d", ["x=$(echo 'a)' \"$(b c)\")", "d"]),
        ("${X:-\"it's}\"} ${Y:-'}'} b", ['${X:-"it\'s}"}', "${Y:-'}'}", "b"]),
        ('"${X:-it\'s}" b', ['"${X:-it\'s}"', "b"]),
        ("$((1 << 2)) b", ["$((1 << 2))", "b"]),
        ("((i < 3)) && b", ["i", "b"]),
        ("cat <<EOF more\nit's\nEOF\nb", ["cat", "more", "b"]),
        ("cat <<-'E O'\n\tit's\n\tE O\nb", ["cat", "b"]),
        ("cat <<< it\nb", ["cat", "b"]),
        ("a;b|c&&d>e", ["a", "b", "c", "d"]),
        ("a 8 2>&1 b &>>log c 3< in d", ["a", "8", "b", "c", "d"]),
        ("a <(b) c > >(d e) f", ["a", "<(b)", "c", "f"]),
        ("a \\\r\n b\r\n", ["a", "b"]),
        ("`a 'b` c", ["`a 'b`", "c"]),
        ("$'a\\'b' c", ["$'a\\'b'", "c"]),
    ],
)
def test_words_end_where_bash_ends_them(text, expected):
    assert words(text) == expected


@pytest.mark.parametrize(
    ("text", "line"), [("\n'a", 2), ('a\n\n"b', 3), ("$(a", 1), ("A=(\n", 1), ("${a", 1)]
)
def test_what_has_no_end_is_an_error_with_its_line(text, line):
    with pytest.raises(ShellSyntaxError, match=rf"^line {line}: expected a bash script, got "):
        tokens_of(text)


@settings(max_examples=200, deadline=None)
@given(TEXTS)
def test_any_text_is_tokens_in_their_order_or_an_error(text):
    try:
        tokens = tokens_of(text)
    except ShellSyntaxError:
        return
    ends = [0]
    for token in tokens:
        assert ends[-1] <= token.start <= token.end <= len(text)
        assert token.raw == text[token.start : token.end]
        ends.append(token.end)


def variables(text: str) -> Variables:
    return Variables(tokens_of(text))


@pytest.mark.parametrize(
    ("text", "word", "expected"),
    [
        ("TP=1", "$TP", {"1"}),
        ("TP=1", '"${TP}x"', {"1x"}),
        ("TP=1", "'$TP'", {"$TP"}),
        ("if a; then TP=1; else TP='2'; fi", "${TP}", {"1", "2"}),
        ("A=1\nB=$A\nexport C=${B}0", "$C", {"10"}),
        ("TP=1\nTP=${TP:-1}", "$TP", None),
        ("TP=$1", "$TP", None),
        ("for TP in 1 2; do", "$TP", None),
        ("TP=1; read -r TP", "$TP", None),
        ("TP=1; ((TP = 2))", "$TP", None),
        ("TP=1; TP+=0", "$TP", None),
        ("TP=(1)", "$TP", None),
        ("A=$B\nB=$A", "$A", None),
        ("", "$NONE", None),
        ("A=1", "$(echo $A)", None),
    ],
)
def test_a_variable_holds_what_the_script_assigns_if_that_is_all_there_is(text, word, expected):
    found = variables(text).expanded(word)
    assert found == (None if expected is None else frozenset(expected))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        # An array, a line each; `@@` is deleted.
        ("A=(\n    @@--b\n    c\n)\n", "A=(\n    c\n)\n"),
        ("A=(\n    a\n    @@--b\n)\n", "A=(\n    a\n)\n"),
        ("A=(\n    @@--b # why\n)\n", "A=(\n    # why\n)\n"),
        ("A=(a @@--b)\n", "A=(a)\n"),
        ("A=(@@--b c)\n", "A=(c)\n"),
        # A command over several lines.
        ("x \\\n  @@--b \\\n  c\n", "x \\\n  c\n"),
        ("x \\\n  c \\\n  @@--b\ny\n", "x \\\n  c\ny\n"),
        ("x \\\n  @@--b\n\ny", "x\n\ny"),
        ('x="\n  a \\\n  @@--b"\n', 'x="\n  a"\n'),
        ("x @@--b # c\n", "x # c\n"),
        ("x \\\r\n  c \\\r\n  @@--b\r\ny\r\n", "x \\\r\n  c\r\ny\r\n"),
    ],
)
def test_a_deleted_word_takes_its_line_along_and_leaves_no_backslash_behind(text, expected):
    assert without_deleted(text.replace("@@--b", DELETED)) == expected


def test_deletions_that_follow_each_other_are_one():
    text = f"x \\\n  {DELETED} {DELETED} \\\n  {DELETED}\ny\n"
    assert without_deleted(text) == "x\ny\n"


def test_the_scanner_agrees_with_bash(tmp_path):
    """Bash prints the words of an array; nothing but `printf` runs."""
    elements = 'a \'b c\' "d \\" $ e" f\\ g $\'h i\' j#k \\\n l "m"\'n o\'p ${X:-"q r"}'
    script = tmp_path / "words.sh"
    script.write_text(f"A=({elements} # no more\n)\nprintf '%s\\n' \"${{#A[@]}}\"\n")
    counted = subprocess.run(["bash", script], capture_output=True, text=True, check=True).stdout
    text = script.read_text()
    kinds = [token.kind for token in tokens_of(text)]
    inside = kinds[: kinds.index("close")]
    assert inside.count("word") == int(counted) == 9
