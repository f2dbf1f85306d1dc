"""Models of the transformers library that read images become this project's and back and compute
the same.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from torch import nn

from megatron.core.models.families.vision import VISION_FAMILIES
from megatron.core.models.hugging_face import (
    build_model,
    config_differences,
    config_from_hf,
    hf_config,
)
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from tests.unit_tests.core.models.families.helpers.their_models import (
    content_of,
    copy_from_theirs,
    copy_to_theirs,
)
from tests.unit_tests.core.models.multimodal.helpers.their_images import (
    CASES,
    ImageBatch,
    build,
    image_batch,
    their_model,
)


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def test_every_family_is_compared() -> None:
    assert {case.split()[0] for case in CASES} == {family.model_type for family in VISION_FAMILIES}


def batch_of(case: str) -> ImageBatch:
    tower = CASES[case]["vision_config"]
    width = tower["in_channels"] * tower["temporal_patch_size"] * tower["patch_size"] ** 2
    return image_batch(width=width)


@torch.no_grad()
def logits_of(model: nn.Module, batch: ImageBatch) -> torch.Tensor:
    if isinstance(model, VisionLanguageModel):
        own: torch.Tensor = model(batch.tokens, images=batch.images, positions=batch.positions)
        return own
    theirs: torch.Tensor = model(**batch.theirs).logits
    return theirs


def train(model: VisionLanguageModel, batch: ImageBatch) -> None:
    """Three steps that move every weight."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)
    for _ in range(3):
        optimizer.zero_grad()
        labels = batch.tokens.roll(-1, dims=1)
        model(
            batch.tokens, labels, images=batch.images, positions=batch.positions
        ).mean().backward()
        assert all(parameter.grad is not None for parameter in model.parameters())
        optimizer.step()


@pytest.mark.parametrize("case", CASES)
def test_logits_with_images_match_transformers_in_both_directions(
    transformers: Any, case: str
) -> None:
    batch = batch_of(case)
    theirs = their_model(transformers, case)

    # From the library's model to this project's.
    description = config_from_hf(content_of(theirs), "config.json")
    model = build_model(description)
    assert isinstance(model, VisionLanguageModel)
    copy_from_theirs(model.eval(), theirs)
    expected = logits_of(theirs, batch)
    torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-4, atol=1e-4)

    # From this project's model to the library's, by a config written here, after training here.
    train(model, batch)
    own = json.loads(json.dumps(hf_config(description)))
    assert own["architectures"] == [type(theirs).__name__]
    config = transformers.AutoConfig.for_model(own.pop("model_type"), **own)
    again = build(transformers, config).eval()
    copy_to_theirs(model, again)
    trained = logits_of(again, batch)
    torch.testing.assert_close(logits_of(model, batch), trained, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(trained, expected, rtol=0.01, atol=0.01), "training changed them"

    assert config_differences(content_of(again), "config.json", description) == []
    assert config_from_hf(content_of(again), "config.json") == description
