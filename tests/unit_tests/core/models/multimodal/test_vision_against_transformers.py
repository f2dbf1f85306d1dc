"""Models of the transformers library that read images become ours and back and compute the same."""

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
from megatron.core.transformer.fused_weight import fused_weights
from tests.unit_tests.core.models.families.helpers.their_models import (
    content_of,
    copy_from_theirs,
    copy_to_theirs,
)
from tests.unit_tests.core.models.multimodal.helpers.their_images import (
    CASES,
    TOWER,
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
def test_logits_with_images_are_those_of_transformers_in_both_directions(
    transformers: Any, case: str
) -> None:
    batch = batch_of(case)
    theirs = their_model(transformers, case)

    # Theirs becomes ours.
    description = config_from_hf(content_of(theirs), "config.json")
    model = build_model(description)
    assert isinstance(model, VisionLanguageModel)
    copy_from_theirs(model.eval(), theirs)
    expected = logits_of(theirs, batch)
    torch.testing.assert_close(logits_of(model, batch), expected, rtol=1e-4, atol=1e-4)

    # Ours becomes theirs, from a config of our own, after training here.
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


@pytest.mark.parametrize("case", CASES)
def test_images_and_where_they_stand_show_in_the_logits(transformers: Any, case: str) -> None:
    batch = batch_of(case)
    theirs = their_model(transformers, case)
    model = build_model(config_from_hf(content_of(theirs), "config.json")).eval()
    copy_from_theirs(model, theirs)
    expected = logits_of(model, batch)

    other = batch.images.patches.clone()
    other[0] += 1.0
    changed = batch._replace(images=type(batch.images)(other, batch.images.grids))
    in_rows = batch._replace(
        positions=torch.arange(batch.tokens.shape[1]).expand_as(batch.positions)
    )
    for variant in (changed, in_rows):
        found = logits_of(model, variant)
        assert not torch.allclose(found[0], expected[0], rtol=0.01, atol=0.01)
    assert torch.equal(logits_of(model, changed)[1], expected[1]), "another row's image"


def test_the_mlp_of_the_tower_is_one_matrix_and_the_decoders_are_sections(
    transformers: Any,
) -> None:
    theirs = their_model(transformers, "qwen3_5")
    fused = fused_weights(build_model(config_from_hf(content_of(theirs), "config.json")))
    assert TOWER["depth"] == 3
    assert {name for name in fused if name.startswith("vision_")} == {
        f"vision_model.layers.{layer}.self_attention.linear_qkv.{kind}"
        for layer in range(3)
        for kind in ("weight", "bias")
    }
    assert "language_model.decoder.layers.0.mlp.linear_fc1.weight" in fused
    assert "language_model.decoder.layers.0.self_attention.in_proj.weight" in fused
