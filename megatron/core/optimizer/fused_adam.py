"""`FusedAdam`: `RuleOptimizer` over the `Adam` rule, with the constructor of TransformerEngine."""

from __future__ import annotations

from typing import Any

import torch

from megatron.core.optimizer.rule_optimizer import RuleOptimizer
from megatron.core.optimizer.rules import Adam


class FusedAdam(RuleOptimizer):
    """Adam and AdamW over plain tensors and DTensors.

    Bit-equal to torch's fused AdamW, except at the end of tensors whose length is not a multiple of
    the vector width: see [Note: arithmetic] in kernels/adam.py.
    `torch.uint8` as a dtype of moments means fp8 e4m3, as in TransformerEngine.

    Args:
        params: fp32, bf16 or fp16 parameters, or groups of them.
        lr, betas, eps, weight_decay, bias_correction: as in torch's AdamW; may differ between
            groups.
        amsgrad, maximize, capturable, differentiable: must be False, torch's default.
        foreach, fused: accepted and ignored: there is one implementation.
        adam_w_mode: decoupled weight decay; otherwise it is added to the gradient (L2).
        exp_avg_dtype, exp_avg_sq_dtype: fp32, bf16, fp16 or fp8 e4m3.
        master_weights, master_weight_dtype, store_param_remainders, use_decoupled_grad,
            set_grad_none, num_host_threads: see `RuleOptimizer`.

    Raises:
        NotImplementedError: for options that must be False, and for another dtype of states.
        ValueError: for other constants or dtypes of parameters; for remainders without fp32 master
            weights.
    """

    rule: Adam

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        *,
        bias_correction: bool = True,
        adam_w_mode: bool = True,
        maximize: bool = False,
        capturable: bool = False,
        differentiable: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        master_weights: bool = False,
        master_weight_dtype: torch.dtype = torch.float32,
        exp_avg_dtype: torch.dtype = torch.float32,
        exp_avg_sq_dtype: torch.dtype = torch.float32,
        use_decoupled_grad: bool = False,
        store_param_remainders: bool = False,
        set_grad_none: bool | None = None,
        num_host_threads: int | None = None,
    ) -> None:
        del foreach, fused
        unsupported = {
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        for name, value in unsupported.items():
            if value:
                raise NotImplementedError(f"Expected {name}=False, got {value}.")

        super().__init__(
            params,
            Adam(exp_avg_dtype, exp_avg_sq_dtype, adam_w_mode),
            master_weights=master_weights,
            master_weight_dtype=master_weight_dtype,
            store_param_remainders=store_param_remainders,
            use_decoupled_grad=use_decoupled_grad,
            set_grad_none=set_grad_none,
            num_host_threads=num_host_threads,
            lr=lr,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            # A group option only if it differs: AdamW's groups do not have it.
            **({} if bias_correction else {"bias_correction": False}),
        )

    @property
    def adam_w_mode(self) -> bool:
        """Whether weight decay is decoupled."""
        return self.rule.adam_w_mode
