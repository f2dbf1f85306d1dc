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
        "how positions enter attention: rotary, rotary scaled by YaRN, or not at all",
        choices=("rope", "yarn", "none"),
    )
    rotary_base: float = option(10000.0, "base of the rotary wavelengths", more_than=1.0)
    rotary_percent: float = option(
        1.0, "share of each head's channels that is rotated", more_than=0.0, at_most=1.0
    )
    window_rotary_base: float | None = option(
        None,
        "base of the rotary wavelengths in layers with a window, which are not scaled then "
        "(default: as in the others)",
        more_than=1.0,
        requires="window_size",
    )
    no_rope_freq: str | None = option(
        None,
        "N: every N-th layer leaves queries and keys unrotated; or a list with 1 for each layer "
        "that does",
        noun=PATTERN_NOUN,
        is_pattern=True,
    )
    rotary_seq_len_interpolation_factor: float | None = option(
        None, "divide positions by this (linear scaling)", at_least=1.0
    )
    use_rope_scaling: bool = option(False, "stretch long rotary wavelengths as Llama 3.1 does")
    rope_scaling_factor: float = option(
        8.0,
        "by how much --use-rope-scaling stretches them",
        at_least=1.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_low_freq_factor: float = option(
        1.0,
        "wavelengths are long above the original length divided by this",
        more_than=0.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_high_freq_factor: float = option(
        4.0,
        "wavelengths are short below the original length divided by this",
        more_than=0.0,
        no_effect_unless="use_rope_scaling",
    )
    rope_scaling_original_max_position_embeddings: int = option(
        8192,
        "positions that the model was trained with before it was extended",
        at_least=1,
        no_effect_unless="use_rope_scaling",
    )
    yarn_rotary_scaling_factor: float | None = option(
        None,
        "stretch rotary wavelengths by this",
        at_least=1.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_original_max_position_embeddings: int | None = option(
        None,
        "positions that the model was trained with before it was extended",
        at_least=1,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_beta_fast: float = option(
        32.0,
        "wavelengths that turn more often than this over the original length are kept",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_beta_slow: float = option(
        1.0,
        "wavelengths that turn less often than this over the original length are stretched in full",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_attention_factor: float | None = option(
        None,
        "multiply cosines and sines by this (default: 1 + log(factor) / 10)",
        more_than=0.0,
        no_effect_unless={"position_embedding_type": "yarn"},
    )
    yarn_correction_range_round_to_int: bool = option(
        True,
        "begin and end the blending of wavelengths at whole channels",
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
