"""`RunConfig`: the configs of all packages, and the checks that involve several of them."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import re
import sys
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron.core.config import DeviceConfig, ExecutionConfig
from megatron.core.datasets.config import GPTDatasetConfig
from megatron.core.dist_checkpointing.config import (
    FSDP_DTENSOR,
    TORCH_DCP,
    CheckpointConfig,
    local_folder,
)
from megatron.core.distributed.config import DataParallelConfig, check_heads
from megatron.core.dtype_names import FLOAT_NAMES
from megatron.core.log import counted
from megatron.core.low_precision.config import LowPrecisionConfig
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.optimizer.config import OptimizerConfig
from megatron.core.optimizer.lr_schedule import LRSchedule, LRScheduleConfig
from megatron.core.options import (
    YEAR_SECONDS,
    ConfigError,
    Field,
    check_needs,
    check_options,
    expect,
    given_options,
    option,
    options_of,
)
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.layer_specs import model_spec
from megatron.training.health.events import METRICS_FILE, TIMELINES_FOLDER
from megatron.training.health.inject import InjectConfig, check_paths
from megatron.training.tokenizer import TokenizerConfig

NO_FILE = "none"
_MOST_ITERATIONS = 100  # of a timeline; each takes some kilobytes a layer, in memory and on disk
_SLICE = re.compile(r"([0-9]{1,9}):([0-9]{1,9})")


@dataclass(frozen=True)
class TrainingConfig:
    """The run itself: how long, in what batches, in what precision."""

    train_iters: int = option(
        help="iterations (optimizer steps) to train", at_least=1, ceiling=2**32
    )
    micro_batch_size: int = option(
        help="sequences per rank in one forward pass", at_least=1, ceiling=2**20
    )
    global_batch_size: int | None = option(
        None,
        "sequences per iteration over all ranks (default: --micro-batch-size x data-parallel "
        "ranks)",
        at_least=1,
        ceiling=2**28,
    )
    bf16: bool = option(
        False, "compute in bf16, with main weights, reductions and optimizer in fp32"
    )
    fp16: bool = option(
        False, "compute in fp16 with a scaled loss; main weights and optimizer states stay fp32"
    )
    calculate_per_token_loss: bool = option(
        False,
        "average the loss over all learned tokens of a global batch instead of over each "
        "microbatch, then over microbatches; makes a difference where tokens are masked (--sft, "
        "--eod-mask-loss, images)",
    )
    # The legacy generator of numpy, which seed_all seeds too, takes 32 bits.
    seed: int = option(
        1234, "seed of initial weights, data order and dropout", at_least=0, at_most=2**32 - 1
    )
    deterministic_mode: bool = option(
        False,
        "compute the same bits each time on a GPU too, more slowly; what cannot is an error",
    )
    eval_interval: int | None = option(
        None,
        "iterations between evaluations on the validation data (default: only after training)",
        at_least=1,
    )
    eval_iters: int = option(
        100, "global batches per evaluation; 0: no evaluation", at_least=0, ceiling=2**32
    )
    skip_train: bool = option(False, "evaluate only")
    check_for_nan_in_loss: bool = option(False, "end the run if the loss is NaN or infinite")
    freeze: tuple[str, ...] | None = option(
        None,
        "parts of the model to leave untrained: vision, projector or decoder of a model that "
        "reads images, or the start of parameter names (default: none)",
        metavar="NAME",
    )

    def __post_init__(self) -> None:
        check_options(self)
        expect(not (self.bf16 and self.fp16), "--fp16", "one dtype to compute in", "--bf16 too")

    @property
    def compute_dtype(self) -> str:
        """The dtype of weights and activations in forward and backward: fp32, bf16 or fp16."""
        return "fp16" if self.fp16 else "bf16" if self.bf16 else "fp32"


@dataclass(frozen=True)
class RecoverConfig:
    """How a run comes back after it has died."""

    recover_mode: str = option(
        "auto",
        "auto: resume from the newest intact checkpoint in --save, if any; on: require"
        " one; off: start from --load, and reject a --save with newer checkpoints",
        choices=("on", "auto", "off"),
        may_change=True,
    )
    recover_retries: int = option(
        3,
        "restarts by torchrun or Slurm from one checkpoint before the run gives up",
        at_least=0,
        may_change=True,
    )
    keep_host_state: bool = option(
        False,
        "keep main weights and optimizer states in memory that survives the ranks: restarted by"
        " torchrun, they continue with the next step instead of a checkpoint",
        requires="optimizer_cpu_offload",
    )
    hang_timeout_seconds: float | None = option(
        None,
        "end the run if a rank makes no progress for this many seconds (default: "
        "--distributed-timeout-minutes)",
        more_than=0,
        ceiling=YEAR_SECONDS,
        may_change=True,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class StopConfig:
    """When to end before the last iteration. Names are Megatron's, but for the grace period."""

    exit_interval: int | None = option(
        None, "save and exit after an iteration divisible by this", more_than=0, may_change=True
    )
    exit_duration_in_mins: float | None = option(
        None, "save and exit after this many minutes", more_than=0, may_change=True
    )
    exit_signal_handler: bool = option(
        False,
        "on SIGTERM, SIGUSR1 or Ctrl-C, finish the iteration, save and exit",
        may_change=True,
    )
    exit_signal_grace_seconds: float | None = option(
        None,
        "seconds from the signal in which the run must exit: if a save would take longer, exit "
        "without saving (default: always save)",
        more_than=0,
        no_effect_unless="exit_signal_handler",
        may_change=True,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True)
class LoggingConfig:
    """Where a run's progress is reported."""

    log_interval: int = option(100, "iterations between log lines", at_least=1, may_change=True)
    log_format: str | None = option(
        None,
        "long: Megatron-LM's log line; short: a line of 100 columns with memory and the time "
        "left (default: short on a terminal, otherwise long)",
        choices=("short", "long"),
        may_change=True,
    )
    timing_log_level: int = option(
        0,
        "1: log how long the offloaded optimizer's copies and updates took",
        choices=(0, 1),
    )
    moe_per_layer_logging: bool = option(
        False,
        "report each expert's load in --metrics-jsonl, and each layer's balance in TensorBoard",
        requires="num_experts",
        may_change=True,
    )
    progress_bar: bool = option(
        True, "show a progress bar if the output is a terminal", may_change=True
    )
    metrics_jsonl: str | None = option(
        None,
        "file for a JSON object per iteration and evaluation; none: no file (default: "
        f"{METRICS_FILE} in --events-dir)",
        metavar="FILE",
        may_change=True,
    )
    events_dir: str | None = option(
        None,
        "directory for events.jsonl and heartbeat.json (default: --save, unless it is a URL)",
        metavar="DIR",
        may_change=True,
    )
    profile_lanes: str | None = option(
        None,
        "record a timeline of copies and computation in these iterations, as a Python slice: "
        "20:23 is 20, 21 and 22 (docs/training.md)",
        metavar="FIRST:END",
        may_change=True,
    )
    profile_lanes_dir: str | None = option(
        None,
        "directory for timelines (default: timelines/ in --events-dir)",
        metavar="DIR",
        requires="profile_lanes",
        may_change=True,
    )
    tensorboard_dir: str | None = option(
        None, "directory for TensorBoard's files (default: none)", metavar="DIR", may_change=True
    )
    wandb_project: str | None = option(
        None,
        "project in Weights & Biases; needs the package wandb (default: none)",
        metavar="NAME",
        noun="a name",
    )
    wandb_exp_name: str | None = option(
        None, "name of the run in Weights & Biases", metavar="NAME", requires="wandb_project"
    )
    wandb_save_dir: str | None = option(
        None,
        "directory for local files of Weights & Biases",
        metavar="DIR",
        requires="wandb_project",
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.wandb_project is not None and importlib.util.find_spec("wandb") is None:
            raise ConfigError(
                "--wandb-project: expected the package wandb (pip install "
                "'.[wandb]' in the clone), got none."
            )

        if self.profile_lanes is not None:
            iterations_of(self.profile_lanes)
        folders = {"--events-dir": self.events_dir, "--profile-lanes-dir": self.profile_lanes_dir}
        for flag, folder in folders.items():
            if folder is not None:
                expect("://" not in folder, flag, "a directory of the file system", folder)

    @property
    def is_short(self) -> bool:
        """Whether this process's log has the short format."""
        return sys.stdout.isatty() if self.log_format is None else self.log_format == "short"


@dataclass(frozen=True)
class BatchSizes:
    """How much a step computes, as far as it decides about its memory.

    Attributes:
        micro_batch_size: sequences of a rank in one forward.
        global_batch_size: sequences of a step over all ranks; None: one microbatch a rank.
        seq_length: tokens of a sequence.
    """

    micro_batch_size: int
    seq_length: int
    global_batch_size: int | None = None

    def num_microbatches(self, data_parallel_size: int) -> int:
        """Microbatches of each rank in a step."""
        if self.global_batch_size is None:
            return 1
        return self.global_batch_size // (self.micro_batch_size * data_parallel_size)


@dataclass(frozen=True)
class EngineConfig:
    """An engine's part of a run's configuration (`RunConfig.engine`).

    Attributes:
        train_iters: steps of the whole run, which the schedule spans.
        compute_dtype: fp32, bf16 or fp16, of weights and activations in forward and backward.
        seed: of the initial weights.
        records_timings: whether an offloaded optimizer, and offloaded activations, record how long
            their lanes took.
        ckpt_format: of the checkpoints that it saves; None: the engine's own.
        batch: needed by `optimizer_offload_fraction="auto"` only.

    Raises:
        ConfigError: for another compute dtype, a format that does not exist, or low precision with
            settings that do not allow it.
    """

    optimizer: OptimizerConfig
    schedule: LRScheduleConfig
    parallel: DataParallelConfig
    train_iters: int
    compute_dtype: str = "fp32"
    seed: int = 1234
    records_timings: bool = False
    ckpt_format: str | None = None
    execution: ExecutionConfig = ExecutionConfig()
    batch: BatchSizes | None = None
    low_precision: LowPrecisionConfig = LowPrecisionConfig()

    def __post_init__(self) -> None:
        formats = (None, FSDP_DTENSOR, TORCH_DCP)
        expect(
            self.ckpt_format in formats,
            "ckpt_format",
            f"{FSDP_DTENSOR} or {TORCH_DCP}",
            self.ckpt_format,
        )
        expect(
            self.compute_dtype in FLOAT_NAMES,
            "compute_dtype",
            f"one of {', '.join(FLOAT_NAMES)}",
            self.compute_dtype,
        )
        if self.low_precision.recipe is not None:
            self._check_low_precision(self.low_precision.flag)
        if self.parallel.fp8_param_gather:
            self._check_param_gather("fp8")
        if self.parallel.fp4_param_gather:
            self._check_param_gather("fp4")

    def _check_low_precision(self, flag: str) -> None:
        expect(self.compute_dtype == "bf16", flag, "--bf16", f"--{self.compute_dtype}")
        compiles = self.execution.compile_layers
        expect(not compiles, "--compile-layers", f"layers that are bf16, without {flag}", compiles)

    def _check_param_gather(self, kind: str) -> None:
        flag, needed = f"--{kind}-param-gather", f"--{kind}-format"
        found = self.low_precision.recipe and self.low_precision.flag
        expect(found == needed, flag, needed, found)
        dtype = self.optimizer.main_params_dtype
        expect(dtype == "fp32", flag, "--main-params-dtype fp32", dtype)
        is_host_muon = self.optimizer.optimizer == "muon" and self.optimizer.optimizer_cpu_offload
        expect(not is_host_muon, flag, "another optimizer than an offloaded muon", "muon")


@dataclass(frozen=True)
class RunConfig:
    """All settings of a run, by owner. Every flag belongs to exactly one of them."""

    model: TransformerConfig
    data: GPTDatasetConfig
    tokenizer: TokenizerConfig
    optimizer: OptimizerConfig
    schedule: LRScheduleConfig
    parallel: DataParallelConfig
    checkpoint: CheckpointConfig
    training: TrainingConfig
    recover: RecoverConfig
    stop: StopConfig
    inject: InjectConfig
    logging: LoggingConfig
    device: DeviceConfig
    execution: ExecutionConfig
    low_precision: LowPrecisionConfig
    vision: VisionConfig | None = None

    def resolve(self, world_size: int) -> RunConfig:
        """This configuration with the defaults that depend on the number of ranks filled in.

        Raises:
            ConfigError: for settings that are valid by themselves, but not together or not on this
                number of ranks.
        """
        size = self.parallel.data_parallel_size(world_size)
        self._check_tensor(world_size)
        self._check_context()
        batch = self.training.global_batch_size or self.training.micro_batch_size * size
        training = dataclasses.replace(self.training, global_batch_size=batch)

        default_format = TORCH_DCP if self.parallel.use_torch_fsdp2 else FSDP_DTENSOR
        config = dataclasses.replace(
            self, training=training, checkpoint=self.checkpoint.resolve(default_format)
        )

        config._check_batch(size)
        config._check_model()
        config._check_engine(world_size)
        config._check_fp16()
        config._check_low_precision()
        config._check_flags_that_need_others()
        config._check_recovery()
        LRSchedule.build(config.schedule, config.training.train_iters)
        return config

    @property
    def global_batch_size(self) -> int:
        """Sequences in one iteration; a number once the configuration is resolved."""
        if self.training.global_batch_size is None:
            raise RuntimeError(
                "Expected a resolved configuration, got one without --global-batch-size."
            )
        return self.training.global_batch_size

    @property
    def events_dir(self) -> str | None:
        """The directory of the event log. None: no event log."""
        save = self.checkpoint.save
        # An evaluation of a run's checkpoints is not one of its starts.
        if self.logging.events_dir is not None or save is None or self.training.skip_train:
            return self.logging.events_dir
        folder = local_folder(save)
        return None if folder is None else str(Path(folder))

    @property
    def timelines_dir(self) -> str | None:
        """The directory of recorded timelines. None: no recording."""
        if self.logging.profile_lanes_dir is not None or self.events_dir is None:
            return self.logging.profile_lanes_dir
        return str(Path(self.events_dir) / TIMELINES_FOLDER)

    @property
    def metrics_jsonl(self) -> str | None:
        """The JSONL file of metrics. None: no such file."""
        given, folder = self.logging.metrics_jsonl, self.events_dir
        if given is not None:
            return None if given == NO_FILE else given
        return None if folder is None else str(Path(folder) / METRICS_FILE)

    def given(self) -> dict[str, Any]:
        """The settings that are not their defaults, by field, as plain data."""
        values = self.values()
        return {
            field.name: values[field.name]
            for _, section in self.sections()
            for field in given_options(section)
        }

    def engine(self) -> EngineConfig:
        """The part of it that an engine needs."""
        return EngineConfig(
            self.optimizer,
            self.schedule,
            self.parallel,
            self.training.train_iters,
            self.training.compute_dtype,
            self.training.seed,
            records_timings=self.logging.timing_log_level > 0
            or self.logging.profile_lanes is not None,
            ckpt_format=self.checkpoint.ckpt_format,
            execution=self.execution,
            low_precision=self.low_precision,
            batch=BatchSizes(
                self.training.micro_batch_size,
                self.data.seq_length,
                self.training.global_batch_size,
            ),
        )

    def num_microbatches(self, data_parallel_size: int) -> int:
        """Microbatches that each rank runs in one iteration."""
        return self.global_batch_size // (self.training.micro_batch_size * data_parallel_size)

    def values(self) -> dict[str, Any]:
        """Every setting by its field's name, as plain data."""
        return {
            field.name: list(value) if isinstance(value, tuple) else value
            for _, section in self.sections()
            for field in dataclasses.fields(section)
            for value in (getattr(section, field.name),)
        }

    def sections(self) -> Iterator[tuple[str, Any]]:
        """The owners' configs, with their names here; a part that the model lacks has none."""
        for field in dataclasses.fields(self):
            section = getattr(self, field.name)
            if section is not None:
                yield field.name, section

    def _check_batch(self, data_parallel_size: int) -> None:
        unit = self.training.micro_batch_size * data_parallel_size
        expect(
            self.global_batch_size % unit == 0,
            "--global-batch-size",
            f"a multiple of {unit}, micro-batch-size {self.training.micro_batch_size} x "
            f"{counted(data_parallel_size, 'rank')}",
            self.global_batch_size,
        )

    def _check_model(self) -> None:
        limit = self.model.max_position_embeddings
        expect(
            limit is None or self.data.seq_length <= limit,
            "--seq-length",
            f"at most --max-position-embeddings {limit}",
            self.data.seq_length,
        )

        model = self.model
        if model.num_experts not in (None, 1) and not self.training.skip_train:
            # A published model may be like this, but in training its routers would not change.
            is_first = model.is_router_scored_first
            instead = "--moe-router-no-norm-topk" if is_first else "--moe-router-pre-softmax"
            expect(
                model.moe_router_topk > 1 or (is_first and not model.is_router_normalized),
                "--moe-router-topk",
                f"at least 2, or {instead} as well, since the one expert's weight is always 1 "
                "otherwise",
                model.moe_router_topk,
            )

    def _check_context(self) -> None:
        """ConfigError unless ranks can divide the sequences, and the heads of what mixes their
        positions.
        """
        size, length = self.parallel.context_parallel_size, self.data.seq_length
        expected = f"a multiple of --context-parallel-size {size}"
        tensor_size = self.parallel.tensor_model_parallel_size
        if tensor_size > 1:
            expected += f" x --tensor-model-parallel-size {tensor_size}"
        expect(length % (size * tensor_size) == 0, "--seq-length", expected, length)
        mixers = [layer.mixer for layer in model_spec(self.model).layers]
        check_heads(mixers, size, self.parallel.cp_comm_type, tensor_size)

    def _check_tensor(self, world_size: int) -> None:
        """ConfigError unless ranks can divide the channels of all layers. Heads are checked with
        sequences, and the rows of the embedding where they are known: see `padded_vocab_size`.
        """
        size, model = self.parallel.tensor_model_parallel_size, self.model
        if size == 1:
            return
        flag = "--tensor-model-parallel-size"
        instances = self.parallel.num_distributed_optimizer_instances
        expected = f"a divisor of {counted(world_size // instances, 'rank')} of each instance"
        expect(world_size // instances % size == 0, flag, expected, size)

        has_experts, channels = model.expert_layers(), dict[str, int]()
        if not all(has_experts):
            channels["--ffn-hidden-size"] = model.ffn_size
        if any(has_experts) and model.moe_shared_expert_intermediate_size is not None:
            shared = "--moe-shared-expert-intermediate-size"
            channels[shared] = model.moe_shared_expert_intermediate_size
        for name, number in channels.items():
            expect(number % size == 0, flag, f"a divisor of {name} {number}", size)

        optimizer = self.optimizer.optimizer
        expect(optimizer != "muon", "--optimizer", f"another than muon with {flag}", optimizer)
        compiles = self.execution.compile_layers
        expect(not compiles, "--compile-layers", f"layers of one rank, without {flag}", compiles)

    def _check_flags_that_need_others(self) -> None:
        expect(
            self.training.skip_train or self.data.split_fractions[0] > 0,
            "--split",
            "a share for training, or --skip-train",
            self.data.split,
        )

        if self.logging.profile_lanes is not None:
            lanes = "--profile-lanes"
            expect(not self.training.skip_train, lanes, "training", "--skip-train")
            places = "--profile-lanes-dir, --events-dir or a --save of the file system"
            expect(self.timelines_dir is not None, lanes, places, None)

        checkpoint = self.checkpoint
        recovers = checkpoint.save is not None and self.recover.recover_mode != "off"
        check_needs([section for _, section in self.sections()], ["load"] if recovers else [])
        if checkpoint.load is None and not recovers:
            for field in given_options(checkpoint):
                flag = field.flag_for(getattr(checkpoint, field.name))
                expected = f"a directory, since {flag} is given with --recover-mode off"
                expect("load" not in field.option.requires, "--load", expected, None)
        if checkpoint.finetune and not recovers:
            for field in given_options(self.schedule):
                if "load" in field.option.requires:
                    raise ConfigError(
                        f"{field.flag}: expected no --finetune, which loads no schedule."
                    )

    def _check_recovery(self) -> None:
        expect(
            self.recover.recover_mode != "on" or self.checkpoint.save is not None,
            "--recover-mode",
            "--save, the directory of checkpoints",
            self.recover.recover_mode,
        )

        if self.recover.keep_host_state:
            self._check_kept_state()

        places = (self.checkpoint.save, self.checkpoint.load, *(self.data.data_path or ()))
        check_paths(self.inject, [place for place in places if place is not None])
        expect(
            self.checkpoint.ckpt_format != TORCH_DCP or not self.inject.is_in_saves,
            "--inject",
            f"disk-full and kill-in-save with --ckpt-format {FSDP_DTENSOR} only",
            self.checkpoint.ckpt_format,
        )

    def _check_kept_state(self) -> None:
        """ConfigError for states that are not in host memory between steps."""
        optimizer, flag = self.optimizer, "--keep-host-state"
        fraction, streamed = optimizer.optimizer_offload_fraction, optimizer.update_on_device
        is_sharded, frozen = bool(self.parallel.use_megatron_fsdp), self.training.freeze
        expect(is_sharded, flag, "--use-megatron-fsdp", self.parallel.engine)
        expect(fraction == 1.0, flag, "--optimizer-offload-fraction 1", fraction)
        expect(streamed == 0, flag, "--optimizer-update-on-device 0", streamed or "auto")
        early = optimizer.optimizer_early_update_gib
        expect(not early, flag, "--optimizer-early-update-gib 0", early)
        expect(not frozen, flag, "no --freeze", frozen)
        name, has_codes = optimizer.optimizer, self.parallel.gathers_codes
        expect(name != "muon", flag, "another --optimizer", name)
        expect(not has_codes, flag, "no --fp8-param-gather or --fp4-param-gather", "the flag")
        expect(not self.training.skip_train, flag, "training", "--skip-train")

    def _check_engine(self, world_size: int) -> None:
        num_instances = self.parallel.num_distributed_optimizer_instances
        expect(
            world_size % num_instances == 0,
            "--num-distributed-optimizer-instances",
            f"a divisor of {counted(world_size, 'rank')}",
            num_instances,
        )
        self._check_experts(world_size // num_instances)
        expect(
            bool(self.parallel.use_megatron_fsdp)
            or not self.optimizer.overlap_optimizer_with_forward,
            "--overlap-optimizer-with-forward",
            "--use-megatron-fsdp, whose layers wait for their own weights",
            self.parallel.engine,
        )
        expect(
            bool(self.parallel.use_megatron_fsdp) or self.optimizer.update_on_device == 0,
            "--optimizer-update-on-device",
            "0 without --use-megatron-fsdp, whose groups have flat buffers",
            self.optimizer.optimizer_update_on_device,
        )
        expect(
            bool(self.parallel.use_megatron_fsdp) or not self.optimizer.early_update_bytes,
            "--optimizer-early-update-gib",
            "0 without --use-megatron-fsdp, whose groups have flat buffers",
            self.optimizer.optimizer_early_update_gib,
        )
        if not self.parallel.use_megatron_fsdp:
            for flag, dtype in (
                ("--main-grads-dtype", self.parallel.main_grads_dtype),
                ("--main-params-dtype", self.optimizer.main_params_dtype),
            ):
                expect(dtype == "fp32", flag, f"fp32 with {self.parallel.engine}", dtype)
        if self.parallel.is_sharded:
            return
        if world_size > 1:
            raise ConfigError(f"--no-use-megatron-fsdp: expected one process, got {world_size}.")

        dtype = self.training.compute_dtype
        if dtype != "fp32":
            raise ConfigError(
                f"--{dtype}: expected --use-megatron-fsdp, which keeps the main weights in fp32, "
                "got none."
            )

    def _check_experts(self, num_ranks: int) -> None:
        """ConfigError unless the ranks of an instance can divide themselves, and the experts."""
        size, num_experts = self.parallel.expert_model_parallel_size, self.model.num_experts
        instances = self.parallel.num_distributed_optimizer_instances
        where = "" if instances == 1 else f" of each of {instances} instances"
        if num_experts is None:
            return  # a size without experts is rejected by name, on any number of ranks
        expect(
            num_ranks % size == 0,
            "--expert-model-parallel-size",
            f"a divisor of {counted(num_ranks, 'rank')}{where}",
            size,
        )
        expect(
            num_experts % size == 0,
            "--expert-model-parallel-size",
            f"a divisor of --num-experts {num_experts}",
            size,
        )

    def _check_fp16(self) -> None:
        if not self.training.fp16:
            return

        # Our optimizers divide by the loss scale as they read gradients. For others they are
        # divided in place, where fp16 would underflow again.
        dtype = self.parallel.main_grads_dtype
        expect(
            self.optimizer.has_rule or dtype != "fp16",
            "--main-grads-dtype",
            "fp32 with --fp16 and another --gpu-optimizer than native",
            dtype,
        )

    def _check_low_precision(self) -> None:
        self.engine()  # rejects what does not go together
        kept, num_layers = sum(self.low_precision.num_bf16_layers), self.model.num_layers
        expect(
            kept < num_layers,
            "--first-last-layers-bf16",
            f"fewer layers than --num-layers {num_layers} at the start and at the end",
            kept,
        )


def iterations_of(text: str) -> range:
    """The iterations that `--profile-lanes` names. ConfigError for anything else."""
    found = _SLICE.fullmatch(text)
    first, stop = (int(number) for number in found.groups()) if found else (0, 0)
    if not 1 <= first < stop <= first + _MOST_ITERATIONS:
        raise ConfigError(
            "--profile-lanes: expected FIRST:STOP, as 20:23 for the iterations 20, 21 and 22, "
            f"from 1 and at most {_MOST_ITERATIONS} of them, got {text[:40]!r}."
        )
    return range(first, stop)


@functools.cache
def all_options() -> dict[str, Field]:
    """Every option of a run by its name, of models with all optional parts."""
    return {
        field.name: field
        for config_class in section_classes().values()
        for field in options_of(config_class)
    }


def section_classes() -> dict[str, type[Any]]:
    """The config class of each section of `RunConfig`, by the section's name."""
    hints = typing.get_type_hints(RunConfig)
    found = {}
    for field in dataclasses.fields(RunConfig):
        given = [one for one in typing.get_args(hints[field.name]) if one is not type(None)]
        found[field.name] = given[0] if given else hints[field.name]
    return found
