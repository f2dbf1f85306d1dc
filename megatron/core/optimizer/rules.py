"""Update rules: which states an optimizer keeps for a weight, and the arithmetic of a step.

A rule is a constant. It neither owns states nor knows where they are: executors allocate them, on
the device or in host memory, and hand flat arrays to the rule's kernels. Both sides' kernels give
the same bits, so where a state is never changes a run.

To add a rule, subclass `ElementwiseRule` here, add it to `rule_of` and `options_of`, and add its
flags to config.py. Optimizers of PyTorch and of other packages are not rules: see
torch_optimizer.py.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch

from megatron.core.drivers import driver_of
from megatron.core.dtypes import DTYPES, STATE_DTYPES, UNSCALED_STATE_DTYPES
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.kernels import device_adam, torch_adam, torch_flat
from megatron.core.optimizer.kernels.adam import AdamStep
from megatron.core.optimizer.kernels.host_adam import HostAdam, default_num_threads
from megatron.core.optimizer.kernels.newton_schulz import MatrixAddition, MuonStep
from megatron.core.optimizer.kernels.piece import (
    HostKernel,
    Kernel,
    check_betas,
    check_rates,
    check_unset,
)

# The options of `torch.optim.AdamW` that choose among implementations.
IMPLEMENTATIONS = ("foreach", "fused", "capturable", "differentiable")


class UpdateRule(ABC):
    """How weights are updated from gradients.

    Attributes:
        name: the rule's name in flags.
        state_dtypes: dtypes of the states besides the count of steps, by name.
        defaults: options of parameter groups, with their defaults. PyTorch's helpers expect every
            option of the loading optimizer in a checkpoint, so these are all options that the
            class in torch.optim with the same algorithm has.
        optional: options that groups may have besides.
        counts_steps: whether `scalars` depends on the number of the step. Otherwise loaded states
            may lack it, as torch's do.
        takes_matrices: whether a step is a `MuonStep` of whole matrices; see matrix_pass.py.

    Rules are frozen dataclasses. NotImplementedError for dtypes that no state can have.
    """

    name: ClassVar[str]
    optional: ClassVar[tuple[str, ...]] = ()
    counts_steps: ClassVar[bool] = True
    takes_matrices: ClassVar[bool] = False

    def __post_init__(self) -> None:
        # TransformerEngine raises this one, too.
        for name, dtype in self.state_dtypes.items():
            if dtype not in STATE_DTYPES:
                raise NotImplementedError(
                    f"Expected {name}_dtype to be one of {', '.join(map(str, STATE_DTYPES))}, got "
                    f"{dtype}."
                )

    @property
    @abstractmethod
    def state_dtypes(self) -> dict[str, torch.dtype]: ...

    @property
    def parts(self) -> tuple[UpdateRule, ...]:
        """The rules that `part_for` returns."""
        return (self,)

    @property
    def all_state_dtypes(self) -> dict[str, torch.dtype]:
        """Dtypes of the states of all parts."""
        return {name: dtype for part in self.parts for name, dtype in part.state_dtypes.items()}

    @property
    @abstractmethod
    def defaults(self) -> dict[str, Any]: ...

    @abstractmethod
    def scalars(self, options: Mapping[str, Any], step: int) -> Hashable:
        """The scalars of a parameter's step. Parameters with equal ones are updated in one piece.

        Args:
            options: of the parameter's group, with all names of `defaults`; may be tensors.
            step: counts from 1, this step included.

        Raises:
            ValueError: for options that the rule cannot honour.
        """

    @abstractmethod
    def host_kernel(
        self, num_threads: int | None = None, cores: Collection[int] | None = None
    ) -> Kernel:
        """Makes a kernel for CPU tensors. It may be called by any number of threads.

        Args:
            num_threads: default: the cores that this process may use, divided among the ranks of
                the machine that share them.
            cores: cores on which the threads run; default: any.
        """

    @abstractmethod
    def device_kernel(self, device: torch.device) -> Kernel:
        """Makes a kernel for tensors on an accelerator. RuntimeError without one for it."""

    def part_for(self, options: Mapping[str, Any]) -> UpdateRule:  # noqa: ARG002
        """The rule of a parameter group, which has its states and kernels: this one, or a part of
        it.

        Args:
            options: of the group, with all names of `defaults`.
        """
        return self

    def defaults_with(self, options: Mapping[str, Any]) -> dict[str, Any]:
        """The defaults, with other values of some. TypeError for options that the rule lacks."""
        defaults = self.defaults
        unknown = options.keys() - defaults.keys() - {*self.optional}
        if unknown:
            raise TypeError(f"Expected options of {self.name}, got {', '.join(sorted(unknown))}.")
        return {**defaults, **options}

    def check_on_host(self) -> None:
        """ValueError for dtypes of states that the host's flat arrays cannot have."""
        for part in self.parts:
            dtypes = tuple(part.state_dtypes.values())
            if len(set(dtypes)) > 1 or not set(dtypes) <= {*UNSCALED_STATE_DTYPES}:
                raise ValueError(
                    f"Expected all states of {part.name} in one of {UNSCALED_STATE_DTYPES} on the "
                    f"host, got {dtypes}."
                )


def _fp8(dtype: torch.dtype) -> torch.dtype:
    # TransformerEngine keeps fp8 numbers in tensors of bytes, and calls the dtype that.
    return torch.float8_e4m3fn if dtype == torch.uint8 else dtype


@dataclass(frozen=True)
class Adam(UpdateRule):
    """Adam and AdamW, bit-equal to the fused AdamW in torch; see [Note: arithmetic] in
    kernels/adam.py.

    `torch.uint8` as a dtype means fp8 e4m3, as in TransformerEngine.
    """

    exp_avg_dtype: torch.dtype = torch.float32
    exp_avg_sq_dtype: torch.dtype = torch.float32
    adam_w_mode: bool = True  # decoupled weight decay; otherwise it is added to the gradient

    name: ClassVar[str] = "adam"
    optional: ClassVar[tuple[str, ...]] = ("bias_correction",)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        return {"exp_avg": _fp8(self.exp_avg_dtype), "exp_avg_sq": _fp8(self.exp_avg_sq_dtype)}

    @property
    def defaults(self) -> dict[str, Any]:
        return {
            "lr": 1e-3,
            "betas": (0.9, 0.999),
            "eps": 1e-8,
            "weight_decay": 0.0,
            "amsgrad": False,
            "maximize": False,
            "foreach": None,
            "capturable": False,
            "differentiable": False,
            "fused": True,
            "decoupled_weight_decay": self.adam_w_mode,
        }

    def scalars(self, options: Mapping[str, Any], step: int) -> AdamStep:
        return AdamStep.of(options, step, self.adam_w_mode)

    def host_kernel(
        self, num_threads: int | None = None, cores: Collection[int] | None = None
    ) -> Kernel:
        pool = HostAdam(num_threads, cores=cores)
        if pool.body == "torch":  # which has no threads of its own
            return pool.run
        return HostKernel(
            lambda pieces, grad_scale: pool.submit([*pieces], grad_scale).wait,
            lambda pieces, grad_scale, log: pool.submit(pieces, grad_scale, log=log).wait,
            pool.encode,
        )

    def device_kernel(self, device: torch.device) -> Kernel:
        has_triton = driver_of(device.type).has_triton and device_adam.works_on(device)
        return device_adam.run if has_triton else torch_adam.run


class ElementwiseRule(UpdateRule):
    """A rule that torch operators compute, on both sides."""

    counts_steps: ClassVar[bool] = False

    @staticmethod
    @abstractmethod
    def update(
        step: Any, grad: torch.Tensor, weight: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        """Updates weight and states in place. All arrays are fp32; the gradient may be written to.

        Each operator must round once and treat elements alike, or the sides' bits would differ:
        no `alpha` or `addcmul`, which some devices contract and others do not.
        """

    def host_kernel(
        self, num_threads: int | None = None, cores: Collection[int] | None = None
    ) -> Kernel:
        del cores  # threads of Python run where the process may
        return torch_flat.pooled(self.update, num_threads or default_num_threads())

    def device_kernel(self, device: torch.device) -> Kernel:
        del device
        return partial(torch_flat.run, update=self.update)


class SgdStep(NamedTuple):
    """The scalars of `SGD`."""

    lr: float
    momentum: float
    weight_decay: float
    nesterov: bool


@dataclass(frozen=True)
class SGD(ElementwiseRule):
    """SGD as in torch.optim, without dampening:

        g = g + weight_decay * p
        b = momentum * b + g
        p = p - lr * (g + momentum * b if nesterov else b)

    Rounding differs from torch's, whose devices contract some of these operations.
    """

    momentum_buffer_dtype: torch.dtype = torch.float32
    has_momentum: bool = True  # otherwise there are no states, and momentum must be 0

    name: ClassVar[str] = "sgd"

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        return {"momentum_buffer": _fp8(self.momentum_buffer_dtype)} if self.has_momentum else {}

    @property
    def defaults(self) -> dict[str, Any]:
        return {
            "lr": 1e-3,
            "momentum": 0.9 if self.has_momentum else 0.0,
            "dampening": 0.0,
            "weight_decay": 0.0,
            "nesterov": False,
            "maximize": False,
            "foreach": None,
            "differentiable": False,
            "fused": None,
        }

    def scalars(self, options: Mapping[str, Any], step: int) -> SgdStep:
        del step
        check_unset(options, "SGD", ("dampening", "maximize", "differentiable"))
        lr, weight_decay = float(options["lr"]), float(options["weight_decay"])
        momentum = float(options["momentum"])
        check_rates(lr=lr, weight_decay=weight_decay, momentum=momentum)
        if momentum and not self.has_momentum:
            raise ValueError(f"Expected momentum 0 of a rule without momentum, got {momentum}.")
        return SgdStep(lr, momentum, weight_decay, bool(options["nesterov"]))

    @staticmethod
    def update(
        step: SgdStep, grad: torch.Tensor, weight: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        if step.weight_decay:
            grad.add_(weight * step.weight_decay)
        if "momentum_buffer" in states:
            buffer = states["momentum_buffer"].mul_(step.momentum).add_(grad)
            grad = grad.add_(buffer * step.momentum) if step.nesterov else buffer
        weight.sub_(grad * step.lr)


class LionStep(NamedTuple):
    """The scalars of `Lion`."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


@dataclass(frozen=True)
class Lion(ElementwiseRule):
    """Lion, of Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2.

        u = sign(beta1 * m + (1 - beta1) * g)
        p = p * (1 - lr * weight_decay) - lr * u
        m = beta2 * m + (1 - beta2) * g

    It needs a rate three to ten times smaller than AdamW's, with a weight decay that many times
    larger. Gradients that are not finite make a weight NaN.
    """

    exp_avg_dtype: torch.dtype = torch.float32

    name: ClassVar[str] = "lion"

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        return {"exp_avg": _fp8(self.exp_avg_dtype)}

    @property
    def defaults(self) -> dict[str, Any]:
        return {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0}

    def scalars(self, options: Mapping[str, Any], step: int) -> LionStep:
        del step
        lr, weight_decay = float(options["lr"]), float(options["weight_decay"])
        beta1, beta2 = map(float, options["betas"])
        check_rates(lr=lr, weight_decay=weight_decay)
        check_betas(beta1=beta1, beta2=beta2)
        return LionStep(lr, beta1, beta2, weight_decay)

    @staticmethod
    def update(
        step: LionStep, grad: torch.Tensor, weight: torch.Tensor, states: Mapping[str, torch.Tensor]
    ) -> None:
        exp_avg = states["exp_avg"]
        mixed = (exp_avg * step.beta1).add_(grad * (1.0 - step.beta1))
        # The sign of NaN is 0 in torch, which would hide it: NaN times zero does not.
        direction = mixed.sign().add_(mixed.mul_(0.0))
        weight.mul_(1.0 - step.lr * step.weight_decay).sub_(direction.mul_(step.lr))
        exp_avg.mul_(step.beta2).add_(grad.mul_(1.0 - step.beta2))


@dataclass(frozen=True)
class Muon(ElementwiseRule):
    """Muon for matrices, of Jordan et al., "Muon: An optimizer for hidden layers in neural
    networks" (2024), in the conventions of `torch.optim.Muon`, and Adam for all else.

        m = m + (1 - momentum) * (g - m)
        u = m + (1 - momentum) * (g - m) if nesterov else m         rounded to bf16
        o = orthogonalize(u)                                        of each whole matrix, in bf16
        p = p * (1 - lr * weight_decay) - lr * scale * o

    `MuonStep` has the options and what `scale` is, newton_schulz.py the coefficients by name:
    "simple" are torch's, "quintic" is Megatron-LM's default. Options of a group besides them:

        use_muon        False: the group's parameters are not matrices, and take steps of `scalar`
                        with the group's lr and weight_decay, with `betas` and `adam_eps`
        matrix_rows     for each parameter [rows, columns] the numbers of rows of the matrices that
                        are stacked in it; default: one matrix, as in torch

    The steps of a matrix are two elementwise passes, which `update` has, with an orthogonalization
    between them: see matrix_pass.py.
    """

    momentum_buffer_dtype: torch.dtype = torch.float32
    scalar: Adam = Adam()

    name: ClassVar[str] = "muon"
    takes_matrices: ClassVar[bool] = True
    optional: ClassVar[tuple[str, ...]] = ("matrix_rows",)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Their scale is of a whole tensor, but matrices are parts of tensors.
        if self.momentum_buffer_dtype not in UNSCALED_STATE_DTYPES:
            raise NotImplementedError(
                f"Expected momentum_buffer_dtype to be one of {UNSCALED_STATE_DTYPES}, got "
                f"{self.momentum_buffer_dtype}."
            )

    @property
    def state_dtypes(self) -> dict[str, torch.dtype]:
        return {"momentum_buffer": self.momentum_buffer_dtype}

    @property
    def parts(self) -> tuple[UpdateRule, ...]:
        return self, self.scalar

    @property
    def defaults(self) -> dict[str, Any]:
        return {
            "lr": 1e-3,
            "weight_decay": 0.1,
            "momentum": 0.95,
            "nesterov": True,
            "ns_steps": 5,
            "eps": 1e-7,
            "scale_mode": "match_rms_adamw",
            "coefficient_type": "simple",
            "extra_scale_factor": 1.0,
            "use_muon": True,
            "betas": (0.9, 0.999),
            "adam_eps": 1e-8,
        }

    def part_for(self, options: Mapping[str, Any]) -> UpdateRule:
        return self if options["use_muon"] else self.scalar

    def scalars(self, options: Mapping[str, Any], step: int) -> MuonStep | AdamStep:
        if options["use_muon"]:
            # torch's state dicts have them: their scales may differ from the group's.
            check_unset(options, "Muon", ("adjust_lr_fn", "ns_coefficients"))
            return MuonStep.of(options)
        return self.scalar.scalars({**options, "eps": options["adam_eps"]}, step)

    @staticmethod
    def update(
        step: MuonStep | MatrixAddition,
        grad: torch.Tensor,
        weight: torch.Tensor,
        states: Mapping[str, torch.Tensor],
    ) -> None:
        """With a `MuonStep`, updates the momentum, and writes its mix with the gradient to
        `weight`; with a `MatrixAddition`, adds `grad`, an orthogonalized mix, to the weight.
        """
        if isinstance(step, MatrixAddition):
            weight.mul_(step.decay).sub_(grad.mul_(step.rate))
            return
        buffer = states["momentum_buffer"]
        # The bits of torch.optim.Muon: another rounding here may become another bf16 number, and
        # the iterations magnify that. `lerp` is one fused multiply-add, on CPUs that have it (AVX2
        # or later) and where nvcc compiles it, as in [Note: arithmetic] of kernels/adam.py.
        buffer.lerp_(grad, 1.0 - step.momentum)
        if step.nesterov:
            torch.lerp(grad, buffer, step.momentum, out=weight)
        else:
            weight.copy_(buffer)


def rule_of(config: OptimizerConfig) -> UpdateRule:
    """The rule that `--optimizer` selects."""
    exp_avg, exp_avg_sq = DTYPES[config.exp_avg_dtype], DTYPES[config.exp_avg_sq_dtype]
    rules: dict[str, Callable[[], UpdateRule]] = {
        "adam": lambda: Adam(exp_avg, exp_avg_sq),
        "sgd": lambda: SGD(exp_avg, has_momentum=config.sgd_momentum > 0),
        "lion": lambda: Lion(exp_avg),
        "muon": lambda: Muon(exp_avg, Adam(exp_avg, exp_avg_sq)),
    }
    return rules[config.optimizer]()


def options_of(config: OptimizerConfig) -> dict[str, Any]:
    """The options of `rule_of`'s parameter groups, besides rate and weight decay."""
    betas = (config.adam_beta1, config.adam_beta2)
    options: dict[str, dict[str, Any]] = {
        "adam": {"betas": betas, "eps": config.adam_eps},
        "sgd": {"momentum": config.sgd_momentum},
        "lion": {"betas": (config.lion_beta1, config.lion_beta2)},
        "muon": {
            "momentum": config.muon_momentum,
            "nesterov": config.muon_nesterov,
            "ns_steps": config.muon_num_ns_steps,
            "coefficient_type": config.muon_coefficient_type,
            "scale_mode": config.muon_scale_mode,
            "extra_scale_factor": config.muon_extra_scale_factor,
            "betas": betas,
            "adam_eps": config.adam_eps,
        },
    }
    return options[config.optimizer]
