"""Our GPT under the names of the transformers library: the architecture that computes the same, its
config, and the place of each weight.

`megatron/core/models/families/` has a table for each architecture. One fits exactly or not at all.
Dropout is left out, since it concerns training only.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from megatron.core.models.families import config_json
from megatron.core.models.families.config_json import family_of, read_config, write_config
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import FusedWeight, fused_weights
from megatron.core.transformer.layer_specs import model_spec


def hf_config(config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """The content of config.json for a GPT.

    Args:
        vocab_size: rows of the embedding, padding included.

    Raises:
        ConfigError: naming the flags, for a GPT that none of the architectures computes.
    """
    spec = model_spec(config)
    return write_config(family_of(spec, config.hf_architecture), spec, vocab_size)


def config_from_hf(content: Mapping[str, Any], source: str) -> tuple[TransformerConfig, int]:
    """The GPT that a config.json describes, and the number of rows of its embedding.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: for other architectures, for missing fields, and, by name and value, for
            whatever a GPT here does not have.
    """
    return read_config(content, source)


def config_differences(
    content: Mapping[str, Any], source: str, config: TransformerConfig, vocab_size: int
) -> list[str]:
    """Where a config.json and a GPT differ, each difference as a clause.

    Whether embeddings are tied is not compared, since a folder may hold a tied weight twice: the
    weights tell.

    Args:
        source: the file, for messages.
        vocab_size: rows of the GPT's embedding.
    """
    return config_json.config_differences(content, source, model_spec(config), vocab_size)


def hf_rows(
    model: GPTModel, there: Collection[str] = (), architecture: str | None = None
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
    family = family_of(model.spec, architecture or model.config.hf_architecture).as_in(there)
    fused = fused_weights(model)
    rows: dict[str, int] = {}
    for name, parameter in model.named_parameters():
        sections = fused.get(name)
        sizes = parameter.shape[:1] if sections is None else sections.sizes
        rows |= zip(section_names(name, sections), sizes, strict=True)
    rows |= {name: len(buffer) for name, buffer in saved_buffers(model).items()}
    layers = model.spec.layers
    return {own: family.rows_of(own, num_rows, layers) for own, num_rows in rows.items()}


def ignored_prefixes(model: GPTModel, content: Mapping[str, Any]) -> tuple[str, ...]:
    """How the names of tensors in a folder begin that the transformers library does not load into
    such a model either.

    Args:
        content: of the folder's config.json; empty if it has none.
    """
    architecture = content.get("model_type") or model.config.hf_architecture
    return family_of(model.spec, architecture).ignored_prefixes(len(model.spec.layers), content)


def saved_buffers(model: GPTModel) -> dict[str, Tensor]:
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
