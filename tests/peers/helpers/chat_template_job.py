"""Applies TRL's chat templates to conversations with the transformers library.

    python -m tests.peers.helpers.chat_template_job TOKENIZER REQUESTS RESULTS

`REQUESTS` has conversations by name, in JSON. `RESULTS` gets the source of each template and the
result of `apply_chat_template` for each conversation, null if it raised.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


def template_folder() -> Path:
    """Returns TRL's directory of templates, without importing TRL."""
    spec = importlib.util.find_spec("trl")
    assert spec is not None, "the environment has it"
    assert spec.submodule_search_locations is not None, "it is a package"
    return Path(spec.submodule_search_locations[0]) / "chat_templates"


def apply(tokenizer: PreTrainedTokenizerFast, record: dict[str, Any]) -> dict[str, Any] | None:
    """Returns the tokens of a conversation, and the mask of the tokens that the template marks."""
    try:
        found = tokenizer.apply_chat_template(
            record["messages"],
            tools=record.get("tools"),
            return_assistant_tokens_mask=True,
            return_dict=True,
        )
    except Exception:  # a template may raise nearly anything
        return None
    return {"tokens": found["input_ids"], "mask": found["assistant_masks"]}


def main(tokenizer_file: str, requests: str, results: str) -> None:
    """Renders all requests with all templates."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=tokenizer_file, **SPECIAL)
    records = json.loads(Path(requests).read_text())
    found = {}
    for path in sorted(template_folder().glob("*.jinja")):
        tokenizer.chat_template = path.read_text()
        made = {name: apply(tokenizer, record) for name, record in records.items()}
        found[path.stem] = {"source": tokenizer.chat_template, "made": made}
    Path(results).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
