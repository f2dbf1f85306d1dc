"""Settings of how layers run, as far as no other file trains with them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from megatron.core.config import ExecutionConfig
from megatron.core.device import Device
from megatron.core.layer_execution import check_execution, prepare_layers
from megatron.core.options import ConfigError
from tests.unit_tests.training.helpers.fake_runs import config_of

WITH_TF32 = ExecutionConfig(tf32=True)


@pytest.fixture(autouse=True)
def _precision() -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)


def test_tf32_is_for_a_gpu() -> None:
    check_execution(WITH_TF32, Device("cuda"))
    with pytest.raises(ConfigError, match=r"--tf32: .* got 'cpu'"):
        check_execution(WITH_TF32, Device("cpu"))


@pytest.mark.parametrize("chosen", ["highest", "medium"])
def test_only_the_flag_changes_the_precision_of_products(chosen: str) -> None:
    torch.set_float32_matmul_precision(chosen)
    prepare_layers(nn.Linear(1, 1), ExecutionConfig(), Device("cpu"))
    assert torch.get_float32_matmul_precision() == chosen
    prepare_layers(nn.Linear(1, 1), WITH_TF32, Device("cuda"))
    assert torch.get_float32_matmul_precision() == "high"


@pytest.mark.parametrize("dtype", ["--bf16", "--fp16"])
def test_tf32_is_for_runs_in_fp32(dtype: str) -> None:
    assert config_of("--tf32").execution.tf32
    with pytest.raises(ConfigError, match="--tf32"):
        config_of("--tf32", dtype)
