"""Recomputation of attention that does not run its kernels again.

Attention spends most of its time in the kernels, and their inputs may take far more memory than the
tensors that they are made of: with context parallelism, keys and values of whole sequences, which a
rank can gather again. `keep_kernel_results` keeps the kernels' results instead of their inputs.

PyTorch's selective checkpointing does the same, but hides the results from the hooks of saved
tensors, so `--activation-offload` could not move them. Here an autograd function saves them. It
runs last in forward, and therefore first in backward, where it passes them to the recomputation:

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
    """Returns `core(*args)`. Its backward recomputes it from the arguments and from the results of
    attention kernels, which are saved.
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


class _KernelMode(TorchDispatchMode):
    def __init__(self, results: deque[Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.results = results


class _Recording(_KernelMode):
    """Appends the result of each kernel to `results`."""

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        returned = op(*args, **(kwargs or {}))
        if _is_kernel(op):
            # Autograd makes the returned tensors part of the graph.
            self.results.append(tree_map_only(Tensor, Tensor.detach, returned))
        return returned


class _Replaying(_KernelMode):
    """Returns `results`, in their order, instead of running kernels."""

    def __torch_dispatch__(
        self, op: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return self.results.popleft() if _is_kernel(op) else op(*args, **(kwargs or {}))


def _is_kernel(op: Any) -> bool:
    return any(name in op.name() for name in _KERNELS)


class _Keep(Function):
    """The identity. Saves `results` in forward, and restores them in backward."""

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
