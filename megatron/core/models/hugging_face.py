"""Our models under the names of the transformers library: the architecture that computes the same,
its config, and the rows of each weight.

`families/` has a table for each architecture. A table fits exactly or not at all. Dropout is not
compared, since it affects training only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, TypeAlias

from torch import Tensor

from megatron.core.low_precision.amax_history import AmaxHistory
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
    """Returns the model with initial weights. ConfigError for parts that do not fit together."""
    config, vocab_size, vision = description
    if vision is None:
        return GPTModel(config, vocab_size)
    return VisionLanguageModel(config, vision, vocab_size)


def description_of(model: OwnModel) -> ModelDescription:
    """Returns the description that a model was built from."""
    vision = model.vision if isinstance(model, VisionLanguageModel) else None
    return ModelDescription(model.config, model.vocab_size, vision)


def hf_config(description: ModelDescription) -> dict[str, Any]:
    """Returns the content of config.json for a model.

    Raises:
        ConfigError: with the flags, if no architecture computes the same.
    """
    config, vocab_size, vision = description
    spec = model_spec(config)
    if vision is None:
        return write_config(family_of(spec, config.hf_architecture), spec, vocab_size)
    family = vision_family_of(spec, vision, config.hf_architecture)
    return write_vision_config(family, spec, vision, vocab_size)


def config_from_hf(content: Mapping[str, Any], source: str) -> ModelDescription:
    """Returns the model that a config.json describes.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: for other architectures, for missing fields, and for fields whose value no
            model here implements.
    """
    if is_vision_config(content):
        return read_vision_config(content, source)
    return ModelDescription(*read_config(content, source))


def config_differences(
    content: Mapping[str, Any], source: str, description: ModelDescription
) -> list[str]:
    """Returns the differences between a config.json and a model, as clauses.

    Tied embeddings are not compared, since files may contain a tied weight twice.

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
    """Returns the rows of all weights, sections of fused weights and buffers in the tensors of the
    transformers library, by their names in our checkpoints without "model.". One of their tensors
    may contain several of this project's.

    Args:
        there: the names of tensors in the files to load, which decide the form of experts; empty
            for the form that is written.
        architecture: the files' model_type, which is preferred if several architectures compute the
            same as the model; None for the model's own.

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
    """Returns the further names in files of a tied weight, by the name that is written."""
    text = model.language_model if isinstance(model, VisionLanguageModel) else model
    if text.output_layer is not None:
        return {}
    rows = hf_rows(model)
    prefix = "language_model." if isinstance(model, VisionLanguageModel) else ""
    return {rows[f"{prefix}embedding.word_embeddings.weight"].name: ["lm_head.weight"]}


def ignored_prefixes(model: OwnModel, content: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the prefixes of tensors that the transformers library does not load into such a model
    either.

    Args:
        content: content of config.json; empty without one.
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
    """Returns the persistent buffers by name that files have: biases of experts, in fp32."""
    return {
        f"{prefix}.{name}": buffer
        for prefix, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set and not isinstance(module, AmaxHistory)
    }


def section_names(name: str, fused: FusedWeight | None) -> list[str]:
    """Returns the names of a parameter or its sections in our checkpoints, without "model."."""
    if fused is None:
        return [name]
    module, _, kind = name.rpartition(".")
    return [f"{module.rpartition('.')[0]}.{section}.{kind}" for section in fused.names]
