"""Sequences that ranks divide have the losses that the transformers library computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megatron.core.distributed.config import A2A, ALL_GATHER
from megatron.core.distributed.context import divide_context
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.hugging_face import config_from_hf
from tests.helpers.ranks import run_ranks
from tests.unit_tests.core.models.families.helpers.their_models import (
    VOCAB,
    content_of,
    copy_from_theirs,
    their_model,
)

LENGTH = 4096


def _losses(
    content: dict[str, Any], weights: dict[str, Tensor], text: Tensor, comm_type: str
) -> Tensor:
    """The losses of this rank's tokens."""
    config, vocab_size, _ = config_from_hf(content, "config.json")
    model = GPTModel(config, vocab_size).eval()
    model.load_state_dict(weights)
    divide_context(model, dist.group.WORLD, comm_type)
    with torch.no_grad():
        losses: Tensor = model(text[:, :-1].contiguous(), text[:, 1:].contiguous())
    return losses


@pytest.mark.wide
@pytest.mark.parametrize("comm_type", [A2A, ALL_GATHER])
@pytest.mark.parametrize("num_ranks", [2, 4])
def test_divided_sequences_have_the_losses_of_transformers(comm_type: str, num_ranks: int) -> None:
    theirs = their_model(pytest.importorskip("transformers"), "qwen3_5_text")
    text = torch.randint(VOCAB, (1, LENGTH + 1), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = theirs(text[:, :-1]).logits
    expected = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten(), reduction="none")

    content = {**content_of(theirs), "max_position_embeddings": LENGTH}
    config, vocab_size, _ = config_from_hf(content, "config.json")
    whole = GPTModel(config, vocab_size)
    copy_from_theirs(whole, theirs)
    parts = run_ranks(num_ranks, _losses, content, whole.state_dict(), text, comm_type)
    found = torch.cat(parts, dim=1).flatten()
    assert found.shape == expected.shape
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
