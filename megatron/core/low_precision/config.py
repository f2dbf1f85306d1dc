"""The options of computing in low precision, under Megatron-LM's names."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import check_options, expect, option


@dataclass(frozen=True)
class LowPrecisionConfig:
    """In which precision the linear layers of a decoder multiply. Without a format: in that of the
    run.
    """

    fp8_format: str | None = option(
        None,
        "multiply in fp8: e4m3 for all operands, or hybrid, with e5m2 for gradients; needs --bf16",
        choices=("e4m3", "hybrid"),
    )
    fp8_recipe: str = option(
        "delayed",
        "how operands are scaled: by maxima of earlier steps (delayed), of the tensor, of each "
        "row, of blocks of 128 or of 32 elements (docs/low-precision.md)",
        choices=("delayed", "tensorwise", "rowwise", "blockwise", "mxfp8"),
        requires="fp8_format",
    )
    fp8_margin: int = option(
        0, "divide scales by 2^this", requires="fp8_format", at_least=0, at_most=16
    )
    fp8_amax_history_len: int = option(
        1,
        "steps whose maxima delayed scaling keeps",
        requires="fp8_format",
        at_least=1,
        ceiling=2**16,
    )
    fp8_amax_compute_algo: str = option(
        "most_recent",
        "which of these maxima a scale is computed from",
        requires="fp8_format",
        choices=("most_recent", "max"),
    )
    fp4_format: str | None = option(
        None,
        "multiply in fp4, by the recipe nvfp4 (docs/low-precision.md); needs --bf16",
        choices=("e2m1",),
    )
    first_last_layers_bf16: bool = option(
        False, "leave the first and the last layers of the decoder in bf16"
    )
    num_layers_at_start_in_bf16: int = option(
        1, "how many of the first layers", no_effect_unless="first_last_layers_bf16", at_least=0
    )
    num_layers_at_end_in_bf16: int = option(
        1, "how many of the last layers", no_effect_unless="first_last_layers_bf16", at_least=0
    )

    def __post_init__(self) -> None:
        check_options(self)
        both = self.fp8_format is not None and self.fp4_format is not None
        expect(not both, "--fp4-format", "one format, without --fp8-format", self.fp4_format)
        expect(
            self.recipe is not None or not self.first_last_layers_bf16,
            "--first-last-layers-bf16",
            "--fp8-format or --fp4-format",
            None,
        )
        history = (self.fp8_amax_history_len, self.fp8_amax_compute_algo, self.fp8_margin)
        expect(
            self.recipe in (None, "delayed") or history == (1, "most_recent", 0),
            "--fp8-recipe",
            "delayed with --fp8-margin, --fp8-amax-history-len and --fp8-amax-compute-algo",
            self.fp8_recipe,
        )

    @property
    def recipe(self) -> str | None:
        """The recipe's name; None: no format is given."""
        if self.fp4_format is not None:
            return "nvfp4"
        return None if self.fp8_format is None else self.fp8_recipe

    @property
    def flag(self) -> str:
        """The flag that asks for low precision."""
        return "--fp8-format" if self.fp4_format is None else "--fp4-format"

    @property
    def num_bf16_layers(self) -> tuple[int, int]:
        """Layers at the start and at the end that stay in bf16."""
        if not self.first_last_layers_bf16:
            return 0, 0
        return self.num_layers_at_start_in_bf16, self.num_layers_at_end_in_bf16
