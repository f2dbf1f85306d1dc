"""Fully sharded data parallelism on flat buffers. What users need is here; the other files hold
the parts.
"""

from torch.distributed.tensor import Partial, Replicate

from megatron.core.distributed.fsdp.context import FsdpContext
from megatron.core.distributed.fsdp.dbuffer import DBuffer
from megatron.core.distributed.fsdp.fully_shard import (
    fully_shard,
    fully_shard_context,
    microbatch,
)
from megatron.core.distributed.fsdp.layout import GlobalLayout
from megatron.core.distributed.fsdp.module import FsdpModule
from megatron.core.distributed.fsdp.optimizer_hooks import fully_shard_optimizer
from megatron.core.distributed.fsdp.placement import Flat, Placements
from megatron.core.distributed.fsdp.precision import MixedPrecisionPolicy, OffloadPolicy

__all__ = [
    "DBuffer",
    "Flat",
    "FsdpContext",
    "FsdpModule",
    "GlobalLayout",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Partial",
    "Placements",
    "Replicate",
    "fully_shard",
    "fully_shard_context",
    "fully_shard_optimizer",
    "microbatch",
]
