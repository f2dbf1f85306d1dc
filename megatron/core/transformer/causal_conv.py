"""A causal convolution of each channel by itself, and SiLU.

On a CPU it is computed a few positions at a time, as a sum of shifted products in fp32 that stays
in a core's cache. Only the input is kept for backward, and 16 bits are rounded once.
PyTorch's grouped convolution, which takes channels before positions, is slower there
(benchmarks/gated_delta_net.py); other devices use it.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megatron.core.transformer.documents import Documents

# Elements of the input that are computed at a time. The quickest of 2^15 to 2^20.
BLOCK_NUMEL = 1 << 17


class CausalConv1d(nn.Module):
    """The weight of `causal_conv`.

    Attributes:
        weight: [channels, 1, kernel], as nn.Conv1d has it with as many groups as channels.
    """

    def __init__(self, channels: int, kernel: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, kernel))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform within 1 / sqrt(kernel) of zero, as nn.Conv1d starts."""
        bound = 1.0 / math.sqrt(self.weight.shape[2])
        nn.init.uniform_(self.weight, -bound, bound)


def causal_conv(weight: Tensor, x: Tensor, documents: Documents | None = None) -> Tensor:
    """silu(sum over j of weight[:, 0, j] * x[position - kernel + 1 + j]), zeros before the start
    of each document.

    Args:
        weight: [channels, 1, kernel].
        x: [batch, seq, channels]. A batch of several documents is one row.

    Returns:
        [batch, seq, channels], same dtype.
    """
    if documents is not None and len(documents.lengths) > 1:
        # The zeros before the first document are the kernel's own.
        places, count = documents.spread(weight.shape[2] - 1, x.device)
        spread = x.new_zeros(1, count, x.shape[2]).index_copy(1, places, x)
        return causal_conv(weight, spread).index_select(1, places)

    if x.device.type == "cpu":
        return causal_conv_in_blocks(x, weight)
    return causal_conv_by_torch(x, weight)


def causal_conv_by_torch(x: Tensor, weight: Tensor) -> Tensor:
    """What `causal_conv` computes, by PyTorch's convolution."""
    if x.shape[1] == 0:  # the convolution wants at least one position
        return x

    channels, _, kernel = weight.shape
    channels_first = F.pad(x.mT, (kernel - 1, 0))
    return F.silu(F.conv1d(channels_first, weight, groups=channels)).mT


def causal_conv_in_blocks(x: Tensor, weight: Tensor) -> Tensor:
    """What `causal_conv` computes, a block of positions at a time."""
    apply: Any = _BlockwiseConv.apply  # torch declares it without types
    output: Tensor = apply(x, weight)
    return output


class _BlockwiseConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        taps = _taps(weight)
        output = torch.empty_like(x, memory_format=torch.contiguous_format)
        for start, stop in _blocks(x):
            sums = _sums(_window(x, start, stop, taps), taps)
            output[:, start:stop] = F.silu(sums, inplace=True)

        ctx.save_for_backward(x, weight)
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        taps = _taps(weight)
        kernel = len(taps)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format)
        grad_taps = torch.zeros_like(taps)

        # A block's window starts kernel - 1 positions before the block. Their gradients are carried
        # to the block that they belong to, which is the next one in this order.
        carried = taps.new_zeros(x.shape[0], kernel - 1, x.shape[2])
        for start, stop in reversed(_blocks(x)):
            length = stop - start
            window = _window(x, start, stop, taps)
            sums = _sums(window, taps)
            grad_sums = torch.ops.aten.silu_backward(grad_output[:, start:stop].to(sums), sums)

            grad_window = torch.zeros_like(window)
            grad_window[:, length:] = carried
            for j in range(kernel):
                grad_window[:, j : j + length].addcmul_(grad_sums, taps[j])
                products = torch.mul(grad_sums, window[:, j : j + length], out=sums)
                grad_taps[j] += products.sum((0, 1))
            grad_x[:, start:stop] = grad_window[:, kernel - 1 :]
            carried = grad_window[:, : kernel - 1].clone()
        return grad_x, grad_taps.t().unsqueeze(1).to(weight.dtype)


def _taps(weight: Tensor) -> Tensor:
    """[channels, 1, kernel] -> [kernel, channels], of the dtype computed in: fp32 for 16 bits."""
    dtype = torch.promote_types(weight.dtype, torch.float32)
    return weight.squeeze(1).t().to(dtype).contiguous()


def _blocks(x: Tensor) -> list[tuple[int, int]]:
    """(start, stop) of the positions that are computed together."""
    batch, seq, channels = x.shape
    length = max(1, BLOCK_NUMEL // max(1, batch * channels))
    return [(start, min(start + length, seq)) for start in range(0, seq, length)]


def _window(x: Tensor, start: int, stop: int, taps: Tensor) -> Tensor:
    """The inputs of the positions from `start` to `stop`: [batch, kernel - 1 + stop - start,
    channels] in the dtype of the taps.
    """
    reach = len(taps) - 1
    window = x[:, max(0, start - reach) : stop].to(taps.dtype)
    return F.pad(window, (0, 0, max(0, reach - start), 0))


def _sums(window: Tensor, taps: Tensor) -> Tensor:
    """The convolution before SiLU: [batch, length, channels]."""
    length = window.shape[1] - len(taps) + 1
    sums = window[:, :length] * taps[0]
    for j in range(1, len(taps)):
        sums.addcmul_(window[:, j : j + length], taps[j])
    return sums
