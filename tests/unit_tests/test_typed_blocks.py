"""The blocks of a page of typed commands, and the loose comparison of its output."""

from __future__ import annotations

import pytest

from tests.helpers.doc_commands import DOCS
from tests.helpers.typed_pages import missing_lines, typed_blocks

PAGE = """
```bash
make data
```

```text
749 documents
```

```bash title="Press Ctrl-C when it prints 75/500"
make pretrain
```

```bash title="Leave it running, and go on here when it prints 150/500"
make pretrain
```

```bash title="In a second terminal"
kill 1
```

```text
gone
```

```text title="In the first terminal"
back
```

```text title="Something like"
never the same
```

```python
print("not typed")
```
"""


def test_titles_of_blocks_specify_the_input_its_terminal_and_its_time() -> None:
    data, stopped, left, second = typed_blocks(PAGE)
    assert (data.line, data.commands, data.is_second) == (2, "make data", False)
    assert [printed.text for printed in data.printed] == ["749 documents"]
    assert (stopped.interrupt_at, stopped.leave_at) == ("75/500", None)
    assert (left.interrupt_at, left.leave_at) == (None, "150/500")
    assert second.is_second
    assert [(printed.text, printed.is_of_first) for printed in second.printed] == [
        ("gone", False),
        ("back", True),
    ]


@pytest.mark.parametrize("fence", ['bash title="When you like"', 'text title="Elsewhere"'])
def test_a_title_of_another_form_is_rejected_with_its_line(fence: str) -> None:
    with pytest.raises(ValueError, match="in line 5"):
        typed_blocks(f"```bash\ntrue\n```\n\n```{fence}\n```\n")


@pytest.mark.parametrize(
    ("shown", "printed", "missing"),
    [
        ("25/500  loss 7.4688  eta 2m42s", "13:18:53  25/500  loss 7.4   eta 31s", []),
        ("took 0.07 s; 7.67 MiB", "took 1 min 7 s; 1.2 GiB", []),
        ("in iteration 76...: it will end", "in iteration 76, forward: it will end", []),
        ("first\n\nlast", "\x1b[2K\rfirst\r\nsecond\nlast", []),
        ("loss 7.4688", "lost 7.4688", ["loss 7.4688"]),
        ("second\nfirst", "first\nsecond", ["first"]),
        ("a\na", "a\nb", ["a"]),
        ("a ... c", "a b", ["a ... c"]),
    ],
)
def test_figures_and_lines_left_out_may_differ_but_not_words_and_order(
    shown: str, printed: str, missing: list[str]
) -> None:
    assert missing_lines(shown, printed) == missing


def test_the_tutorial_stops_kills_and_resumes_a_run() -> None:
    blocks = typed_blocks((DOCS / "tutorial.md").read_text())
    assert [block.interrupt_at for block in blocks if block.interrupt_at] == ["75/500"]
    assert [block.leave_at for block in blocks if block.leave_at] == ["150/500"]
    assert [block.commands.count("kill -9") for block in blocks if block.is_second] == [1]
