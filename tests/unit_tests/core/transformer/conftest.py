"""The small configuration that the tests of the transformer's parts vary, and its layer's spec."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import LayerSpec

ConfigFactory = Callable[..., TransformerConfig]


@pytest.fixture
def make_config() -> ConfigFactory:
    """Builds a config of one small layer without dropout; keywords change it."""

    def make(**changes: Any) -> TransformerConfig:
        values: dict[str, Any] = {
            "num_layers": 1,
            "hidden_size": 32,
            "num_attention_heads": 4,
            "ffn_hidden_size": 48,
            "attention_dropout": 0.0,
            "hidden_dropout": 0.0,
        }
        return TransformerConfig(**{**values, **changes})

    return make


@pytest.fixture
def make_spec(make_config: ConfigFactory) -> Callable[..., LayerSpec]:
    """Builds the spec of that layer; keywords change its config."""

    def make(**changes: Any) -> LayerSpec:
        return model_spec(make_config(**changes)).layers[0]

    return make
