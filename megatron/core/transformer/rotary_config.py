"""RotaryOptions: what decides how positions enter attention, as a part of a model's options."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import ConfigError, expect, option
from megatron.core.transformer.layer_pattern import PATTERN_NOUN


@dataclass(frozen=True, kw_only=True)
class RotaryOptions:
    """The options of positions, under Megatron's names and, where it has them, with its defaults. A
    base of `TransformerConfig`, which checks them.
    """

    position_embedding_type: str = option(
        "rope",
        "rope: rotary embedding; yarn: rotary embedding, scaled by YaRN for longer sequences; "
        "none: no position embedding",
        choices=("rope", "yarn", "none"),
    )
    rotary_base: float = option(10000.0, "base of the rotary frequencies (theta)", more_than=1.0)
    rotary_percent: float = option(
        1.0, "share of each head's channels that is rotated, up to 1", more_than=0.0, at_most=1.0
    )
    window_rotary_base: float | None = option(
        None,
        "base of the rotary frequencies in layers with a sliding window, which are not scaled "
        "then (default: as in the other layers)",
        more_than=1.0,
        requires="window_size",
    )
    rotary_interleaved: bool | None = option(
        None,
        "rotate pairs of adjacent channels, instead of pairing the first half of a head with "
        "the second half (default: on with --multi-latent-attention, otherwise off)",
    )
    no_rope_freq: str | None = option(
        None,
        "layers without rotary embedding: N is every N-th layer; a list such as ([0]*3+[1])*6 "
        "has 1 for each of them (default: none)",
        noun=PATTERN_NOUN,
        is_pattern=True,
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None,
        "linear interpolation of positions: divide them by this factor (default: no interpolation)",
        at_least=1.0,
    )
    use_rope_scaling: bool = option(
        False, "scale low rotary frequencies for longer sequences, as Llama 3.1 does"
    )
    rope_scaling_factor: float = option(
        8.0,
        "factor by which low rotary frequencies are divided",
        at_least=1.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_low_freq_factor: float = option(
        1.0,
        "scale frequencies in full if their wavelength is longer than the original sequence "
        "length divided by this",
        more_than=0.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_high_freq_factor: float = option(
        4.0,
        "keep frequencies if their wavelength is shorter than the original sequence length "
        "divided by this",
        more_than=0.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192,
        "sequence length before the extension, in tokens",
        at_least=1,
        no_effect_unless="use_rope_scaling",
    )
    yarn_rotary_scaling_factor: float | None = option(
        None,
        "factor by which YaRN extends the sequence length; must be given with yarn",
        at_least=1.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_original_max_position_embeddings: int | None = option(
        None,
        "sequence length before the extension, in tokens; must be given with yarn",
        at_least=1,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_beta_fast: float = option(
        32.0,
        "keep frequencies with more rotations than this over the original sequence length",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_beta_slow: float = option(
        1.0,
        "scale frequencies in full with fewer rotations than this over the original sequence "
        "length",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_attention_factor: float | None = option(
        None,
        "factor of the rotary cosines and sines (default: 1 + log(scaling factor) / 10)",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "round the channels between which scaling sets in to whole numbers",
        no_effect_unless={"position_embedding_type": "yarn"},
    )

    def _check_rotation(self, head_dim: int, rotary_dim: int) -> None:
        """ConfigError for options of the rotation that contradict each other."""
        if self.position_embedding_type != "none":
            expect(
                rotary_dim >= 2 and rotary_dim % 2 == 0,
                "--rotary-percent",
                f"an even, positive share of the {head_dim} channels of a head (--kv-channels)",
                rotary_dim,
            )
        if self.position_embedding_type == "yarn":
            for flag, value in (
                ("--yarn-rotary-scaling-factor", self.yarn_rotary_scaling_factor),
                (
                    "--yarn-original-max-position-embeddings",
                    self.yarn_original_max_position_embeddings,
                ),
            ):
                expect(value is not None, flag, "a value with --position-embedding-type yarn", None)

            slow, fast = self.yarn_beta_slow, self.yarn_beta_fast
            expect(slow < fast, "--yarn-beta-fast", f"more than --yarn-beta-slow {slow}", fast)

        low, high = self.rope_scaling_low_freq_factor, self.rope_scaling_high_freq_factor
        expect(
            not self.use_rope_scaling or low < high,
            "--rope-scaling-high-freq-factor",
            f"more than --rope-scaling-low-freq-factor {low}",
            high,
        )
        self._check_one_scaling()

    def _check_one_scaling(self) -> None:
        """Wavelengths are scaled in one way, and only where something is rotated."""
        scalings = {
            "--use-rope-scaling": self.use_rope_scaling,
            "--rotary-seq-len-interpolation-factor": bool(self.rotary_seq_len_interpolation_factor),
        }
        others = {
            "--no-rope-freq": self.no_rope_freq is not None,
            "--window-rotary-base": self.window_rotary_base is not None,
        }
        given = [flag for flag, is_given in scalings.items() if is_given]
        if given and self.position_embedding_type == "yarn":
            given.insert(0, "--position-embedding-type yarn")
        if len(given) > 1:
            raise ConfigError(f"{given[1]}: expected one scaling of rotary, got {given[0]}, too.")

        given += [flag for flag, is_given in others.items() if is_given]
        if given and self.position_embedding_type == "none":
            raise ConfigError(
                f"{given[0]}: expected rotary positions, got --position-embedding-type none."
            )
