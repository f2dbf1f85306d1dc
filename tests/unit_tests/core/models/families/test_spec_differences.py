"""Every value of a spec is compared, and named by the flag that decides it."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import pytest

from megatron.core.models.families.spec_differences import Difference, spec_differences
from megatron.core.options import options_of
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec

CONFIG = TransformerConfig(
    num_layers=2,
    hidden_size=16,
    num_attention_heads=4,
    linear_attention_freq="2",
    qk_layernorm=True,
    post_norm=True,
    use_rope_scaling=True,
)
SPEC = model_spec(CONFIG)
NO_ARITHMETIC = (
    "dropout",
    "init_std",
    "output_init_std",
    "max_length",
    "is_causal",
    "z_loss_coeff",
)
FLAGS = {field.flag for field in options_of(TransformerConfig)} | {
    field.off_flag for field in options_of(TransformerConfig)
}


def other(value: Any) -> Any:
    """Another value of the same kind."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, enum.Enum):
        return next(kind for kind in type(value) if kind is not value)
    return 3.0 if value is None else value + 1


def variants(spec: Any) -> list[tuple[str, Any]]:
    """The spec with one value changed, once for each value in it and in its parts."""
    found = []
    for field in dataclasses.fields(spec):
        value = getattr(spec, field.name)
        if field.name == "layers":
            for number, layer in enumerate(value):
                for name, changed in variants(layer):
                    layers = (*value[:number], changed, *value[number + 1 :])
                    found.append((name, dataclasses.replace(spec, layers=layers)))
        elif dataclasses.is_dataclass(value):
            found += [
                (name, dataclasses.replace(spec, **{field.name: changed}))
                for name, changed in variants(value)
            ]
        else:
            found.append((field.name, dataclasses.replace(spec, **{field.name: other(value)})))
    return found


def test_every_value_that_decides_arithmetic_is_compared_and_has_a_flag() -> None:
    names = {name for name, _ in variants(SPEC)}
    assert {"softcap", "conv_kernel", "low_freq_factor", "is_zero_centered", "size"} <= names
    for name, changed in variants(SPEC):
        differences = spec_differences(SPEC, changed)
        if name in NO_ARITHMETIC:
            assert differences == []
        else:
            assert differences, name
            assert all(difference.flag in FLAGS for difference in differences), differences
    assert spec_differences(SPEC, SPEC) == []


def compared(**changes: Any) -> list[Difference]:
    return spec_differences(SPEC, spec_of(**changes))


def spec_of(**changes: Any) -> ModelSpec:
    return model_spec(dataclasses.replace(CONFIG, **changes))


def test_defaults_that_follow_from_another_flag_go_without_saying() -> None:
    assert [one.flag for one in compared(kv_channels=8)] == ["--kv-channels"]
    assert [one.flag for one in compared(swiglu=True, activation_func=None)] == ["--swiglu"]


def test_a_scale_written_as_a_power_is_the_same_scale() -> None:
    assert compared(softmax_scale=(4**-0.5) * (1 + 1e-9)) == []
    assert [one.flag for one in compared(softmax_scale=0.5001)] == ["--softmax-scale"]


@pytest.mark.parametrize(
    ("option", "values", "flags"),
    [
        ("add_bias_linear", (True, False), ("no --disable-bias-linear", "--disable-bias-linear")),
        (
            "untie_embeddings_and_output_weights",
            (True, False),
            (
                "--untie-embeddings-and-output-weights",
                "no --untie-embeddings-and-output-weights",
            ),
        ),
        ("window_size", (None, (127, 0)), ("no --window-size", "--window-size 127,0")),
        ("use_rope_scaling", (True, False), ("--use-rope-scaling", "no scaling of rotary")),
    ],
)
def test_a_difference_says_which_flags_give_the_two_values(
    option: str, values: tuple[Any, Any], flags: tuple[str, str]
) -> None:
    differences = spec_differences(*(spec_of(**{option: value}) for value in values))
    assert flags in [(one.expected_flag, one.got_flag) for one in differences]


@pytest.mark.parametrize(
    ("changes", "flag", "name"),
    [
        ({"add_bias_linear": True}, "--disable-bias-linear", "feed_forward.has_bias"),
        ({"window_size": (3, 0)}, "--window-size", "window"),
        ({"use_rope_scaling": False}, "--use-rope-scaling", "rotary.scaling"),
    ],
)
def test_a_difference_has_a_flag_and_the_values_name(
    changes: dict[str, Any], flag: str, name: str
) -> None:
    assert any(
        one.flag == flag and one.name.startswith(name)
        for one in spec_differences(
            spec_of(add_bias_linear=False), spec_of(**{"add_bias_linear": False, **changes})
        )
    )
