"""Our models under the names of the transformers library: the architecture that computes the same,
its config, and the place of each weight.

`families/` has a table for each architecture. One fits exactly or not at all. Dropout is left out,
since it concerns training only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from megatron.core.models.description import ModelDescription
from megatron.core.models.families import config_json
from megatron.core.models.families.config_json import family_of, read_config, write_config
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.families.vision import (
    is_vision_config,
    read_vision_config,
    vision_differences,
    vision_family_of,
    write_vision_config,
)
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron.core.options import ConfigError
from megatron.core.transformer.fused_weight import FusedWeight, fused_weights
from megatron.core.transformer.layer_specs import model_spec

OwnModel: TypeAlias = GPTModel | VisionLanguageModel


def build_model(description: ModelDescription) -> OwnModel:
    """The model, with initial weights. ConfigError for parts that do not fit together."""
    config, vocab_size, vision = description
    if vision is None:
        return GPTModel(config, vocab_size)
    return VisionLanguageModel(config, vision, vocab_size)


def description_of(model: OwnModel) -> ModelDescription:
    """What a model was built of."""
    vision = model.vision if isinstance(model, VisionLanguageModel) else None
    return ModelDescription(model.config, model.vocab_size, vision)


def hf_config(description: ModelDescription) -> dict[str, Any]:
    """The content of config.json for a model.

    Raises:
        ConfigError: naming the flags, for a model that none of the architectures computes.
    """
    config, vocab_size, vision = description
    spec = model_spec(config)
    if vision is None:
        return write_config(family_of(spec, config.hf_architecture), spec, vocab_size)
    family = vision_family_of(spec, vision, config.hf_architecture)
    return write_vision_config(family, spec, vision, vocab_size)


def config_from_hf(content: Mapping[str, Any], source: str) -> ModelDescription:
    """The model that a config.json describes.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: for other architectures, for missing fields, and, by name and value, for
            whatever a model here does not have.
    """
    if is_vision_config(content):
        return read_vision_config(content, source)
    return ModelDescription(*read_config(content, source))


def config_differences(
    content: Mapping[str, Any], source: str, description: ModelDescription
) -> list[str]:
    """Where a config.json and a model differ, each difference as a clause.

    Whether embeddings are tied is not compared, since a folder may hold a tied weight twice: the
    weights tell.

    Args:
        source: the file, for messages.
    """
    try:
        there = config_from_hf(content, source)
    except ConfigError as error:
        return [str(error).removesuffix(".")]

    spec = model_spec(description.config)
    found = config_json.clauses(
        there.config, there.vocab_size, source, spec, description.vocab_size
    )
    if (there.vision is None) != (description.vision is None):
        kinds = ["text alone", "images and text"]
        theirs, own = kinds if there.vision is None else reversed(kinds)
        found.append(f"{source} is of a model of {theirs} where this one is of {own}")
    elif there.vision is not None and description.vision is not None:
        differences = vision_differences(there.vision, description.vision, spec)
        found += [f"{source} says {one}" for one in differences]
    return found


def hf_rows(
    model: OwnModel, there: Collection[str] = (), architecture: str | None = None
) -> dict[str, RowMap]:
    """Where the rows of all weights, sections of fused weights and buffers lie in the tensors of
    the transformers library, by their names in our checkpoints without "model.". Several of ours
    may lie in one of theirs.

    Args:
        there: the names of tensors in files to load, which may have experts in more than one form;
            empty: the form that is written.
        architecture: the files' model_type, which counts if several architectures compute what the
            model does; None: the model's own.

    Raises:
        ConfigError: as `hf_config`.
    """
    fused = fused_weights(model)
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        sections = fused.get(name)
        sizes = parameter.shape[:1] if sections is None else sections.sizes
        rows |= zip(section_names(name, sections), sizes, strict=True)
    rows |= {name: len(buffer) for name, buffer in saved_buffers(model).items()}

    preferred = architecture or model.config.hf_architecture
    if isinstance(model, VisionLanguageModel):
        spec = model.language_model.spec
        rows_of = vision_family_of(spec, model.vision, preferred).as_in(there).rows_of
    else:
        spec = model.spec
        rows_of = family_of(spec, preferred).as_in(there).rows_of
    return {own: rows_of(own, num_rows, spec.layers) for own, num_rows in rows.items()}


def tied_names(model: OwnModel) -> dict[str, list[str]]:
    """Further names, in files, of a weight that is used twice, by the one that is written."""
    text = model.language_model if isinstance(model, VisionLanguageModel) else model
    if text.output_layer is not None:
        return {}
    rows = hf_rows(model)
    prefix = "language_model." if isinstance(model, VisionLanguageModel) else ""
    return {rows[f"{prefix}embedding.word_embeddings.weight"].name: ["lm_head.weight"]}


def ignored_prefixes(model: OwnModel, content: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors in a folder begin that the transformers library does not load into
    such a model either.

    Args:
        content: of the folder's config.json; empty if it has none.
    """
    preferred = content.get("model_type") or model.config.hf_architecture
    if isinstance(model, VisionLanguageModel):
        spec = model.language_model.spec
        family = vision_family_of(spec, model.vision, preferred).text
        content = content.get("text_config") or {}
    else:
        spec = model.spec
        family = family_of(spec, preferred)
    return family.ignored_prefixes(len(spec.layers), content)


def saved_buffers(model: OwnModel) -> dict[str, Tensor]:
    """The buffers that belong to a state dict, by name: biases of experts, fp32."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }


def section_names(name: str, fused: FusedWeight | None) -> list[str]:
    """The names in our checkpoints, without "model.", of a parameter or of its sections."""
    if fused is None:
        return [name]
    module, _, kind = name.rpartition(".")
    return [f"{module.rpartition('.')[0]}.{section}.{kind}" for section in fused.names]
