"""Our GPT under the names of the transformers library: the architecture that computes the same, and
its name for each weight.

An architecture fits exactly or not at all. Dropout is left out, since it concerns training only.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron.core.models.families.row_map import RowMap
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import FusedWeight, fused_weights

# Which linear layers have biases.
_NONE, _QKV, _ALL = "none", "in the QKV projection", "in all linear layers"

_OUTER_NAMES = {
    "embedding.word_embeddings": "model.embed_tokens",
    "decoder.final_layernorm": "model.norm",
    "output_layer": "lm_head",
}
_LAYER_NAMES = {
    "input_layernorm": "input_layernorm",
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.q_layernorm": "self_attn.q_norm",
    "self_attention.k_layernorm": "self_attn.k_norm",
    "self_attention.linear_proj": "self_attn.o_proj",
    "pre_mlp_layernorm": "post_attention_layernorm",
}
_GATED_MLP = {
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.linear_fc2": "mlp.down_proj",
}


@dataclass(frozen=True)
class _Architecture:
    """A causal language model of the transformers library: its arithmetic, and the names in its
    config and of its weights.

    Attributes:
        model_type: in config.json.
        class_name: of the model with its output layer.
        eps_name: of the norms' epsilon in config.json.
        mlp_names: of the MLP's linear layers, by ours.
        biases: the layers that may have biases, with what config.json says of each choice.
        is_partly_rotated: whether less than all channels of a head may be rotated.
        has_even_heads: whether `hidden_size` must be a multiple of the number of heads.
        has_own_head_dim: whether heads may be of another width than `hidden_size` divided by their
            number.
    """

    model_type: str
    class_name: str
    normalization: str
    eps_name: str
    mlp_names: Mapping[str, str]
    biases: Mapping[str, Mapping[str, bool]]
    qk_layernorm: bool = False
    position: str = "rope"
    is_partly_rotated: bool = False
    has_even_heads: bool = False
    has_own_head_dim: bool = True

    @property
    def is_gated(self) -> bool:
        """Whether the MLP is SwiGLU; else exact GELU."""
        return self.mlp_names is _GATED_MLP

    def name_of(self, own: str) -> str:
        """Its name for one of our weights."""
        module, _, kind = own.rpartition(".")
        if module in _OUTER_NAMES:
            return f"{_OUTER_NAMES[module]}.{kind}"
        _, _, number, within = module.split(".", 3)  # decoder.layers.<number>.<within>
        return f"model.layers.{number}.{(_LAYER_NAMES | dict(self.mlp_names))[within]}.{kind}"


_LLAMA_BIASES = {
    _NONE: {"attention_bias": False, "mlp_bias": False},
    _ALL: {"attention_bias": True, "mlp_bias": True},
}
_ARCHITECTURES = (
    _Architecture(
        "llama",
        "LlamaForCausalLM",
        "RMSNorm",
        "rms_norm_eps",
        _GATED_MLP,
        _LLAMA_BIASES,
        has_even_heads=True,
    ),
    _Architecture(
        "qwen3",
        "Qwen3ForCausalLM",
        "RMSNorm",
        "rms_norm_eps",
        _GATED_MLP,
        {_NONE: {"attention_bias": False}},
        qk_layernorm=True,
    ),
    _Architecture("qwen2", "Qwen2ForCausalLM", "RMSNorm", "rms_norm_eps", _GATED_MLP, {_QKV: {}}),
    _Architecture(
        "smollm3",
        "SmolLM3ForCausalLM",
        "RMSNorm",
        "rms_norm_eps",
        _GATED_MLP,
        _LLAMA_BIASES,
        position="none",
    ),
    _Architecture(
        "stablelm",
        "StableLmForCausalLM",
        "LayerNorm",
        "layer_norm_eps",
        _GATED_MLP,
        {_NONE: {"use_qkv_bias": False}, _QKV: {"use_qkv_bias": True}},
        is_partly_rotated=True,
        has_own_head_dim=False,
    ),
    _Architecture(
        "starcoder2",
        "Starcoder2ForCausalLM",
        "LayerNorm",
        "norm_epsilon",
        {"mlp.linear_fc1": "mlp.c_fc", "mlp.linear_fc2": "mlp.c_proj"},
        {_NONE: {"use_bias": False}, _ALL: {"use_bias": True}},
    ),
    _Architecture(
        "arcee",
        "ArceeForCausalLM",
        "RMSNorm",
        "rms_norm_eps",
        {"mlp.linear_fc1": "mlp.up_proj", "mlp.linear_fc2": "mlp.down_proj"},
        _LLAMA_BIASES,
        has_even_heads=True,
    ),
)


def hf_config(config: TransformerConfig, vocab_size: int) -> dict[str, Any]:
    """The content of config.json for a GPT.

    Args:
        vocab_size: rows of the embedding, padding included.

    Raises:
        ConfigError: naming the flags, for a GPT that none of the architectures computes.
    """
    architecture = _architecture_of(config)
    content: dict[str, Any] = {
        "architectures": [architecture.class_name],
        "model_type": architecture.model_type,
        "vocab_size": vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.ffn_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_attention_heads,
        "num_key_value_heads": config.num_key_value_heads,
        "hidden_act": "silu" if config.swiglu else "gelu",
        architecture.eps_name: config.norm_epsilon,
        "initializer_range": config.init_method_std,
        "tie_word_embeddings": not config.untie_embeddings_and_output_weights,
        # The architectures' own are token ids of other vocabularies.
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        **architecture.biases[_biases_of(config)],
        **_rope(config, architecture),
    }

    if architecture.has_own_head_dim:
        content["head_dim"] = config.head_dim
    if config.max_position_embeddings is not None:
        content["max_position_embeddings"] = config.max_position_embeddings
    if config.position_embedding_type == "none":
        # By layer: 1 would mean rotary positions.
        content["no_rope_layers"] = [0] * config.num_layers

    return content


def config_from_hf(content: Mapping[str, Any], source: str) -> tuple[TransformerConfig, int]:
    """The GPT that a config.json describes, and the number of rows of its embedding.

    Args:
        source: the file, for messages.

    Raises:
        ConfigError: for other architectures and settings than those that `hf_config` writes.
    """

    def wanted(name: str) -> Any:
        if name not in content:
            raise ConfigError(f"Expected {name} in {source}, got none.")
        return content[name]

    kind = wanted("model_type")
    known = {architecture.model_type: architecture for architecture in _ARCHITECTURES}
    if not isinstance(kind, str) or kind not in known:
        raise ConfigError(
            f"Expected a model_type of {', '.join(known)} in {source}, got {shown(kind)}."
        )

    architecture, heads = known[kind], wanted("num_attention_heads")
    _check_window(content, kind, source)
    values: dict[str, Any] = {
        "num_layers": wanted("num_hidden_layers"),
        "hidden_size": wanted("hidden_size"),
        "num_attention_heads": heads,
        "ffn_hidden_size": wanted("intermediate_size"),
        "kv_channels": content.get("head_dim"),
        "group_query_attention": True,
        "num_query_groups": content.get("num_key_value_heads", heads),
        "max_position_embeddings": content.get("max_position_embeddings"),
        "normalization": architecture.normalization,
        "norm_epsilon": wanted(architecture.eps_name),
        "qk_layernorm": architecture.qk_layernorm,
        "swiglu": architecture.is_gated,
        "position_embedding_type": architecture.position,
        "untie_embeddings_and_output_weights": wanted("tie_word_embeddings") is False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        **_biases_in(content, architecture, source),
        **_rotation_in(content),
    }
    config, vocab_size = TransformerConfig(**values), wanted("vocab_size")
    if type(vocab_size) is not int or vocab_size < 1:
        raise ConfigError(
            f"Expected vocab_size in {source} to be an integer >= 1, got {shown(vocab_size)}."
        )
    return config, vocab_size


def _check_window(content: Mapping[str, Any], kind: str, source: str) -> None:
    """ConfigError for attention within a sliding window; ours attends to everything before."""
    # Starcoder2 has no switch: a width turns its window on. The others note the width of one that
    # is switched off.
    name, off = ("sliding_window", None)
    if kind != "starcoder2":
        name, off = ("use_sliding_window", False)
    if (got := content.get(name)) not in (None, off):
        raise ConfigError(
            f"Expected {name} in {source} to be {shown(off)}, since attention here has no sliding "
            f"window, got {shown(got)}."
        )


def _biases_in(
    content: Mapping[str, Any], architecture: _Architecture, source: str
) -> dict[str, bool]:
    """Our options for the biases that a config.json asks for."""
    for kind, settings in architecture.biases.items():
        if all(content.get(name, False) is value for name, value in settings.items()):
            return {"add_bias_linear": kind == _ALL, "add_qkv_bias": kind == _QKV}
    names = {name for settings in architecture.biases.values() for name in settings}
    got = ", ".join(f"{name} {shown(content.get(name))}" for name in sorted(names))
    expected = " or ".join(architecture.biases)
    raise ConfigError(f"Expected biases {expected} in {source}, got {got}.")


def _rotation_in(content: Mapping[str, Any]) -> dict[str, Any]:
    """Our options for a config.json's rotary embedding, in either of the forms of `_rope`."""
    parameters = content.get("rope_parameters")
    values = {**content, **(parameters if isinstance(parameters, Mapping) else {})}
    names = {"rope_theta": "rotary_base", "partial_rotary_factor": "rotary_percent"}
    return {
        own: float(value) if type(value) is int else value
        for name, own in names.items()
        if (value := values.get(name)) is not None
    }


def hf_names(model: GPTModel) -> dict[str, str]:
    """The names of all weights and sections of fused weights, by their names in our checkpoints
    without "model.".

    Raises:
        ConfigError: as `hf_config`.
    """
    architecture, fused = _architecture_of(model.config), fused_weights(model)
    return {
        own: architecture.name_of(own)
        for name, _ in model.named_parameters()
        for own in section_names(name, fused.get(name))
    }


def hf_rows(model: GPTModel) -> dict[str, RowMap]:
    """Where the rows of all weights and sections of fused weights lie in the tensors of the
    transformers library, by their names in our checkpoints without "model.".

    Raises:
        ConfigError: as `hf_config`.
    """
    return {own: RowMap(name) for own, name in hf_names(model).items()}


def section_names(name: str, fused: FusedWeight | None) -> list[str]:
    """The names in our checkpoints, without "model.", of a parameter or of its sections."""
    if fused is None:
        return [name]
    module, _, kind = name.rpartition(".")
    return [f"{module.rpartition('.')[0]}.{section}.{kind}" for section in fused.names]


def _rope(config: TransformerConfig, architecture: _Architecture) -> dict[str, Any]:
    """The rotary embedding, under the keys of transformers 5 and of the versions before."""
    parameters: dict[str, Any] = {"rope_theta": config.rotary_base}
    if architecture.is_partly_rotated:
        parameters["partial_rotary_factor"] = config.rotary_percent
    return {"rope_parameters": {"rope_type": "default", **parameters}, **parameters}


def _biases_of(config: TransformerConfig) -> str:
    if config.add_bias_linear:
        return _ALL
    return _QKV if config.add_qkv_bias else _NONE


def _architecture_of(config: TransformerConfig) -> _Architecture:
    """The architecture that computes the same as a GPT of this config. ConfigError if none does."""
    candidates = [
        (_differences(config, architecture), architecture) for architecture in _ARCHITECTURES
    ]
    differences, nearest = min(candidates, key=lambda candidate: _distance(candidate[0]))
    if not differences:
        return nearest
    flags = ", ".join(difference.flag for difference in differences)
    expected = ", ".join(f"{difference.flag} {difference.expected}" for difference in differences)
    got = ", ".join(f"{difference.got}" for difference in differences)
    raise ConfigError(
        f"{flags}: expected a GPT that an architecture of the transformers library computes, of "
        f"which {nearest.class_name} is the nearest ({expected}), got {got}."
    )


class _Difference(NamedTuple):
    """What an architecture does otherwise."""

    flag: str
    expected: object
    got: object


def _distance(differences: list[_Difference]) -> tuple[int, int]:
    """Of another kind of layer comes first: it is the last thing that anybody would change."""
    return sum(
        difference.flag in ("--normalization", "--swiglu") for difference in differences
    ), len(differences)


def _differences(config: TransformerConfig, architecture: _Architecture) -> list[_Difference]:
    heads, biases = config.num_attention_heads, _biases_of(config)
    is_rotated = config.position_embedding_type == "rope"
    found = [
        _Difference("--normalization", architecture.normalization, config.normalization),
        _Difference("--swiglu", architecture.is_gated, config.swiglu),
        _Difference("--qk-layernorm", architecture.qk_layernorm, config.qk_layernorm),
        _Difference(
            "--position-embedding-type", architecture.position, config.position_embedding_type
        ),
    ]
    found = [difference for difference in found if difference.expected != difference.got]
    if biases not in architecture.biases:
        expected = f"for biases {' or '.join(architecture.biases)}"
        found.append(
            _Difference("--disable-bias-linear and --add-qkv-bias", expected, f"biases {biases}")
        )

    if is_rotated and config.rotary_dim != config.head_dim and not architecture.is_partly_rotated:
        found.append(_Difference("--rotary-percent", 1.0, config.rotary_percent))
    if architecture.has_even_heads and config.hidden_size % heads:
        found.append(
            _Difference("--hidden-size", f"a multiple of {heads} heads", config.hidden_size)
        )

    if not architecture.has_own_head_dim and heads * config.head_dim != config.hidden_size:
        found.append(
            _Difference("--kv-channels", f"{config.hidden_size / heads:g}", config.head_dim)
        )

    return found
