"""Attention that is computed again in backward, but for what its kernels return.

Kernels of attention take most of its time, and their inputs may take far more memory than what
they are made of: the keys and values of whole sequences, repeated or padded, which a rank gathers
or makes again. `keep_kernel_results` keeps the results instead.

PyTorch's selective checkpointing does the same, but autograd's hooks do not see the tensors that it
keeps, so `--activation-offload` could not move them. Here an autograd function saves them. It is
the last one of the forward, and so the first one of the backward, which hands them to the
recomputation:

    forward    arguments -> keys of all ranks -> kernel -> results -> _Keep
    backward   _Keep: results -> arguments -> keys of all ranks -> backward of the kernel
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only, tree_unflatten
from torch.utils.checkpoint import checkpoint

# In the names of the operators: PyTorch's fused attention of any device, and of varying lengths.
_KERNELS = ("_scaled_dot_product", "varlen_attn")


def keep_kernel_results(core: Callable[..., Tensor], *args: Any) -> Tensor:
    """Returns `core(*args)`, which keeps for backward its arguments and the results of attention
    kernels, and computes everything else again.
    """
    results: deque[Any] = deque()
    output = checkpoint(
        core,
        *args,
        use_reentrant=False,
        context_fn=lambda: (_Recording(results), _Replaying(results)),
    )
    apply: Any = _Keep.apply  # torch declares it without types
    kept: Tensor = apply(output, results)
    return kept


class _Recording(TorchDispatchMode):
    """Appends what each kernel returns to `results`."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        returned = op(*args, **(kwargs or {}))
        if _is_kernel(op):
            # Autograd makes the returned tensors part of the graph.
            self._results.append(tree_map_only(Tensor, Tensor.detach, returned))
        return returned


class _Replaying(TorchDispatchMode):
    """Takes `results` instead of running kernels, in the same order."""

    def __init__(self, results: deque[Any]) -> None:
        super().__init__()
        self._results = results

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return self._results.popleft() if _is_kernel(op) else op(*args, **(kwargs or {}))


def _is_kernel(op: Any) -> bool:
    return any(name in op.name() for name in _KERNELS)


class _Keep(Function):
    """The identity, which saves `results` in forward, and gives them back in backward."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, results: deque[Any]) -> Tensor:
        leaves, ctx.structure = tree_flatten([*results])
        results.clear()
        ctx.save_for_backward(*(leaf if isinstance(leaf, Tensor) else None for leaf in leaves))
        ctx.others = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        ctx.results = results
        return output.view_as(output)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        leaves = [
            other if tensor is None else tensor
            for tensor, other in zip(ctx.saved_tensors, ctx.others, strict=True)
        ]
        ctx.results.extend(tree_unflatten(leaves, ctx.structure))
        return gradient, None
