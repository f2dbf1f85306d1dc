"""What two config.json of one model of the transformers library say of its arithmetic: whether
weights of the same names and shapes compute the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from megatron.core.dist_checkpointing.errors import CheckpointDamagedError
from megatron.core.log import printable
from megatron.core.options import shown
from megatron.training.checkpoint.hf_files import CONFIG_FILE

# Keys of a config.json that decide what weights of the same names and shapes compute. Rotary
# embeddings are compared as well.
_ARITHMETIC = (
    "model_type",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "layer_norm_eps",
    "norm_epsilon",
    "no_rope_layers",
)


def their_config_differences(saved: Mapping[str, Any], own: Mapping[str, Any]) -> list[str]:
    """Where both configs say something, and not the same; as clauses for a message.

    Args:
        saved: the content of a config.json.
        own: the same of the model.

    Raises:
        CheckpointDamagedError: for a rotary embedding that is none.
    """
    pairs = {name: (saved.get(name), own.get(name)) for name in _ARITHMETIC}
    pairs["rope_parameters"] = _rope(saved), _rope(own)
    pairs["partial_rotary_factor"] = _rotated_share(saved), _rotated_share(own)
    return [
        f"{CONFIG_FILE} says {name} {_shown(theirs)} where the model has {_shown(ours)}"
        for name, (theirs, ours) in pairs.items()
        if theirs is not None and ours is not None and theirs != ours
    ]


def _shown(value: Any) -> str:
    """A value for a message: numbers as they are, texts and nested values bounded."""
    return printable(str(value)) if isinstance(value, (str, int, float)) else shown(value)


def _rotated_share(config: Mapping[str, Any]) -> Any:
    parameters = _section(config, "rope_parameters")
    return parameters.get("partial_rotary_factor", config.get("partial_rotary_factor"))


def _rope(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The rotary embedding in a config.json, in the form of transformers 5 or of those before."""
    parameters = _section(config, "rope_parameters") or _section(config, "rope_scaling")
    theta = parameters.pop("rope_theta", config.get("rope_theta"))
    if theta is None:
        return None
    if isinstance(theta, bool) or not isinstance(theta, (int, float)):
        raise CheckpointDamagedError(
            f"Expected a number as rope_theta in {CONFIG_FILE}, got {shown(theta)}."
        )

    kind = parameters.pop("rope_type", "default")
    older = parameters.pop("type", kind)
    # Architectures have different defaults for it; `_rotated_share` compares it.
    parameters.pop("partial_rotary_factor", None)
    return {"rope_type": older if kind == "default" else kind, "rope_theta": theta, **parameters}


def _section(config: Mapping[str, Any], name: str) -> dict[str, Any]:
    """A copy of an object inside a config.json; empty if it is missing."""
    found = config.get(name)
    if found is not None and not isinstance(found, Mapping):
        raise CheckpointDamagedError(
            f"Expected an object as {name} in {CONFIG_FILE}, got {shown(found)}."
        )
    return dict(found or {})
