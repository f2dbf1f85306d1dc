"""From a config.json to our options, and from a model's spec to a config.json.

A family fits a spec exactly or not at all: its own file is read back, and must give the same
spec. A file that leaves out part of a model is therefore never written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.dense import (
    ARCEE,
    GEMMA3,
    LLAMA,
    QWEN2,
    QWEN3,
    QWEN3_5,
    SMOLLM3,
    STABLELM,
    STARCODER2,
)
from megatron.core.models.families.family import Family
from megatron.core.models.families.fields import num_heads_of
from megatron.core.models.families.mixtures import (
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
    OLMOE,
    QWEN3_5_MOE,
    QWEN3_MOE,
    QWEN3_NEXT,
)
from megatron.core.models.families.quantization import refuse_quantized_config
from megatron.core.models.families.spec_differences import KIND_FLAGS, Difference, spec_differences
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec

# Where several fit, the first one is taken.
FAMILIES = (
    LLAMA,
    QWEN3,
    QWEN2,
    SMOLLM3,
    STABLELM,
    STARCODER2,
    ARCEE,
    GEMMA3,
    QWEN3_5,
    QWEN3_MOE,
    QWEN3_NEXT,
    QWEN3_5_MOE,
    OLMOE,
    DEEPSEEK_V3,
    GLM4_MOE,
    GPT_OSS,
)

# Fields of any architecture without effect on results computed from tokens and weights: where
# a file comes from, token ids, dtypes, training, classification, generation.
HARMLESS = frozenset(
    """
    model_type architectures auto_map _name_or_path name_or_path transformers_version
    unsloth_fixed unsloth_version _attn_implementation attn_implementation
    _attn_implementation_autoset _experts_implementation
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    decoder_start_token_id tokenizer_class prefix
    dtype torch_dtype pretraining_tp torchscript use_cache cache_implementation
    output_router_logits
    attention_dropout hidden_dropout residual_dropout embedding_dropout classifier_dropout
    gradient_checkpointing
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    is_llama_config max_sequence_length transformers.js_config
    return_dict output_attentions output_hidden_states output_scores return_dict_in_generate
    max_length min_length max_new_tokens do_sample early_stopping num_beams num_beam_groups
    num_return_sequences diversity_penalty temperature top_k top_p typical_p repetition_penalty
    length_penalty no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens
    forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty
    remove_invalid_values
    """.split()
)


def read_config(content: Mapping[str, Any], source: str) -> tuple[TransformerConfig, int]:
    """The options of the model that a config.json describes, and the rows of its embedding.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: for an architecture that is not known here; for quantized weights; for a field
            that must be there and is not; for a value, by its name, that requires a feature that
            models here do not have.
    """
    file = ConfigFile(content, source)
    kind = file.wanted("model_type")
    families = {family.model_type: family for family in FAMILIES}
    if not isinstance(kind, str) or kind not in families:
        why = ", a model of more than text" if file.get("text_config") else ""
        raise ConfigError(
            f"Expected a model_type of {', '.join(families)} in {source}, got {shown(kind)}{why}."
        )
    return read_family(families[kind], file)


def read_family(family: Family, file: ConfigFile) -> tuple[TransformerConfig, int]:
    """The options of the family's model that a config.json describes, and the rows of its
    embedding. ConfigError as `read_config`.
    """
    refuse_quantized_config(file)
    options = {
        **family.options,
        "hf_architecture": family.model_type,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
    }
    known = {"vocab_size", *HARMLESS, *family.harmless}
    for field in family.fields:
        options |= field.read(file)
        known.update(field.names)
    file.refuse_others(file.content, known, family.model_type)

    return TransformerConfig(**options), file.integer("vocab_size")


def write_config(family: Family, spec: ModelSpec, vocab_size: int) -> dict[str, Any]:
    """The config.json of a spec that a family fits."""
    content: dict[str, Any] = {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "vocab_size": vocab_size,
    }
    for field in family.fields:
        content |= field.write(spec)
    # The architectures' own are token ids of other vocabularies.
    return content | {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def family_of(spec: ModelSpec, preferred: str | None = None) -> Family:
    """The family that computes the same as a model of this spec.

    Args:
        preferred: the model_type of the one that is taken if several do; None, or one that does
            not: the first.

    Raises:
        ConfigError: naming the flags, if no family fits.
    """
    candidates, errors = [], []
    for family in sorted(FAMILIES, key=lambda family: family.model_type != preferred):
        try:
            differences = differences_of(family, spec)
        except ConfigError as error:  # the config.json of this family would be invalid
            errors.append(error)
            continue
        if not differences:
            return family
        candidates.append((differences, family))
    if not candidates:
        raise errors[0]

    differences, nearest = min(candidates, key=lambda candidate: _distance(candidate[0]))
    flags = ", ".join(difference.flag for difference in differences)
    expected = ", ".join(difference.expected_flag for difference in differences)
    got = ", ".join(difference.got_flag for difference in differences)
    raise ConfigError(
        f"{flags}: expected a GPT that an architecture of the transformers library computes, of "
        f"which {nearest.class_name} is the nearest ({expected}), got {got}."
    )


def clauses(
    config: TransformerConfig, num_rows: int, source: str, spec: ModelSpec, vocab_size: int
) -> list[str]:
    """Returns the differences between a config.json and a model's spec, as clauses.

    Tied embeddings are not compared, since files may contain a tied weight twice.

    Args:
        config, num_rows: the model that the file describes.
        source: the file, for messages.
    """
    differences = spec_differences(model_spec(config), spec, ignored=("is_tied",))
    found = [(one.name, one.expected, one.got) for one in differences]
    if num_rows != vocab_size:
        found.append(("vocab_size", num_rows, vocab_size))
    return [
        f"{source} says {name} {theirs} where the model has {own}" for name, theirs, own in found
    ]


def differences_of(family: Family, spec: ModelSpec) -> list[Difference]:
    """Differences of the model that the family's file for this spec would describe."""
    heads = num_heads_of(spec)
    if family.has_even_heads and spec.hidden_size % heads:
        expected = f"a multiple of {heads} heads"
        return [Difference("--hidden-size", "hidden_size", expected, spec.hidden_size)]

    content = write_config(family, spec, vocab_size=1)
    config, _ = read_family(family, ConfigFile(content, family.class_name))
    return spec_differences(model_spec(config), spec)


def _distance(differences: list[Difference]) -> tuple[int, int]:
    """The order in which families are near: first families with the same kinds of layers."""
    return sum(difference.flag in KIND_FLAGS for difference in differences), len(differences)
