"""A layer's body, compiled by torch.compile: `--compile-layers`.

[Note: compiled layers] A body is compiled in two pieces, the part before the core of its mixer and
the part behind:

    compiled   norm, projection, rotation of the heads
    as it is   attention, or convolution and delta rule: they have their own kernels, and their work
               follows the lengths of documents, which change with every batch
    compiled   projection, residual, norm, MLP, residual

A mixture of experts stays as it is, too, as it reads how many tokens each expert has got; the
compiled part ends before it. Each piece is one graph without breaks: else torch raises.

FSDP's hooks, activation offload and recomputation are around the body, and see it as they see
another. Names of parameters stay. Random numbers are drawn as without compiling, so dropout drops
the same.

Layers with equal specs share compiled code; shapes and grad mode make their own graphs.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.drivers import driver_of, kinds_of_accelerators, why_triton_fails
from megatron.core.options import ConfigError, shown
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer import LayerOutput, TransformerLayer
from megatron.core.transformer.moe_layer import MoELayer
from megatron.core.transformer.rotary import RotaryAngles

# Of one piece of code: layers of several kinds, in training and evaluation.
_MOST_GRAPHS = 64

Pieces = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]


def compile_layers(model: nn.Module) -> int:
    """From now on the bodies of a model's transformer layers run compiled. Returns how many.

    Compiling happens in the first forward and the first backward, and takes seconds for each kind
    of layer.

    Raises:
        ConfigError: if the machine has no compiler for code of the CPU, or if something inside a
            layer has its own hooks. A mixer's would not be called, and others are not
            part of a graph.
    """
    layers = [module for module in model.modules() if isinstance(module, TransformerLayer)]
    check_compiler({parameter.device.type for parameter in model.parameters()})
    for layer in layers:
        _check_hooks(layer)

    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _MOST_GRAPHS)
    body = _TwoPieces()
    for layer in layers:
        layer.compiled = body
    return len(layers)


def check_compiler(kinds: Iterable[str]) -> None:
    """ConfigError if there is no compiler for one of these kinds of devices, or none that works."""
    kinds = [*kinds]
    uses_triton = any(
        kind in kinds_of_accelerators() and driver_of(kind).has_triton for kind in kinds
    )
    if uses_triton and (missing := why_triton_fails()):
        raise ConfigError(
            f"--compile-layers: expected what Triton needs for a GPU's kernels, got {missing}."
        )
    if "cpu" not in kinds:
        return
    asked = os.environ.get("CXX")
    # What Inductor looks for.
    name = asked or ("clang++" if sys.platform == "darwin" else "g++")
    if not shutil.which(name):
        raise ConfigError(
            "--compile-layers: expected a C++ compiler, which torch.compile needs on the CPU, got "
            f"no {name} in the PATH; CXX may name another."
        )
    # PyTorch 2.11 and 2.13 split the compiler's command at blanks.
    for variable, folder in (
        ("TMPDIR", tempfile.gettempdir()),
        ("TORCHINDUCTOR_CACHE_DIR", os.environ.get("TORCHINDUCTOR_CACHE_DIR", "")),
    ):
        if len(folder.split()) > 1:
            raise ConfigError(
                f"--compile-layers: {variable} is {shown(folder)}, and PyTorch's C++ compilation "
                "fails in a directory with blanks in its path. Set it to another directory."
            )


class _TwoPieces:
    """The body of any layer in two compiled pieces, and the core between."""

    def __init__(self) -> None:
        # Dropout by the generator that draws without compiling, in the same order.
        options: dict[str, Any] = {"fallback_random": True}
        self._before = torch.compile(_before_core, fullgraph=True, options=options)
        self._behind = torch.compile(_behind_core, fullgraph=True, options=options)

    def __call__(
        self,
        layer: TransformerLayer,
        hidden: Tensor,
        rotary: RotaryAngles | None,
        documents: Documents | None,
    ) -> LayerOutput:
        """The result of the layer's own body."""
        mixed, beside = self._before(layer, hidden, rotary)
        context = layer.self_attention.core(mixed, documents)
        hidden, output = self._behind(layer, hidden, context, beside)
        if output is None:
            return hidden

        output, report = layer.mlp(output, documents)
        return layer.add(hidden, output, layer.post_mlp_layernorm), report


def _before_core(layer: TransformerLayer, hidden: Tensor, rotary: RotaryAngles | None) -> Pieces:
    """Up to the core's inputs, and its output's other inputs."""
    return layer.self_attention.inputs(layer.input_layernorm(hidden), rotary)


def _behind_core(
    layer: TransformerLayer, hidden: Tensor, context: Tensor, beside: tuple[Tensor, ...]
) -> tuple[Tensor, Tensor | None]:
    """The layer's result and None; or the residual stream, and a mixture's input."""
    mixed = layer.self_attention.output(context, beside)
    hidden = layer.add(hidden, mixed, layer.post_self_attn_layernorm)
    normalized = layer.pre_mlp_layernorm(hidden)
    if isinstance(layer.mlp, MoELayer):
        return hidden, normalized
    return layer.add(hidden, layer.mlp(normalized), layer.post_mlp_layernorm), None


def _check_hooks(layer: TransformerLayer) -> None:
    # A mixture of experts is not compiled: hooks in it are called as ever.
    experts = set(layer.mlp.modules()) if isinstance(layer.mlp, MoELayer) else set()
    for module in set(layer.modules()) - experts - {layer}:
        hooks = (
            module._forward_pre_hooks,
            module._forward_hooks,
            module._backward_pre_hooks,
            module._backward_hooks,
        )
        if any(hooks) or "forward" in vars(module):
            raise ConfigError(
                "--compile-layers: expected hooks, such as FSDP's, around whole layers only, got "
                f"hooks of {type(module).__name__} within one."
            )
