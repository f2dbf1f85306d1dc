"""DeepSpeed ZeRO-3 with its optimizer offloaded to the CPU, in a separate environment
(`make peers`). Does not import this project's package.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import deepspeed
from deepspeed.ops.adam import DeepSpeedCPUAdam
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from torch import Tensor

from benchmarks.peers.gpt import build_gpt, decay_groups
from benchmarks.peers.trainer import MOMENTS, Training


class DeepSpeedTrainer:
    """Implements `Trainer`."""

    def __init__(self, training: Training, *, loads_universal: bool = False) -> None:
        """
        Args:
            loads_universal: Loads what `deepspeed.checkpoint.ds_to_universal` has converted.
        """
        config = _config(training)
        if loads_universal:
            config["checkpoint"] = {"load_universal": True}
        model = build_gpt(training.shape, training.seed)
        optimizer = DeepSpeedCPUAdam(
            decay_groups(model, training.weight_decay),
            lr=training.lr,
            betas=training.betas,
            eps=training.eps,
            adamw_mode=True,
        )
        self._engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
        self.settings = {
            "engine": {"deepspeed": deepspeed.__version__, **config},
            "optimizer": "DeepSpeedCPUAdam, adamw_mode",
            "checkpoint": "save_checkpoint",
        }

    def step(self, tokens: Tensor, labels: Tensor) -> Tensor:
        loss: Tensor = self._engine(tokens, labels)
        self._engine.backward(loss)
        self._engine.step()
        return loss.detach()

    def finish_steps(self) -> None:
        """No work is pending: its step ends with the optimizer's."""

    def begin_save(self, root: Path, step: int) -> None:
        self._engine.save_checkpoint(str(root), tag=f"step_{step}")

    def finish_save(self) -> None:
        """`save_checkpoint` returns when the files have been written."""

    def load(self, root: Path, step: int) -> None:
        path, _ = self._engine.load_checkpoint(str(root), tag=f"step_{step}")
        if path is None:
            raise RuntimeError(f"Expected a checkpoint of DeepSpeed in {root}, got none.")

    def whole_state(self, *, with_moments: bool) -> dict[str, Tensor]:
        whole = {}
        for name, parameter in self._engine.module.named_parameters():
            whole[name] = safe_get_full_fp32_param(parameter).clone()
            for kind in MOMENTS if with_moments else ():
                state = safe_get_full_optimizer_state(parameter, kind)
                whole[f"{name}.{kind}"] = state.float().clone()
        return whole

    def close(self) -> None:
        self._engine.destroy()


def build(training: Training) -> DeepSpeedTrainer:
    """This rank's trainer."""
    deepspeed.init_distributed("gloo")
    return DeepSpeedTrainer(training)


def _config(training: Training) -> dict[str, Any]:
    """DeepSpeed's defaults for ZeRO-3 but for sizes, which are made for large models."""
    shape = training.shape
    layer = 4 * shape.hidden**2 + 3 * shape.hidden * shape.ffn
    return {
        "train_micro_batch_size_per_gpu": shape.micro_batch,
        "gradient_clipping": training.clip_grad,
        "bf16": {"enabled": True},
        "zero_optimization": {
            "stage": 3,
            "offload_optimizer": {"device": "cpu"},
            "overlap_comm": True,
            "contiguous_gradients": True,
            "reduce_bucket_size": layer,
            "stage3_prefetch_bucket_size": layer,
            "stage3_param_persistence_threshold": 10 * shape.hidden,
        },
    }
