"""Rejects quantized weights. No model here computes with fewer than 16 bits, and values without
their scales would be wrong.
"""

from __future__ import annotations

from collections.abc import Collection

from megatron.core.log import printable
from megatron.core.models.families.config_file import ConfigFile
from megatron.core.options import ConfigError, shown

# Suffixes of the names of tensors with scales, and the quantization methods that write them.
_SCALES = {"_scales": "mxfp4", "_scale_inv": "fp8"}
# The class with which the transformers library loads such weights in bf16.
_DEQUANTIZING = {"mxfp4": "Mxfp4Config", "fp8": "FineGrainedFP8Config"}


def refuse_quantized_config(file: ConfigFile) -> None:
    """Raises ConfigError with a remedy for a config.json of quantized weights."""
    section = file.section("quantization_config")
    if section:
        method = section.get("quant_method")
        raise ConfigError(
            f"Expected weights of 16 or 32 bits, got quant_method {shown(method)} in the "
            f"quantization_config of {file.source}. {_remedy(method)}"
        )


def refuse_quantized_tensors(names: Collection[str], folder: str) -> None:
    """Raises ConfigError for tensors with scales, which config.json may not mention."""
    for name in sorted(names):
        for end, method in _SCALES.items():
            if name.endswith(end):
                raise ConfigError(
                    f"Expected weights of 16 or 32 bits in {folder}, got {printable(name)}, as of "
                    f"{method}. {_remedy(method)}"
                )


def _remedy(method: object) -> str:
    kind = _DEQUANTIZING.get(str(method))
    if kind is None:
        return "Dequantize them with the transformers library first."
    return (
        "Dequantize them with the transformers library first: AutoModelForCausalLM.from_pretrained("
        f"DIR, quantization_config={kind}(dequantize=True)).save_pretrained(NEW_DIR)."
    )
