"""The orthogonalization of Muon, by Newton-Schulz iterations in bf16, and the scalars of its step.

Source of the algorithm: Jordan et al., "Muon: An optimizer for hidden layers in neural networks"
(2024). It has the operators of `torch.optim.Muon`, in their order and dtypes, and on CPUs that are
slow in bf16 the products of products.py.

`orthogonalize` takes one matrix at a time. Batched products would choose other kernels, with other
bits, for other numbers of matrices, and so for other numbers of ranks.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from megatron.core.optimizer.kernels.piece import check_betas, check_rates
from megatron.core.products import addmm, mm

# The published coefficients of Polar Express are divided by powers of this, all but the last ones.
_SAFETY = 1.01
_POLAR_EXPRESS = (
    (8.28721201814563, -23.595886519098837, 17.300387312530933),
    (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
    (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
    (3.3184196573706015, -2.488488024314874, 0.51004894012372),
    (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
    (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
    (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
)

# The triples a, b, c of iterations x = a x + b (x x^T) x + c (x x^T)^2 x; the last one repeats.
# The names are Megatron-LM's, whose default is "quintic"; torch.optim.Muon's triple is "simple".
COEFFICIENTS: Mapping[str, tuple[tuple[float, float, float], ...]] = {
    # Jordan et al. (2024): singular values between about 0.7 and 1.2 after five iterations.
    "simple": ((3.4445, -4.7750, 2.0315),),
    "quintic": (
        (4.0848, -6.8946, 2.9270),
        (3.9505, -6.3029, 2.6377),
        (3.7418, -5.5913, 2.3037),
        (2.8769, -3.1427, 1.2046),
        (2.8366, -3.0525, 1.2012),
    ),
    # Amsel et al., "The Polar Express" (2025), arXiv:2505.16932.
    "polar_express": (
        *((a / _SAFETY, b / _SAFETY**3, c / _SAFETY**5) for a, b, c in _POLAR_EXPRESS),
        (1.875, -1.25, 0.375),
    ),
}

SCALE_MODES = ("match_rms_adamw", "original", "spectral")
_MOST_STEPS = 99  # torch.optim.Muon's


@dataclass(frozen=True)
class MuonStep:
    """The scalars of a step of matrices.

    Attributes:
        scale_mode: the factor of the learning rate for a matrix: "match_rms_adamw",
            0.2 sqrt(max(rows, columns)), with which AdamW's learning rate and weight decay suit
            Muon (Liu et al., "Muon is Scalable for LLM Training", 2025); "original",
            sqrt(max(1, rows / columns)) (Jordan et al.); "spectral", sqrt(max(rows, columns)).
        extra_scale_factor: a further factor.

    Raises:
        ValueError: for a momentum outside [0, 1), for a rate that is negative or not finite, for
            another number of steps than 1 to 99, for an unknown name.
    """

    lr: float
    weight_decay: float = 0.0
    momentum: float = 0.95
    nesterov: bool = True
    ns_steps: int = 5
    eps: float = 1e-7
    scale_mode: str = "match_rms_adamw"
    coefficient_type: str = "simple"
    extra_scale_factor: float = 1.0

    def __post_init__(self) -> None:
        check_betas(momentum=self.momentum)
        check_rates(
            lr=self.lr,
            weight_decay=self.weight_decay,
            eps=self.eps,
            extra_scale_factor=self.extra_scale_factor,
        )
        if not 1 <= self.ns_steps <= _MOST_STEPS:
            raise ValueError(f"Expected ns_steps from 1 to {_MOST_STEPS}, got {self.ns_steps}.")
        for name, given, known in (
            ("scale_mode", self.scale_mode, SCALE_MODES),
            ("coefficient_type", self.coefficient_type, tuple(COEFFICIENTS)),
        ):
            if given not in known:
                raise ValueError(f"Expected {name} to be one of {known}, got {given!r}.")

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> MuonStep:
        """From the options of a parameter group, which may be tensors."""
        return cls(
            **{
                name: float(options[name])
                for name in ("lr", "weight_decay", "momentum", "eps", "extra_scale_factor")
            },
            nesterov=bool(options["nesterov"]),
            ns_steps=int(options["ns_steps"]),
            scale_mode=options["scale_mode"],
            coefficient_type=options["coefficient_type"],
        )

    def addition(self, num_rows: int, num_columns: int) -> MatrixAddition:
        """How the orthogonalized update of a matrix of this shape changes it."""
        scale = {
            "match_rms_adamw": 0.2 * math.sqrt(max(num_rows, num_columns)),
            "original": math.sqrt(max(1.0, num_rows / num_columns)),
            "spectral": math.sqrt(max(num_rows, num_columns)),
        }[self.scale_mode]
        # Weight decay has the unscaled rate.
        return MatrixAddition(
            1.0 - self.lr * self.weight_decay, self.lr * scale * self.extra_scale_factor
        )


class MatrixAddition(NamedTuple):
    """The scalars of p = p * decay - rate * update."""

    decay: float
    rate: float


def orthogonalize(matrix: torch.Tensor, step: MuonStep) -> torch.Tensor:
    """The matrix with its singular values near 1: U V^T of U S V^T, approximately.

    It depends on the values, the shape and the strides of the matrix only, so callers pass a
    contiguous one with separate memory. A matrix of zeros stays one.

    Args:
        matrix: [rows, columns] bf16.

    Returns:
        [rows, columns] bf16, of a tall matrix with the strides of a transposed one.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.T if is_tall else matrix
    x = x / x.norm().clamp(min=step.eps)

    triples = COEFFICIENTS[step.coefficient_type]
    for number in range(step.ns_steps):
        a, b, c = triples[min(number, len(triples) - 1)]
        gram = mm(x, x.T, x.new_empty(len(x), len(x)))
        x = addmm(x, addmm(gram, gram, gram, beta=b, alpha=c), x, beta=a, alpha=1.0)
    return x.T if is_tall else x
