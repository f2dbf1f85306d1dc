"""Flags of Megatron-LM's that this program lacks: which of them change nothing here, and what to do
about the others.

Megatron-LM's launch scripts name many flags for what is always so here (a distributed optimizer),
for kernels, or for dimensions of parallelism of size 1. `Ruling.NO_EFFECT` accepts them: the run
computes the same with them as without. A flag that asks for more is refused, with what to do. So is
a value of a flag that both programs have, where only Megatron-LM has the value.

The names are those of `megatron/training/arguments.py` and its config classes in
NVIDIA/Megatron-LM, commit d98e8a64 (0.20.0); a few are of earlier releases. docs/coming-from.md
shows this table.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.core.log import printable
from megatron.training.flag_rows import SHOWN, Given, MegatronFlags, Ruling

_MOST_DIGITS = 20  # of a number of samples
# Words of `MegatronFlags.use` that the user fills in: a path, a number.
_BLANKS = frozenset(("FILE", "N"))


@dataclass(frozen=True)
class Answer:
    """What becomes of a flag as it was given.

    Attributes:
        use: what to write instead, in words of a command line; empty: nothing.
    """

    given: Given
    ruling: Ruling
    why: str
    use: tuple[str, ...] = ()

    @property
    def is_complete(self) -> bool:
        """Whether `use` can be written as it stands: no word is left for the user to fill in."""
        return not _BLANKS.intersection(self.use)

    def __str__(self) -> str:
        written = printable(shlex.join(self.use), SHOWN)
        action = f"use {written} instead" if self.use else "remove it"
        return f"{self.given}: {action}. {self.why}"


def answer(given: Given, settings: Mapping[str, Any], samples_per_iteration: int) -> Answer | None:
    """The answer to a flag of Megatron-LM's; None if the table has none.

    Args:
        settings: the run's own, by field name.
        samples_per_iteration: the global batch size; 0: it is not known.
    """
    for row in MEGATRON_FLAGS:
        if row.covers(given, settings):
            iterations = _iterations(given.values, samples_per_iteration)
            value = " ".join(given.values)
            use = (word.format(value=value, iterations=iterations) for word in row.use.split())
            return Answer(given, row.ruling, row.why, tuple(use))
    return None


def _iterations(values: tuple[str, ...], samples_per_iteration: int) -> str:
    """A number of samples in iterations. Megatron-LM drops what is left over, too."""
    text = "".join(values)
    is_number = text.isascii() and text.isdigit() and len(text) < _MOST_DIGITS
    if not is_number or samples_per_iteration == 0:
        return "N"
    # No warm-up stays none, but nothing else becomes zero iterations.
    return str(max(int(text) // samples_per_iteration, min(int(text), 1)))


def _no_effect(names: str, why: str, *values: str, unless: str | None = None) -> MegatronFlags:
    return MegatronFlags(tuple(names.split()), Ruling.NO_EFFECT, why, values, unless=unless)


def _remove(names: str, why: str, *values: str) -> MegatronFlags:
    return MegatronFlags(tuple(names.split()), Ruling.REMOVE, why, values)


def _replace(
    names: str, use: str, why: str, *values: str, unless: str | None = None
) -> MegatronFlags:
    return MegatronFlags(tuple(names.split()), Ruling.REPLACE, why, values, use, unless)


# The first row that covers a flag answers it: rows with values stand before those without.
MEGATRON_FLAGS: tuple[MegatronFlags, ...] = (
    # Parallelism.
    _no_effect(
        "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
        "--expert-tensor-parallel-size",
        "All ranks are data-parallel.",
        "1",
    ),
    _remove("--tensor-model-parallel-size", "Tensor parallelism is not offered; FSDP shards."),
    _remove("--pipeline-model-parallel-size", "Pipeline parallelism is not offered; FSDP shards."),
    _remove("--context-parallel-size", "Context parallelism is not offered."),
    _no_effect(
        "--sequence-parallel --tp-comm-* --no-tp-comm-* --disable-tp-comm-*",
        "These act among tensor-parallel ranks, and there is one.",
    ),
    _no_effect(
        "--no-overlap-p2p-communication --use-ring-exchange-p2p --pipeline-model-parallel-comm-"
        "backend",
        "These act among pipeline stages, and there is one.",
    ),
    # Engine.
    _no_effect(
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy says whether optimizer states are sharded.",
    ),
    _no_effect(
        "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size --ddp-num-buckets "
        "--ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --no-align-grad-reduce "
        "--disable-align-grad-reduce --no-align-param-gather --no-gradient-reduce-div-fusion "
        "--suggested-communication-unit-size",
        "Weights and gradients always move beside the computation, a layer at a time.",
    ),
    _no_effect(
        "--use-nccl-ub --disable-symmetric-registration --fsdp-double-buffer "
        "--fsdp-manual-registration --fsdp-db-use-persist-buf-on-alloc-fail "
        "--megatron-fsdp-max-pool-double-buffer --megatron-fsdp-enable-fine-grained-param-gather "
        "--megatron-fsdp-version --create-all-gather-group",
        "They choose how Megatron-FSDP holds and moves its buffers, not what is computed.",
    ),
    _no_effect(
        "--init-model-with-meta-device --use-cpu-initialization",
        "Initial weights are made layer by layer, and do not depend on device or ranks.",
    ),
    _no_effect("--megatron-fsdp-main-params-dtype", "Main weights are fp32 by default.", "fp32"),
    _replace(
        "--megatron-fsdp-main-params-dtype", "--main-params-dtype {value}", "It is one setting."
    ),
    _replace(
        "--grad-reduce-in-bf16",
        "--megatron-fsdp-grad-comm-dtype bf16",
        "This flag has the dtype of reductions.",
    ),
    _no_effect(
        "--accumulate-allreduce-grads-in-fp32",
        "Gradients are added in fp32 unless a flag or offloading says otherwise.",
        unless="optimizer_cpu_offload",
    ),
    _replace(
        "--accumulate-allreduce-grads-in-fp32",
        "--megatron-fsdp-main-grads-dtype fp32",
        "With --optimizer-cpu-offload gradients have the compute dtype otherwise.",
    ),
    _no_effect(
        "--distributed-backend --local-rank --use-tp-pp-dp-mapping --disable-gloo-process-groups "
        "--nccl-communicator-config-path --high-priority-stream-groups --use-sharp "
        "--sharp-enabled-group",
        "Process groups follow from the device and the launcher.",
    ),
    # Model and kernels.
    _no_effect("--use-mcore-models --enable-experimental", "There is one kind of model."),
    _no_effect(
        "--transformer-impl --attention-backend --use-flash-attn --flash-attention-version "
        "--attention-softmax-in-fp32 --no-gradient-accumulation-fusion "
        "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --*-graph --*-graph-*",
        "They choose kernels; PyTorch's and the project's own are used.",
    ),
    _no_effect(
        "--calculate-per-token-loss",
        "No token is masked, so the mean over tokens is the mean over microbatches.",
    ),
    _no_effect("--te-rng-tracker --inference-rng-tracker", "Dropout has PyTorch's generator."),
    _no_effect("--rope-type", "It is --position-embedding-type's rope.", "rope"),
    _replace("--rope-type", "--position-embedding-type yarn", "It is one setting.", "yarn"),
    _replace(
        "--use-rotary-position-embeddings", "--position-embedding-type rope", "It is one setting."
    ),
    _no_effect(
        "--no-position-embedding",
        "It turns off learned absolute positions, which are not offered, and is for rope there.",
    ),
    _remove(
        "--position-embedding-type",
        "Other positions than rope, yarn and none are not offered; rope is the default.",
        *("learned_absolute", "mrope", "relative"),
    ),
    _remove("--mrope-*", "A token has one position."),
    _replace("--squared-relu", "--activation-func squared_relu", "It is one setting."),
    _replace("--openai-gelu", "--activation-func gelu_tanh", "It is the same formula."),
    _replace(
        "--quick-geglu",
        "--gated-linear-unit --activation-func quick_gelu",
        "A gate and its activation are two settings.",
    ),
    _remove(
        "--apply-residual-connection-post-layernorm --fp32-residual-connection "
        "--apply-query-key-layer-scaling --init-method-xavier-uniform --no-initialization "
        "--data-parallel-random-init --qk-clip* --qk-l2-norm --use-mup --mup-* --spec",
        "This variant of the model is not offered.",
    ),
    _remove(
        "--fp8-* --no-fp8-* --fp4-* --first-last-layers-bf16 --num-layers-at-start-in-bf16 "
        "--num-layers-at-end-in-bf16 --te-precision-config-file --keep-fp8-transpose-cache",
        "Compute in fp8 or fp4 is not offered; --bf16 is.",
    ),
    # Mixtures of experts.
    _no_effect(
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap "
        "--moe-single-grouped-* --moe-use-grouped-tensor --use-grouped-gemm-for-shared-expert "
        "--moe-pad-expert-input-to-capacity --moe-paged-stash --moe-paged-stash-*",
        "Tokens are sorted by expert once and computed without padding, by the fastest kernel.",
    ),
    _no_effect(
        "--moe-token-dispatcher-type --moe-enable-deepep --moe-deepep-num-sms "
        "--moe-flex-dispatcher-* --moe-hybridep-* --moe-permute-fusion-into-hybridep "
        "--moe-ncclep-zero-copy --overlap-moe-expert-parallel-comm "
        "--overlap-dispatch-backward-with-experts-wgrad",
        "Tokens travel in one way, by all-to-all.",
    ),
    _no_effect(
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype",
        "Tokens travel in the compute dtype.",
        "bf16",
    ),
    _no_effect(
        "--moe-router-padding-for-*",
        "It is for fp8 and fp4, which are not offered: nothing is padded.",
    ),
    _remove(
        "--moe-router-load-balancing-type",
        "aux_loss balances experts over a microbatch, seq_aux_loss over a sequence.",
        *("sinkhorn", "global_aux_loss"),
    ),
    _replace(
        "--moe-layer-recompute", "--recompute-granularity full", "Layers are recomputed whole."
    ),
    _remove(
        "--moe-apply-probs-on-input --moe-input-jitter-eps --moe-latent-size "
        "--moe-expert-rank-capacity-factor --moe-router-force-* --moe-router-quantile-* "
        "--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size "
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype --moe-use-upcycling "
        "--moe-upcycling-granularity --moe-enable-routing-replay --moe-routing-trace-*",
        "This variant of a mixture of experts is not offered.",
    ),
    _remove("--expert-tensor-parallel-*", "Tensor parallelism is not offered; FSDP shards."),
    _no_effect("--rotary-scaling-factor", "Positions are not stretched.", "1.0", "1"),
    _replace(
        "--rotary-scaling-factor",
        "--position-embedding-type yarn --yarn-rotary-scaling-factor {value} "
        "--yarn-original-max-position-embeddings 4096",
        "Latent attention has the YaRN of other attention.",
    ),
    _no_effect("--mla-down-proj-fusion", "It chooses kernels; the projections are the same."),
    _remove("--cache-mla-latents", "It is for inference."),
    _remove("--mtp-*", "Multi-token prediction is not offered."),
    _replace(
        "--experimental-attention-variant",
        "--linear-attention-freq N",
        "It says which layers have gated delta nets, and turns them on.",
        *("gdn", "gated_delta_net"),
        unless="linear_attention_freq",
    ),
    _no_effect(
        "--experimental-attention-variant",
        "--linear-attention-freq says where gated delta nets are.",
        *("gdn", "gated_delta_net"),
    ),
    _remove(
        "--mamba-* --hybrid-* --is-hybrid-model --gdp-* --dsa-* "
        "--experimental-attention-variant --heterogeneous-* --vision-pretraining* "
        "--vision-backbone-type --retro-* --bert-* "
        "--ict-* --dino-* --encoder-num-layers --decoder-num-layers --decoder-seq-length",
        "The model is a GPT of attention and gated delta nets; pretrain_vlm.py gives it a tower "
        "for images (--vision-num-layers).",
    ),
    _remove(
        "--rl-* --grpo-* --perform-rl-step --inference-*",
        "This program pretrains, and trains on conversations (--sft).",
    ),
    _remove(
        "--sft-tokenizer-*",
        "preprocess_data.py --chat has the tokenizer's own template, or --chat-template.",
    ),
    # Memory.
    _replace(
        "--recompute-activations", "--recompute-granularity selective", "It is the same setting."
    ),
    _no_effect("--recompute-method", "Each layer is recomputed by itself.", "uniform"),
    _no_effect("--recompute-num-layers", "Each layer is recomputed by itself.", "1"),
    _no_effect("--recompute-modules", "It is what selective recomputation means.", "core_attn"),
    _remove(
        "--recompute-method --recompute-num-layers --recompute-modules "
        "--distribute-saved-activations",
        "--recompute-granularity recomputes every layer, whole or the attention core alone.",
    ),
    _no_effect("--cpu-offloading-num-layers", "Activations stay on the device.", "0"),
    _remove(
        "--cpu-offloading-* --fine-grained-* --offload-modules --min-offloaded-tensor-size "
        "--activation-offload-fraction",
        "--activation-offload keeps the activations of all layers but the last two in host memory.",
    ),
    _no_effect(
        "--use-torch-optimizer-for-cpu-offload",
        "The host's Adam gives the bits of torch's fused AdamW.",
    ),
    _no_effect(
        "--manual-gc --manual-gc-interval --no-manual-gc-eval --disable-manual-gc-eval "
        "--empty-unused-memory-level",
        "They say when memory is collected, not what is computed.",
    ),
    # Batches, schedule and optimizer.
    _replace(
        "--train-samples",
        "--train-iters {iterations}",
        "Runs count iterations of --global-batch-size samples.",
    ),
    _replace(
        "--lr-decay-samples",
        "--lr-decay-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    _replace(
        "--lr-warmup-samples",
        "--lr-warmup-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    _replace(
        "--lr-wsd-decay-samples",
        "--lr-wsd-decay-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    _replace("--batch-size", "--micro-batch-size {value}", "It is the same setting."),
    _replace("--encoder-seq-length", "--seq-length {value}", "It is the same setting."),
    _remove(
        "--rampup-batch-size --step-batch-size-schedule --decrease-batch-size-if-needed",
        "Batches have one size, --global-batch-size.",
    ),
    _remove(
        "--decoupled-lr --decoupled-min-lr", "All weights have one learning rate, that of --lr."
    ),
    _no_effect("--weight-decay-incr-style", "Weight decay is constant.", "constant"),
    _remove(
        "--weight-decay-incr-style --start-weight-decay --end-weight-decay "
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
        "Weight decay is constant, and matrices alone have it.",
    ),
    _remove("--muon-* --lion-*", "The optimizers are adam and sgd."),
    _remove(
        "--eval-global-batch-size --eval-micro-batch-size --full-validation "
        "--multiple-validation-sets --validation-set-names --start-eval-at-iter",
        "An evaluation has --eval-iters batches of the training's size.",
    ),
    # Data and tokenizer.
    _no_effect(
        "--no-create-attention-mask-in-dataloader --no-mmap-bin-files "
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--num-dataset-builder-threads --mid-level-dataset-surplus",
        "They say how samples are read, not which.",
    ),
    _no_effect("--dataloader-type", "Samples come in one order, shuffled in advance.", "single"),
    _remove("--dataloader-type", "Samples come in one order, shuffled in advance."),
    _replace(
        "--dataloader-inter-document-masking",
        "--reset-attention-mask",
        "Documents that share a sample do not see each other then.",
    ),
    _remove(
        "--train-data-path --valid-data-path --test-data-path --data-args-path "
        "--per-split-data-args-path --per-dataset-sequences-path",
        "Give --data-path, one dataset or a blend, and --split.",
    ),
    _remove("--fim-*", "Filling in the middle is not offered."),
    _no_effect(
        "--tiktoken-pattern --tiktoken-num-special-tokens",
        "They are for Megatron-LM's TikTokenizer.",
    ),
    _replace(
        "--tokenizer-type",
        "--tokenizer-type HuggingFaceTokenizer",
        "Give --tokenizer-model its tokenizer.json.",
        *("GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
        *("Llama2Tokenizer", "TikTokenizer"),
    ),
    _replace(
        "--vocab-file",
        "--tokenizer-model FILE",
        "FILE is the tokenizer.json of the same vocabulary.",
    ),
    _remove("--merge-file", "The tokenizer.json of --tokenizer-model has the merges."),
    _remove(
        "--padded-vocab-size --vocab-extra-ids --no-pad-vocab-size --disable-pad-vocab-size",
        "--vocab-size and --make-vocab-size-divisible-by say how many rows the embedding has.",
    ),
    # Checkpoints.
    _replace(
        "--ckpt-format",
        "--ckpt-format fsdp_dtensor",
        "It is the project's own; Megatron-LM's torch and torch_dist are neither written nor read.",
        *("torch", "torch_dist"),
        unless="use_torch_fsdp2",
    ),
    _replace(
        "--ckpt-format",
        "--ckpt-format torch_dcp",
        "Megatron-LM's torch and torch_dist are neither written nor read.",
        *("torch", "torch_dist"),
    ),
    _no_effect(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-* "
        "--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure "
        "--use-persistent-ckpt-worker --async-strategy --async-ckpt-* --dist-ckpt-workers "
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient "
        "--verify-integrity --no-save-tokenizer-assets --disable-save-tokenizer-assets "
        "--no-use-tokenizer-model-from-checkpoint-args",
        "Every rank writes its part, with digests, and any number of ranks loads it.",
    ),
    _replace("--persistent-save-interval", "--save-interval {value}", "It is the same setting."),
    _replace("--pretrained-checkpoint", "--load {value} --finetune", "It is the same setting."),
    _remove("--no-save-rng", "Random states are always saved; --no-load-rng does not load them."),
    _remove(
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args",
        "Give the model's flags: a checkpoint that they do not fit is refused.",
    ),
    _remove(
        "--non-persistent-*",
        "--save-interval-seconds, --async-save and --save-keep-last take their place.",
    ),
    _remove("--ckpt-convert-*", "`python -m tools.checkpoint convert` converts checkpoints."),
    # Recovery and reports.
    _no_effect(
        "--no-check-for-nan-in-loss-and-grad",
        "A step whose loss is not finite is skipped, unless --check-for-nan-in-loss ends the run.",
    ),
    _replace(
        "--check-for-nan-in-loss-and-grad", "--check-for-nan-in-loss", "It is the same setting."
    ),
    _no_effect("--rerun-mode", "Steps are not run again.", "disabled"),
    _remove(
        "--rerun-mode --check-for-spiky-loss --check-for-large-grads --error-injection-*",
        "Steps are not run again; --check-for-nan-in-loss ends a run whose loss is not finite.",
    ),
    _no_effect(
        "--exit-signal",
        "It is among those of --exit-signal-handler.",
        *("SIGTERM", "SIGUSR1", "SIGINT"),
    ),
    _remove("--exit-signal", "--exit-signal-handler heeds SIGTERM, SIGUSR1 and SIGINT."),
    _remove(
        "--adlr-autoresume* --enable-ft-package --calc-ft-timeouts --ft-* --inprocess-*",
        "The watchdog (--hang-timeout-seconds) and torchrun's --max-restarts bring a run back.",
    ),
    _no_effect(
        "--log-throughput --log-progress --log-params-norm --log-timers-to-tensorboard "
        "--log-memory-* --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-device-memory-used --log-energy "
        "--log-max-attention-logit --log-straggler --logging-level --timing-log-option "
        "--tensorboard-log-interval --tensorboard-queue-size --no-barrier-with-level-1-timing "
        "--no-one-logger --one-logger-* --app-tag-run-*",
        "Reports have one form, with throughput and memory, and do not change what is computed.",
    ),
    _remove("--wandb-entity", "Set WANDB_ENTITY in the environment."),
    _remove(
        "--profile --profile-ranks --profile-step-* --use-pytorch-profiler --pytorch-profiler-* "
        "--nvtx-ranges --record-memory-history --record-shapes --memory-snapshot-path",
        "--profile-lanes 10:12 records lanes and phases; for kernels, run the command under a "
        "profiler.",
    ),
    _remove("--yaml-cfg", "--config FILE takes these flags' names as keys."),
)
