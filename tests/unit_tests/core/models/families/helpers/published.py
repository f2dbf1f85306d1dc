"""The config.json of published models: their public fields, in the forms of the versions that wrote
them, without the quantization of the weights.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)

LLAMA_3_2_1B = PUBLISHED["Llama 3.2 1B"]
LLAMA_1_7B = PUBLISHED["Llama 1 7B"]
QWEN2_5_7B = PUBLISHED["Qwen2.5 7B"]
QWEN2_5_7B_YARN = PUBLISHED["Qwen2.5 7B YaRN"]
QWEN3_8B = PUBLISHED["Qwen3 8B"]
QWEN3_5_27B_TEXT = PUBLISHED["Qwen3.5 27B text"]
QWEN3_30B_A3B = PUBLISHED["Qwen3 30B-A3B"]
QWEN3_NEXT_80B_A3B = PUBLISHED["Qwen3-Next 80B-A3B"]
QWEN3_5_35B_A3B_TEXT = PUBLISHED["Qwen3.5 35B-A3B text"]
OLMOE_1B_7B = PUBLISHED["OLMoE 1B-7B"]
GEMMA_3_1B = PUBLISHED["Gemma 3 1B"]
SMOLLM3_3B = PUBLISHED["SmolLM3 3B"]
STARCODER2_3B = PUBLISHED["StarCoder2 3B"]
STABLELM_2_1_6B = PUBLISHED["StableLM 2 1.6B"]
DEEPSEEK_V3 = PUBLISHED["DeepSeek-V3"]
MOONLIGHT_16B_A3B = PUBLISHED["Moonlight-16B-A3B"]
GLM_4_5_AIR = PUBLISHED["GLM-4.5-Air"]
GPT_OSS_20B = PUBLISHED["gpt-oss-20b"]
