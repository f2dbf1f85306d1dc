"""Architectures of the transformers library that read images and text: a vision tower followed by a
decoder of one of the families. Their config.json has a section for each, and the ids of image
tokens.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.models.description import ModelDescription
from megatron.core.models.families.config_file import ConfigFile
from megatron.core.models.families.config_json import (
    HARMLESS,
    differences_of,
    read_family,
    write_config,
)
from megatron.core.models.families.dense import QWEN3_5, QWEN3_VL
from megatron.core.models.families.family import Family
from megatron.core.models.families.fields import ACTIVATIONS
from megatron.core.models.families.mixtures import QWEN3_5_MOE
from megatron.core.models.families.quantization import refuse_quantized_config
from megatron.core.models.families.row_map import RowMap
from megatron.core.models.multimodal.vision_config import OF_PICTURES, VisionConfig, sections_of
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.spec import Activation, LayerSpec, ModelSpec

_TOKENS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
_SECTION = {
    "depth": "vision_num_layers",
    "hidden_size": "vision_hidden_size",
    "intermediate_size": "vision_ffn_hidden_size",
    "num_heads": "vision_num_attention_heads",
    "in_channels": "vision_in_channels",
    "patch_size": "vision_patch_size",
    "temporal_patch_size": "vision_temporal_patch_size",
    "spatial_merge_size": "vision_merge_size",
    "num_position_embeddings": "vision_num_position_embeddings",
    "initializer_range": "vision_init_method_std",
}
_DEEPSTACK = "deepstack_visual_indexes"
_NORM_EPSILON = 1e-6  # of all architectures; config.json has no field for it
_ROTARY_BASE = 10000.0  # the default in all versions
_SECTIONS = (11, 11, 10)  # of the decoder's planes, likewise
_TEXT = "language_model."  # before the decoder's names, here and there

_TOWER = {
    "vision_model.patch_embedding": "patch_embed.proj",
    "vision_model.position_embeddings": "pos_embed",
    "vision_projection.norm": "merger.norm",
    "vision_projection.linear_fc1": "merger.linear_fc1",
    "vision_projection.linear_fc2": "merger.linear_fc2",
}
_BLOCK = {
    "input_layernorm": "norm1",
    "pre_mlp_layernorm": "norm2",
    "self_attention.query": "attn.qkv",
    "self_attention.key": "attn.qkv",
    "self_attention.value": "attn.qkv",
    "self_attention.linear_proj": "attn.proj",
    "mlp.linear_fc1": "mlp.linear_fc1",
    "mlp.linear_fc2": "mlp.linear_fc2",
}
_FUSED = ("self_attention.query", "self_attention.key", "self_attention.value")


@dataclass(frozen=True)
class VisionFamily:
    """An architecture that reads images and text.

    Attributes:
        model_type: in config.json.
        class_name: of the model with its output layer.
        text: the decoder's.
        vision_type: the model_type of the section of the tower.
        has_deepstack: whether the tower's layers may be read by the decoder's first layers, too.
    """

    model_type: str
    class_name: str
    text: Family
    vision_type: str
    has_deepstack: bool = False

    def as_in(self, names: Collection[str]) -> VisionFamily:
        """The family with one form of experts: see `Family.as_in`."""
        return dataclasses.replace(self, text=self.text.as_in(names))

    def rows_of(self, own: str, num_rows: int, layers: tuple[LayerSpec, ...]) -> RowMap:
        """Where one of this project's tensors is in the library's: see `Family.rows_of`."""
        if own.startswith(_TEXT):
            rows = self.text.rows_of(own.removeprefix(_TEXT), num_rows, layers)
            return dataclasses.replace(rows, name=_text_name(rows.name))

        rows = _vision_rows(own, num_rows)
        return dataclasses.replace(rows, name=f"model.visual.{rows.name}")


VISION_FAMILIES = (
    VisionFamily("qwen3_5", "Qwen3_5ForConditionalGeneration", QWEN3_5, "qwen3_5_vision"),
    VisionFamily(
        "qwen3_5_moe", "Qwen3_5MoeForConditionalGeneration", QWEN3_5_MOE, "qwen3_5_moe_vision"
    ),
    VisionFamily("qwen3_vl", "Qwen3VLForConditionalGeneration", QWEN3_VL, "qwen3_vl_vision", True),
)


def is_vision_config(content: Mapping[str, Any]) -> bool:
    """Whether a config.json is of one of the architectures with a tower."""
    return content.get("model_type") in [family.model_type for family in VISION_FAMILIES]


def read_vision_config(content: Mapping[str, Any], source: str) -> ModelDescription:
    """The model that a config.json describes.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: as `config_json.read_config`.
    """
    file = ConfigFile(content, source)
    kind = file.wanted("model_type")
    family = next(one for one in VISION_FAMILIES if one.model_type == kind)
    refuse_quantized_config(file)
    known = {"text_config", "vision_config", *_TOKENS, "tie_word_embeddings", *HARMLESS}
    file.refuse_others(content, known, kind)

    # The whole model's word is the one that counts.
    tied = {"tie_word_embeddings": file.boolean("tie_word_embeddings", absent=False)}
    text = _part(file, "text_config", family.text.model_type)
    text = ConfigFile({**text.content, **tied}, text.source)
    config, vocab_size = read_family(family.text, text)

    options = _read_tower(_part(file, "vision_config", family.vision_type), family, config)
    options["mrope_section"] = _read_sections(text)
    # Zero is a token, too.
    options |= {name: content.get(name) for name in _TOKENS}
    return ModelDescription(config, vocab_size, VisionConfig(**options))


def write_vision_config(
    family: VisionFamily, spec: ModelSpec, vision: VisionConfig, vocab_size: int
) -> dict[str, Any]:
    """The config.json of a model that a family fits.

    Args:
        spec: of the decoder.
        vocab_size: rows of the embedding.
    """
    text = write_config(family.text, spec, vocab_size)
    del text["architectures"]
    mrope = {"mrope_section": list(sections_of(spec, vision)), "mrope_interleaved": True}
    text["rope_parameters"] = {**text["rope_parameters"], **mrope}

    activations = {ours: theirs for theirs, ours in reversed(ACTIVATIONS.items())}
    tower: dict[str, Any] = {name: getattr(vision, option) for name, option in _SECTION.items()}
    tower |= {
        "model_type": family.vision_type,
        "out_hidden_size": spec.hidden_size,
        "hidden_act": activations[Activation(vision.vision_activation)],
        "rope_parameters": {"rope_type": "axial", "rope_theta": vision.vision_rotary_base},
    }
    if family.has_deepstack:
        tower[_DEEPSTACK] = list(vision.vision_deepstack_layers or ())
    return {
        "architectures": [family.class_name],
        "model_type": family.model_type,
        "text_config": text,
        "vision_config": tower,
        "tie_word_embeddings": spec.is_tied,
        **{name: getattr(vision, name) for name in _TOKENS},
    }


def vision_family_of(
    spec: ModelSpec, vision: VisionConfig, preferred: str | None = None
) -> VisionFamily:
    """The family that computes the same as a model with this decoder and tower.

    Args:
        preferred: the model_type of the one that is taken if several do, or of its decoder.

    Raises:
        ConfigError: naming the flags, if no family fits.
    """
    errors = []
    for family in sorted(
        VISION_FAMILIES, key=lambda one: preferred not in (one.model_type, one.text.model_type)
    ):
        try:
            lines = [
                f"{one.flag}: expected {one.expected_flag}, got {one.got_flag}."
                for one in differences_of(family.text, spec)
            ]
        except ConfigError as error:
            lines = [str(error)]
        if vision.vision_deepstack_layers and not family.has_deepstack:
            lines.append(
                f"--vision-deepstack-layers: expected none, got "
                f"{shown(list(vision.vision_deepstack_layers))}."
            )
        if vision.vision_norm_epsilon != _NORM_EPSILON:
            lines.append(
                f"--vision-norm-epsilon: expected {_NORM_EPSILON}, got "
                f"{vision.vision_norm_epsilon}."
            )
        if not lines:
            return family
        errors.append((len(lines), family, lines))

    _, nearest, lines = min(errors, key=lambda one: one[0])
    raise ConfigError(
        "Expected a model that an architecture of the transformers library computes, "
        f"got one that differs from {nearest.class_name}, the nearest, in: {' '.join(lines)}"
    )


def vision_differences(there: VisionConfig, own: VisionConfig, spec: ModelSpec) -> list[str]:
    """Differences between a directory's tower and image tokens and a model's, each as a
    clause.

    Args:
        spec: of the decoder, which is the same in both.
    """
    own = dataclasses.replace(own, mrope_section=sections_of(spec, own))
    others = (*OF_PICTURES, "vision_init_method_std")
    names = [field.name for field in dataclasses.fields(VisionConfig) if field.name not in others]
    return [
        f"{name} {getattr(there, name)} where the model has {getattr(own, name)}"
        for name in names
        if getattr(there, name) != getattr(own, name)
    ]


def _part(file: ConfigFile, name: str, kind: str) -> ConfigFile:
    """The section of a text or vision model. ConfigError for another kind than `kind`."""
    if not file.section(name):
        raise ConfigError(f"Expected {name} in {file.source}, got none.")
    section = file.section(name)
    there = section.get("model_type", kind)
    # Early files call the tower by the name of the whole model.
    if there not in (kind, file.get("model_type")):
        raise file.error(f"model_type in {name}", kind, there)
    return ConfigFile(section, f"{name} of {file.source}")


def _read_tower(
    file: ConfigFile, family: VisionFamily, config: TransformerConfig
) -> dict[str, Any]:
    """Options of VisionConfig for the section of the tower."""
    options = {option: file.wanted(name) for name, option in _SECTION.items()}
    known = {*_SECTION, *HARMLESS, "hidden_act", "rope_parameters", "out_hidden_size"}

    activation = file.wanted("hidden_act")
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise file.error("hidden_act", f"one of {', '.join(ACTIVATIONS)}", activation)
    options["vision_activation"] = ACTIVATIONS[activation].value

    rope = dict(file.section("rope_parameters"))
    if (kind := rope.pop("rope_type", "axial")) != "axial":
        raise file.error("rope_type", "axial", kind)
    options["vision_rotary_base"] = rope.pop("rope_theta", _ROTARY_BASE)
    file.refuse_others(rope, (), "axial rotary embeddings")

    if (width := file.integer("out_hidden_size")) != config.hidden_size:
        raise file.error("out_hidden_size", f"{config.hidden_size}, the decoder's width", width)
    if family.has_deepstack:
        layers = file.wanted(_DEEPSTACK)
        if not isinstance(layers, (list, tuple)):
            raise file.error(_DEEPSTACK, "a list of layers", layers)
        options["vision_deepstack_layers"] = tuple(layers) or None
        known.add(_DEEPSTACK)
    file.refuse_others(file.content, known, family.vision_type)
    options["vision_norm_epsilon"] = _NORM_EPSILON
    return options


def _read_sections(text: ConfigFile) -> tuple[int, ...]:
    """How many planes of the decoder's rotation turn by each axis."""
    for name in ("rope_parameters", "rope_scaling"):
        sections = text.section(name).get("mrope_section")
        if sections is not None:
            if not isinstance(sections, (list, tuple)):
                raise text.error("mrope_section", "three numbers", sections)
            return tuple(sections)
    return _SECTIONS


def _text_name(theirs: str) -> str:
    """The name in the whole model of one of the decoder's tensors."""
    if not theirs.startswith("model."):
        return theirs  # the output layer's
    return f"model.{_TEXT}{theirs.removeprefix('model.')}"


def _vision_rows(own: str, num_rows: int) -> RowMap:
    """Where a tensor of the tower or the projector is; the name is without the prefix."""
    module, _, kind = own.rpartition(".")
    if module in _TOWER:
        return RowMap(f"{_TOWER[module]}.{kind}")
    if module.startswith("deepstack_projections."):
        _, number, within = module.split(".", 2)
        return RowMap(f"deepstack_merger_list.{number}.{within}.{kind}")

    _, _, number, within = module.split(".", 3)  # vision_model.layers.<number>.<within>
    start = num_rows * _FUSED.index(within) if within in _FUSED else 0
    return RowMap(f"blocks.{number}.{_BLOCK[within]}.{kind}", start=start)
