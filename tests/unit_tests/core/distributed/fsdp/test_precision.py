from __future__ import annotations

import pytest
import torch

from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy


def test_open_dtypes_match_the_compute_weights():
    bf16, fp32 = torch.bfloat16, torch.float32
    policy = MixedPrecisionPolicy().resolve(bf16)
    assert policy == MixedPrecisionPolicy(fp32, bf16, bf16, bf16, bf16)
    policy = MixedPrecisionPolicy(main_params_dtype=None, main_grads_dtype=fp32).resolve(bf16)
    assert policy == MixedPrecisionPolicy(bf16, fp32, fp32, bf16, bf16)
    policy = MixedPrecisionPolicy(compute_dtype=bf16).resolve(fp32)
    assert policy == MixedPrecisionPolicy(fp32, bf16, bf16, bf16, bf16)
    policy = MixedPrecisionPolicy(compute_dtype=bf16, frozen_params_dtype=fp32).resolve(fp32)
    assert policy == MixedPrecisionPolicy(fp32, bf16, bf16, bf16, fp32)


def test_an_accelerator_adds_in_fp32_unless_another_dtype_is_given():
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    for given, expected in (
        (MixedPrecisionPolicy(), MixedPrecisionPolicy(fp32, bf16, fp32, bf16, bf16)),
        (MixedPrecisionPolicy(None, fp64), MixedPrecisionPolicy(bf16, fp64, fp64, bf16, bf16)),
        (MixedPrecisionPolicy(None, fp32, bf16), MixedPrecisionPolicy(bf16, fp32, *[bf16] * 3)),
    ):
        assert given.resolve(bf16, adds_on_device=True) == expected


def test_no_dtype_of_an_fp32_module_has_16_bits_and_wider_ones_stay():
    bf16, fp32, fp64 = torch.bfloat16, torch.float32, torch.float64
    policy = MixedPrecisionPolicy(bf16, torch.float16, bf16, bf16, bf16)
    assert policy.at_least_fp32() == MixedPrecisionPolicy(fp32, fp32, fp32, fp32, fp32)
    policy = MixedPrecisionPolicy(fp64, fp32, bf16, fp64, fp32)
    assert policy.at_least_fp32() == MixedPrecisionPolicy(fp64, fp32, fp32, fp64, fp32)


def test_dtypes_that_are_no_floats_are_rejected():
    with pytest.raises(
        ValueError, match=r"Expected main_grads_dtype to be None or one of .*, got torch.int32"
    ):
        MixedPrecisionPolicy(main_grads_dtype=torch.int32)
    with pytest.raises(
        TypeError, match=r"Expected parameters of one of the dtypes .*, got torch.int64"
    ):
        MixedPrecisionPolicy().resolve(torch.int64)
