"""Which data-parallel engine runs, and how."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from megatron.core.dtype_names import FLOAT_NAMES
from megatron.core.log import counted
from megatron.core.options import YEAR_SECONDS, check_options, expect, option, resolve_default
from megatron.core.transformer.spec import AttentionSpec, GatedDeltaNetSpec, Mixer

A2A, ALL_GATHER = "a2a", "all_gather"  # of --cp-comm-type


def check_heads(
    mixers: Iterable[Mixer], num_ranks: int, comm_type: str, tensor_size: int = 1
) -> None:
    """ConfigError unless `tensor_size` ranks can divide the heads of `mixers`, and `num_ranks` of
    context parallelism the heads of each part, if they exchange heads.
    """
    tensor_flag = "--tensor-model-parallel-size"
    share = "" if tensor_size == 1 else f" / {tensor_flag} {tensor_size}"
    for mixer in mixers:
        heads = _heads_of(mixer, tensor_size)
        for kind, number in heads.items():
            expected = f"a divisor of the {number} {kind}"
            expect(number % tensor_size == 0, tensor_flag, expected, tensor_size)
        if isinstance(mixer, AttentionSpec) and mixer.qk_norm is not None:
            is_divided = tensor_size > 1 and not mixer.qk_norm_is_per_head
            expect(not is_divided, tensor_flag, "1 with --qk-layernorm-across-heads", tensor_size)

        kind, number = next(iter(heads.items()))
        expected = f"a divisor of the {number} {kind}{share}, or --cp-comm-type {ALL_GATHER}"
        is_divisor = comm_type == ALL_GATHER or number // tensor_size % num_ranks == 0
        expect(is_divisor, "--context-parallel-size", expected, num_ranks)


def _heads_of(mixer: Mixer, tensor_size: int) -> dict[str, int]:
    """The numbers that `tensor_size` must divide, the one that is divided further first."""
    if isinstance(mixer, GatedDeltaNetSpec):
        kinds = "value heads of gated delta nets", "key heads of gated delta nets"
        return dict(zip(kinds, (mixer.num_value_heads, mixer.num_key_heads), strict=True))
    heads = {"attention heads": mixer.num_heads}
    if isinstance(mixer, AttentionSpec) and tensor_size % mixer.num_key_value_heads:
        heads["key heads"] = mixer.num_key_value_heads
    elif isinstance(mixer, AttentionSpec):
        # Ranks divide the channels of heads that are fewer.
        heads["channels of key heads"] = mixer.key_value_size
    return heads


@dataclass(frozen=True)
class DataParallelConfig:
    """The data-parallel engine's settings."""

    use_megatron_fsdp: bool | None = option(
        None,
        "shard the model with Megatron-FSDP; without it and --use-torch-fsdp2 a run has one "
        "process, in fp32 (default: on unless --use-torch-fsdp2 is given)",
    )
    data_parallel_sharding_strategy: str = option(
        "optim_grads_params",
        "sharded state: none (no_shard), optimizer states (optim, ZeRO-1), also gradients"
        " (optim_grads, ZeRO-2), also parameters (optim_grads_params, ZeRO-3)",
        choices=("no_shard", "optim", "optim_grads", "optim_grads_params"),
        no_effect_unless="use_megatron_fsdp",
    )
    num_distributed_optimizer_instances: int = option(
        1,
        "HSDP: number of groups of ranks, each of which shards a complete copy of the model",
        at_least=1,
        no_effect_unless={
            "use_megatron_fsdp": True,
            "data_parallel_sharding_strategy": "optim_grads_params",
        },
    )
    outer_dp_sharding_strategy: str = option(
        "no_shard",
        "state that is also sharded over the groups of HSDP: none (no_shard), or optimizer states "
        "(optim, HFSDP)",
        choices=("no_shard", "optim"),
    )
    expert_model_parallel_size: int = option(
        1,
        "expert parallelism: ranks that divide the experts of each layer among them",
        at_least=1,
        requires="num_experts",
        no_effect_unless="use_megatron_fsdp",
    )
    tensor_model_parallel_size: int = option(
        1,
        "tensor parallelism: consecutive ranks that divide the weights of each layer, and the "
        "positions between layers; they read the same samples (docs/training.md)",
        at_least=1,
        no_effect_unless="use_megatron_fsdp",
    )
    context_parallel_size: int = option(
        1,
        "context parallelism: consecutive ranks that divide each sequence among them; they read "
        "the same samples (docs/long_context.md)",
        at_least=1,
        no_effect_unless="use_megatron_fsdp",
    )
    cp_comm_type: str = option(
        A2A,
        "what these ranks exchange: heads for positions (a2a), or keys and values in attention and "
        "states in delta nets (all_gather)",
        choices=(A2A, ALL_GATHER),
    )
    main_grads_dtype: str = option(
        "fp32",
        "dtype of the gradients that the optimizer reads, and of their sums over microbatches; "
        "bf16 takes half of the memory and rounds each sum",
        choices=FLOAT_NAMES,
    )
    megatron_fsdp_grad_comm_dtype: str = option(
        "auto",
        "dtype in which gradients are reduced; auto: fp32 on several accelerators, that of the "
        "main gradients on CPUs",
        choices=(*FLOAT_NAMES, "auto"),
        no_effect_unless="use_megatron_fsdp",
    )
    fp8_param_gather: bool = option(
        False,
        "keep and gather the weights of low-precision layers as fp8 codes, one byte an element, "
        "quantized after each update",
        requires="fp8_format",
        no_effect_unless="use_megatron_fsdp",
    )
    fp4_param_gather: bool = option(
        False,
        "keep and gather the weights of low-precision layers as fp4 codes, half a byte an element, "
        "quantized after each update",
        requires="fp4_format",
        no_effect_unless="use_megatron_fsdp",
    )
    megatron_fsdp_reshard_after_forward: bool = option(
        True,
        "free a layer's gathered weights after its forward and gather them again for its "
        "backward; off takes more memory and less communication",
        off_flag="--megatron-fsdp-no-reshard-after-forward",
        no_effect_unless="use_megatron_fsdp",
    )
    use_torch_fsdp2: bool = option(
        False, "shard the model with PyTorch FSDP2 instead of Megatron-FSDP, for comparison"
    )
    torch_fsdp2_reshard_after_forward: bool = option(
        True,
        "free a layer's gathered weights after its forward and gather them again for its "
        "backward; off takes more memory and less communication",
        off_flag="--torch-fsdp2-no-reshard-after-forward",
        no_effect_unless="use_torch_fsdp2",
    )
    distributed_timeout_minutes: float = option(
        10.0,
        "minutes after which a collective that does not complete ends the run",
        more_than=0,
        ceiling=YEAR_SECONDS / 60,
    )

    def __post_init__(self) -> None:
        # First: the options that need an engine are checked against the one that runs.
        resolve_default(self, "use_megatron_fsdp", not self.use_torch_fsdp2)

        check_options(self)
        expect(
            not (self.use_megatron_fsdp and self.use_torch_fsdp2),
            "--use-torch-fsdp2",
            "one engine",
            "--use-megatron-fsdp too",
        )
        expect(
            self.outer_dp_sharding_strategy == "no_shard"
            or self.num_distributed_optimizer_instances > 1,
            "--outer-dp-sharding-strategy",
            "--num-distributed-optimizer-instances of at least 2",
            self.num_distributed_optimizer_instances,
        )
        expect(
            self.cp_comm_type == A2A or self.context_parallel_size > 1,
            "--cp-comm-type",
            "--context-parallel-size of at least 2",
            self.context_parallel_size,
        )

    @property
    def gathers_codes(self) -> bool:
        """Whether weights of low-precision layers are kept and gathered as codes."""
        return self.fp8_param_gather or self.fp4_param_gather

    @property
    def ranks_per_sample(self) -> int:
        """The number of ranks that read the same samples and divide their computation."""
        return self.tensor_model_parallel_size * self.context_parallel_size

    def data_parallel_size(self, world_size: int) -> int:
        """The number of ranks that read different samples.

        Raises:
            ConfigError: the ranks cannot be divided by the tensor- and context-parallel sizes.
        """
        tensor_size, context_size = self.tensor_model_parallel_size, self.context_parallel_size
        ranks = counted(world_size, "rank")
        expect(
            world_size % tensor_size == 0,
            "--tensor-model-parallel-size",
            f"a divisor of {ranks}",
            tensor_size,
        )
        groups = ranks if tensor_size == 1 else f"{ranks} / --tensor-model-parallel-size"
        expect(
            world_size // tensor_size % context_size == 0,
            "--context-parallel-size",
            f"a divisor of {groups}",
            context_size,
        )
        return world_size // self.ranks_per_sample

    def data_parallel_rank(self, rank: int) -> int:
        """The index of the samples that a rank reads, in range(data_parallel_size)."""
        return rank // self.ranks_per_sample

    @property
    def has_exchanges(self) -> bool:
        """Whether layers send tokens to other ranks in forward and backward."""
        return max(self.expert_model_parallel_size, self.ranks_per_sample) > 1

    @property
    def is_sharded(self) -> bool:
        """Whether an engine runs, rather than the bare model."""
        return bool(self.use_megatron_fsdp) or self.use_torch_fsdp2

    @property
    def engine(self) -> str:
        """Name of the engine in logs."""
        if self.use_torch_fsdp2:
            return "PyTorch FSDP2"
        if not self.use_megatron_fsdp:
            return "unsharded"

        divided = ""
        if self.tensor_model_parallel_size > 1:
            divided += f", layers divided by {self.tensor_model_parallel_size}"
        if self.expert_model_parallel_size > 1:
            divided += f", experts divided by {self.expert_model_parallel_size}"
        if self.context_parallel_size > 1:
            divided += f", sequences divided by {self.context_parallel_size}"
        if self.num_distributed_optimizer_instances > 1:
            kind = "HFSDP" if self.outer_dp_sharding_strategy == "optim" else "HSDP"
            instances = self.num_distributed_optimizer_instances
            return f"Megatron-FSDP ({kind}, {instances} instances{divided})"
        return f"Megatron-FSDP ({self.data_parallel_sharding_strategy}{divided})"
