"""What differs between two models' specs, named for messages."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Collection
from typing import NamedTuple

from megatron.core.transformer.spec import (
    AttentionSpec,
    DenseSpec,
    GatedDeltaNetSpec,
    LatentAttentionSpec,
    LayerSpec,
    LinearScaling,
    Llama3Scaling,
    ModelSpec,
    MoeSpec,
    RotaryScaling,
    RotarySpec,
    RouterSpec,
    Scores,
    YarnScaling,
)

# What training draws on, and how long sequences may be, changes no logits. A router's dtype is that
# of a run, as the compute dtype is, and so is a bound of the tokens that an expert takes. All
# decoders are causal; the specs of vision towers, which are not, are not compared.
_NOT_ARITHMETIC = (
    "dropout",
    "init_std",
    "output_init_std",
    "max_length",
    "is_causal",
    "dtype",
    "balancing",
    "balance_coeff",
    "z_coeff",
    "z_loss_coeff",
    "bias_update_rate",
    "capacity_factor",
    "drop_policy",
)

# The flag that decides each value, by its path in a layer's spec or in the model's.
_FLAGS = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "is_tied": "--untie-embeddings-and-output-weights",
    "embedding_scale": "--embedding-multiplier",
    "logit_softcap": "--final-logit-softcapping",
    "mixer": "--linear-attention-freq",
    "mixer.query_rank": "--q-lora-rank",
    "mixer.key_value_rank": "--kv-lora-rank",
    "mixer.content_dim": "--qk-head-dim",
    "mixer.rotary_dim": "--qk-pos-emb-head-dim",
    "mixer.value_dim": "--v-head-dim",
    "mixer.latent_norm": "--qk-layernorm",
    "mixer.latent_norm.eps": "--latent-norm-epsilon",
    "mixer.num_heads": "--num-attention-heads",
    "mixer.num_key_value_heads": "--num-query-groups",
    "mixer.head_dim": "--kv-channels",
    "mixer.scale": "--softmax-scale",
    "mixer.rotary": "--position-embedding-type",
    "mixer.rotary.share": "--rotary-percent",
    "mixer.rotary.base": "--rotary-base",
    "mixer.rotary.is_interleaved": "--rotary-interleaved",
    "mixer.rotary.scaling.linear.factor": "--rotary-seq-len-interpolation-factor",
    "mixer.rotary.scaling.llama3.factor": "--rope-scaling-factor",
    "mixer.rotary.scaling.llama3.low_freq_factor": "--rope-scaling-low-freq-factor",
    "mixer.rotary.scaling.llama3.high_freq_factor": "--rope-scaling-high-freq-factor",
    "mixer.rotary.scaling.llama3.original_length": (
        "--rope-scaling-original-max-position-embeddings"
    ),
    "mixer.rotary.scaling.yarn.factor": "--yarn-rotary-scaling-factor",
    "mixer.rotary.scaling.yarn.original_length": "--yarn-original-max-position-embeddings",
    "mixer.rotary.scaling.yarn.beta_fast": "--yarn-beta-fast",
    "mixer.rotary.scaling.yarn.beta_slow": "--yarn-beta-slow",
    "mixer.rotary.scaling.yarn.attention_factor": "--yarn-attention-factor",
    "mixer.rotary.scaling.yarn.rounds_range": "--yarn-correction-range-round-to-int",
    "mixer.window": "--window-size",
    "mixer.sinks": "--softmax-type",
    "mixer.qk_norm": "--qk-layernorm",
    "mixer.qk_norm_is_per_head": "--qk-layernorm-across-heads",
    "mixer.has_output_gate": "--attention-output-gate",
    "mixer.softcap": "--attn-logit-softcapping",
    "mixer.has_qkv_bias": "--add-qkv-bias",
    "mixer.has_output_bias": "--disable-bias-linear",
    "mixer.num_key_heads": "--linear-num-key-heads",
    "mixer.num_value_heads": "--linear-num-value-heads",
    "mixer.key_head_dim": "--linear-key-head-dim",
    "mixer.value_head_dim": "--linear-value-head-dim",
    "mixer.conv_kernel": "--linear-conv-kernel-dim",
    "mixer.norm_eps": "--norm-epsilon",
    "feed_forward": "--num-experts",
    "feed_forward.router.num_experts": "--num-experts",
    "feed_forward.router.top_k": "--moe-router-topk",
    "feed_forward.router.scores": "--moe-router-score-function",
    "feed_forward.router.is_scored_first": "--moe-router-pre-softmax",
    "feed_forward.router.is_normalized": "--moe-router-no-norm-topk",
    "feed_forward.router.scale": "--moe-router-topk-scaling-factor",
    "feed_forward.router.num_groups": "--moe-router-num-groups",
    "feed_forward.router.top_groups": "--moe-router-group-topk",
    "feed_forward.router.has_bias": "--disable-bias-linear",
    "feed_forward.router.has_expert_bias": "--moe-router-enable-expert-bias",
    "feed_forward.shared": "--moe-shared-expert-intermediate-size",
    "feed_forward.shared.size": "--moe-shared-expert-intermediate-size",
    "feed_forward.has_shared_gate": "--moe-shared-expert-gate",
    "feed_forward.rows_are_inputs": "--moe-expert-rows",
    "feed_forward.expert.size": "--moe-ffn-hidden-size",
    "feed_forward.size": "--ffn-hidden-size",
    "feed_forward.activation": "--activation-func",
    "feed_forward.is_gated": "--swiglu",
    "feed_forward.has_bias": "--disable-bias-linear",
    "feed_forward.clamp": "--activation-func-clamp-value",
    "feed_forward.up_offset": "--glu-linear-offset",
    "post_norm": "--post-norm",
}
# Flags that turn off a feature that the spec's value turns on.
_OFF_FLAGS = (
    "--untie-embeddings-and-output-weights",
    "--disable-bias-linear",
    "--no-rope-freq",
    "--moe-router-no-norm-topk",
    "--qk-layernorm-across-heads",
)
# The flag for each kind of scaling.
_SCALING_FLAGS = {
    "linear": "--rotary-seq-len-interpolation-factor",
    "llama3": "--use-rope-scaling",
    "yarn": "--position-embedding-type yarn",
}
# All norms of a model have these alike, but for the gated ones of delta nets, which are never
# zero-centred.
_NORM_FLAGS = {
    "kind": "--normalization",
    "eps": "--norm-epsilon",
    "is_zero_centered": "--apply-layernorm-1p",
}
# Parts of a spec in a message: whether they are there, or the name of their kind.
_PRESENT = ("mixer.qk_norm", "mixer.latent_norm", "post_norm", "feed_forward.shared")
_EXPERTS = "experts"
_LATENT = "latent attention"
_PARTS: dict[type, str] = {
    AttentionSpec: "attention",
    LatentAttentionSpec: _LATENT,
    GatedDeltaNetSpec: "gated delta net",
    DenseSpec: "MLP",
    MoeSpec: _EXPERTS,
    RotarySpec: "rope",
    LinearScaling: "linear",
    Llama3Scaling: "llama3",
    YarnScaling: "yarn",
}
# Flags whose defaults follow from another one: where that one differs, they go without saying.
_CONSEQUENCES = {
    "--kv-channels": ("--softmax-scale",),
    "--swiglu": ("--activation-func",),
    "--moe-router-score-function": ("--moe-router-pre-softmax", "--moe-router-no-norm-topk"),
}
# Flags that decide what kind of layers a model has, which is the last thing to change.
KIND_FLAGS = (
    "--num-experts",
    "--multi-latent-attention",
    "--linear-attention-freq",
    "--normalization",
    "--swiglu",
)


class Difference(NamedTuple):
    """A value that two models do not share.

    Attributes:
        flag: that decides it.
        name: of the value in the spec, with the layer if only some layers differ.
        expected, got: as words or numbers.
    """

    flag: str
    name: str
    expected: object
    got: object

    @property
    def expected_flag(self) -> str:
        """The expected value as a command line gives it."""
        return _as_given(self.flag, self.expected)

    @property
    def got_flag(self) -> str:
        """The model's value as a command line gives it."""
        return _as_given(self.flag, self.got)


def _as_given(flag: str, value: object) -> str:
    if flag in _OFF_FLAGS:
        value = not value
    if flag in _SCALING_FLAGS.values() and (value is None or value in _SCALING_FLAGS):
        return _SCALING_FLAGS.get(str(value), "no scaling of rotary")
    if flag == "--position-embedding-type":
        value = value or "none"
    if flag == "--window-size" and isinstance(value, int):
        value = f"{value - 1},0"  # positions before each one
    if flag == "--moe-layer-freq":
        value = value != _EXPERTS  # without the flag all layers have them
    if flag == "--multi-latent-attention":
        value = value == _LATENT
    if flag == "--num-experts" and isinstance(value, str):
        value = value == _EXPERTS

    if value is None or value is False:
        return f"no {flag}"
    return flag if value is True else f"{flag} {value}"


def spec_differences(
    expected: ModelSpec, got: ModelSpec, ignored: Collection[str] = ()
) -> list[Difference]:
    """What two models compute differently, each flag once.

    Args:
        ignored: fields of the models' specs that may differ.
    """
    if len(expected.layers) != len(got.layers):
        return [Difference("--num-layers", "num_layers", len(expected.layers), len(got.layers))]

    found = _compared(expected, got, ignored)
    by_path: dict[str, dict[int, Difference]] = {}
    for number, (one, other) in enumerate(zip(expected.layers, got.layers, strict=True)):
        for path, difference in _compared(one, other).items():
            by_path.setdefault(path, {})[number] = difference
    for path, by_layer in by_path.items():
        found[path] = _of_layers(path, by_layer, got.layers)

    by_flag = {difference.flag: difference for difference in reversed(found.values())}
    consequences = [name for flag in by_flag for name in _CONSEQUENCES.get(flag, ())]
    return [one for flag, one in reversed(by_flag.items()) if flag not in consequences]


def _of_layers(
    path: str, by_layer: dict[int, Difference], layers: tuple[LayerSpec, ...]
) -> Difference:
    """A difference of several layers: their common one, or the first one's, with its number."""
    number, first = next(iter(by_layer.items()))
    if len(by_layer) == len(layers) and len(set(by_layer.values())) == 1:
        return first

    flag = first.flag
    windows = {number for number, layer in enumerate(layers) if _has_window(layer)}
    if path == "mixer.rotary":
        flag = "--no-rope-freq"
    elif path == "feed_forward" and any(isinstance(one.feed_forward, MoeSpec) for one in layers):
        flag = "--moe-layer-freq"
    elif path == "mixer.rotary.base" and windows.issuperset(by_layer):
        flag = "--window-rotary-base"
    return first._replace(flag=flag, name=f"{first.name} of layer {number}")


def _has_window(layer: LayerSpec) -> bool:
    return isinstance(layer.mixer, AttentionSpec) and layer.mixer.window is not None


def _compared(
    expected: ModelSpec | LayerSpec, got: ModelSpec | LayerSpec, ignored: Collection[str] = ()
) -> dict[str, Difference]:
    """The values that differ, by their paths."""
    one, other = _flattened(expected, "", ignored), _flattened(got, "", ignored)
    return {
        path: Difference(
            _flag_of(path, one[path], other[path]),
            path.removeprefix("mixer."),
            one[path],
            other[path],
        )
        # A part that only one of them has is named as such, without its own parts.
        for path in one
        if path in other and not _are_equal(one[path], other[path])
    }


def _flattened(value: object, path: str, ignored: Collection[str]) -> dict[str, object]:
    """The numbers and words in a spec by their paths, and for each part the name of its kind."""
    if isinstance(value, enum.Enum):
        return {path: value.value}
    if not dataclasses.is_dataclass(value) or isinstance(value, type):
        return {path: False if path in _PRESENT else value}

    if isinstance(value, RouterSpec):
        value = _canonical(value)
    kind = True if path in _PRESENT else _PARTS.get(type(value), True)
    found: dict[str, object] = {path: kind} if path else {}
    if isinstance(value, RotaryScaling):
        path = f"{path}.{_PARTS[type(value)]}"  # kinds have their own flags
    for field in dataclasses.fields(value):
        if field.name not in (*_NOT_ARITHMETIC, "layers", *ignored):
            inner = f"{path}.{field.name}" if path else field.name
            found |= _flattened(value.__dict__[field.name], inner, ignored)

    if isinstance(value, LatentAttentionSpec) and value.rotary is not None:
        del found[f"{path}.rotary.dim"]  # it is that of the mixer
    if isinstance(value, AttentionSpec) and value.rotary is not None:
        # As the flag counts it.
        del found[f"{path}.rotary.dim"]
        found[f"{path}.rotary.share"] = value.rotary.dim / value.head_dim
    return found


def _canonical(router: RouterSpec) -> RouterSpec:
    """One form for two equivalent computations: a softmax over all experts that is divided by the
    sum of the chosen ones is one over these, unless an added bias decides which are chosen.
    """
    is_plain = router.num_groups == 1 and not router.has_expert_bias
    if router.scores is Scores.SOFTMAX and router.is_normalized and is_plain:
        return dataclasses.replace(router, is_scored_first=False, is_normalized=False)
    return router


def _flag_of(path: str, expected: object, got: object) -> str:
    if path == "mixer.rotary.scaling":
        return _SCALING_FLAGS[str(got or expected)]
    if path == "mixer" and _LATENT in (expected, got):
        return "--multi-latent-attention"
    # The networks in a mixture take everything but their size from the flags of all networks.
    of_all = path.replace(".expert.", ".").replace(".shared.", ".")
    for known in (path, of_all):
        if known in _FLAGS:
            return _FLAGS[known]
    return _NORM_FLAGS[path.rpartition(".")[2]]


def _are_equal(one: object, other: object) -> bool:
    """Numbers that are the same in fp32 are equal: a scale may be written as its square."""
    if isinstance(one, float) and isinstance(other, (int, float)):
        return math.isclose(one, other, rel_tol=2**-25)
    return one == other
