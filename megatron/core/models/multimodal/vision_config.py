"""VisionConfig: the shapes and the arithmetic of a vision tower and of its projector."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megatron.core.options import check_options, expect, option
from megatron.core.transformer.spec import (
    Activation,
    AttentionSpec,
    DenseSpec,
    GatedDeltaNetSpec,
    LayerSpec,
    ModelSpec,
    NormKind,
    NormSpec,
)

_MOST_CHANNELS = 2**24


# How pictures become patches, which no config.json specifies: a directory has another file for it.
OF_PICTURES = ("image_min_pixels", "image_max_pixels", "image_mean", "image_std")


@dataclass(frozen=True)
class VisionConfig:
    """The options of a vision transformer over patches of images of any size.

    Raises:
        ConfigError: a value is of the wrong type or out of bounds, or values contradict each other.
    """

    vision_num_layers: int = option(help="layers of the vision tower", at_least=1, ceiling=2**12)
    vision_hidden_size: int = option(
        help="channels of the vision tower's hidden states", at_least=1, ceiling=_MOST_CHANNELS
    )
    vision_ffn_hidden_size: int = option(
        help="channels inside the vision tower's MLPs", at_least=1, ceiling=4 * _MOST_CHANNELS
    )
    vision_num_attention_heads: int = option(
        help="attention heads of the vision tower", at_least=1, ceiling=_MOST_CHANNELS
    )
    vision_patch_size: int = option(16, "side of a patch in pixels", at_least=1, ceiling=2**10)
    vision_temporal_patch_size: int = option(
        2,
        "frames in a patch; a picture counts as this many equal frames",
        at_least=1,
        ceiling=2**8,
    )
    vision_merge_size: int = option(
        2,
        "side of the square of patches that becomes one token, in patches",
        at_least=1,
        ceiling=2**8,
    )
    vision_num_position_embeddings: int = option(
        2304,
        "learned positions of patches, a square number; interpolated for pictures of other sizes",
        at_least=1,
        ceiling=2**24,
    )
    vision_in_channels: int = option(3, "color channels of a pixel", at_least=1, ceiling=2**10)
    vision_activation: str = option(
        Activation.GELU_TANH.value,
        "activation of the vision tower's MLPs",
        choices=tuple(one.value for one in Activation),
    )
    vision_rotary_base: float = option(
        10000.0, "base of the vision tower's rotary frequencies", more_than=1.0
    )
    vision_norm_epsilon: float = option(
        1e-6, "epsilon of the normalization in vision tower and projector", more_than=0.0
    )
    vision_deepstack_layers: tuple[int, ...] | None = option(
        None,
        "vision layers, counted from 0, whose output is also projected and added to the output "
        "of the first decoder layers, one each (default: none)",
        at_least=0,
    )
    vision_init_method_std: float = option(
        0.02, "standard deviation of the vision tower's initial weights", at_least=0.0
    )
    mrope_section: tuple[int, ...] | None = option(
        None,
        "how many of the decoder's rotary frequencies follow a token's time, row and column, "
        "three numbers (default: a third each)",
        at_least=0,
        ceiling=_MOST_CHANNELS,
    )
    image_token_id: int | None = option(
        None,
        "ID of the token that marks an image's patches (default: the tokenizer's <|image_pad|>)",
        at_least=0,
    )
    vision_start_token_id: int | None = option(
        None,
        "ID of the token before an image (default: the tokenizer's <|vision_start|>)",
        at_least=0,
    )
    vision_end_token_id: int | None = option(
        None, "ID of the token after an image (default: the tokenizer's <|vision_end|>)", at_least=0
    )
    video_token_id: int | None = option(
        None,
        "ID of the token that marks a video's patches; only exported, since models take no "
        "videos here (default: the tokenizer's <|video_pad|>)",
        at_least=0,
    )

    image_min_pixels: int | None = option(
        None, "pixels to which smaller pictures are enlarged (default: as in the data)", at_least=1
    )
    image_max_pixels: int | None = option(
        None, "pixels to which larger pictures are reduced (default: as in the data)", at_least=1
    )
    image_mean: tuple[float, ...] | None = option(
        None, "mean of each color channel, from 0 to 1 (default: as in the data)"
    )
    image_std: tuple[float, ...] | None = option(
        None,
        "standard deviation of each color channel, from 0 to 1 (default: as in the data)",
        more_than=0.0,
    )

    def __post_init__(self) -> None:
        check_options(self)
        heads, width = self.vision_num_attention_heads, self.vision_hidden_size
        expect(
            width % (4 * heads) == 0,
            "--vision-hidden-size",
            f"a multiple of {4 * heads}: --vision-num-attention-heads x 4, since a head has planes "
            "of two channels for rows and for columns",
            width,
        )
        expect(
            math.isqrt(self.vision_num_position_embeddings) ** 2
            == self.vision_num_position_embeddings,
            "--vision-num-position-embeddings",
            "a square number",
            self.vision_num_position_embeddings,
        )
        layers = self.vision_deepstack_layers or ()
        expect(
            list(layers) == sorted(set(layers)) and all(n < self.vision_num_layers for n in layers),
            "--vision-deepstack-layers",
            f"different ones of the layers 0 to {self.vision_num_layers - 1} in their order",
            list(layers),
        )
        sections = self.mrope_section
        expect(
            sections is None or len(sections) == 3,
            "--mrope-section",
            "three numbers",
            None if sections is None else list(sections),
        )

    @property
    def head_dim(self) -> int:
        return self.vision_hidden_size // self.vision_num_attention_heads

    @property
    def patch_shape(self) -> tuple[int, int, int, int]:
        """Of the pixels of one patch: [channels, frames, rows, columns]."""
        size = self.vision_patch_size
        return (self.vision_in_channels, self.vision_temporal_patch_size, size, size)

    @property
    def patches_per_token(self) -> int:
        """Patches that the projector makes one token of the decoder of."""
        return self.vision_merge_size**2

    @property
    def norm(self) -> NormSpec:
        """Every norm of the tower and of the projector."""
        return NormSpec(NormKind.LAYER_NORM, self.vision_norm_epsilon)

    @property
    def layer(self) -> LayerSpec:
        """Each layer of the tower."""
        attention = AttentionSpec(
            num_heads=self.vision_num_attention_heads,
            num_key_value_heads=self.vision_num_attention_heads,
            head_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            has_qkv_bias=True,
            has_output_bias=True,
            is_causal=False,
        )
        mlp = DenseSpec(
            size=self.vision_ffn_hidden_size,
            activation=Activation(self.vision_activation),
            is_gated=False,
            has_bias=True,
        )
        return LayerSpec(mixer=attention, feed_forward=mlp, norm=self.norm)


def sections_of(spec: ModelSpec, vision: VisionConfig) -> tuple[int, ...]:
    """How many planes of the decoder's rotation turn by time, row and column."""
    if vision.mrope_section is not None:
        return vision.mrope_section
    num_planes = next(
        layer.mixer.rotary.dim // 2
        for layer in spec.layers
        if not isinstance(layer.mixer, GatedDeltaNetSpec) and layer.mixer.rotary is not None
    )
    third = num_planes // 3
    return (num_planes - 2 * third, third, third)
