"""Rows of the table of Megatron-LM's flags (megatron_flags.py): memory, data, checkpoints.

Rows with values stand before those without: the first row that covers a flag answers it.
"""

from __future__ import annotations

from megatron.training.flag_rows import MegatronFlags, no_effect, remove, replace

RUN_FLAGS: tuple[MegatronFlags, ...] = (
    # Memory.
    replace(
        "--recompute-activations", "--recompute-granularity selective", "It is the same setting."
    ),
    no_effect("--recompute-method", "Each layer is recomputed by itself.", "uniform"),
    no_effect("--recompute-num-layers", "Each layer is recomputed by itself.", "1"),
    no_effect("--recompute-modules", "It is what selective recomputation means.", "core_attn"),
    remove(
        "--recompute-method --recompute-num-layers --recompute-modules "
        "--distribute-saved-activations",
        "--recompute-granularity recomputes every layer, whole or the attention core alone.",
    ),
    no_effect("--cpu-offloading-num-layers", "Activations stay on the device.", "0"),
    remove(
        "--cpu-offloading-* --fine-grained-* --offload-modules --min-offloaded-tensor-size "
        "--activation-offload-fraction",
        "--activation-offload keeps the activations of all layers but the last two in host memory.",
    ),
    no_effect(
        "--use-torch-optimizer-for-cpu-offload",
        "The host's Adam gives the bits of torch's fused AdamW, except at the end of odd lengths.",
    ),
    no_effect(
        "--manual-gc --manual-gc-interval --no-manual-gc-eval --disable-manual-gc-eval "
        "--empty-unused-memory-level",
        "They say when memory is collected, not what is computed.",
    ),
    # Batches, schedule and optimizer.
    replace(
        "--train-samples",
        "--train-iters {iterations}",
        "Runs count iterations of --global-batch-size samples.",
    ),
    replace(
        "--lr-decay-samples",
        "--lr-decay-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    replace(
        "--lr-warmup-samples",
        "--lr-warmup-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    replace(
        "--lr-wsd-decay-samples",
        "--lr-wsd-decay-iters {iterations}",
        "Schedules count iterations of --global-batch-size samples.",
    ),
    replace("--batch-size", "--micro-batch-size {value}", "It is the same setting."),
    replace("--encoder-seq-length", "--seq-length {value}", "It is the same setting."),
    remove(
        "--rampup-batch-size --step-batch-size-schedule --decrease-batch-size-if-needed",
        "Batches have one size, --global-batch-size.",
    ),
    remove(
        "--decoupled-lr --decoupled-min-lr", "All weights have one learning rate, that of --lr."
    ),
    no_effect("--weight-decay-incr-style", "Weight decay is constant.", "constant"),
    remove(
        "--weight-decay-incr-style --start-weight-decay --end-weight-decay "
        "--apply-wd-to-qk-layernorm --no-weight-decay-cond-type",
        "Weight decay is constant, and matrices alone have it.",
    ),
    remove("--muon-* --lion-*", "The optimizers are adam and sgd."),
    remove(
        "--eval-global-batch-size --eval-micro-batch-size --full-validation "
        "--multiple-validation-sets --validation-set-names --start-eval-at-iter",
        "An evaluation has --eval-iters batches of the training's size.",
    ),
    # Data and tokenizer.
    no_effect(
        "--no-create-attention-mask-in-dataloader",
        "Attention computes its mask itself.",
        unless="reset_attention_mask",
    ),
    remove(
        "--no-create-attention-mask-in-dataloader",
        "--reset-attention-mask keeps documents apart, for which Megatron-LM needs the mask that "
        "this flag leaves out.",
    ),
    no_effect(
        "--no-mmap-bin-files "
        "--dataloader-fast-cache-load --dataloader-defer-npy-index-mmap "
        "--num-dataset-builder-threads --mid-level-dataset-surplus",
        "They say how samples are read, not which.",
    ),
    no_effect("--dataloader-type", "Samples come in one order, shuffled in advance.", "single"),
    remove("--dataloader-type", "Samples come in one order, shuffled in advance."),
    replace(
        "--dataloader-inter-document-masking",
        "--reset-attention-mask",
        "Documents that share a sample do not see each other then.",
        unless="sft",
    ),
    no_effect(
        "--dataloader-inter-document-masking", "Conversations of --sft never see each other."
    ),
    remove(
        "--train-data-path --valid-data-path --test-data-path --data-args-path "
        "--per-split-data-args-path --per-dataset-sequences-path",
        "Give --data-path, one dataset or a blend, and --split.",
    ),
    remove("--fim-*", "Filling in the middle is not offered."),
    no_effect(
        "--tiktoken-pattern --tiktoken-num-special-tokens",
        "They are for Megatron-LM's TikTokenizer.",
    ),
    replace(
        "--tokenizer-type",
        "--tokenizer-type HuggingFaceTokenizer",
        "Give --tokenizer-model its tokenizer.json.",
        *("GPT2BPETokenizer", "SentencePieceTokenizer", "GPTSentencePieceTokenizer"),
        *("Llama2Tokenizer", "TikTokenizer"),
    ),
    replace(
        "--vocab-file",
        "--tokenizer-model FILE",
        "FILE is the tokenizer.json of the same vocabulary.",
    ),
    remove("--merge-file", "The tokenizer.json of --tokenizer-model has the merges."),
    remove(
        "--padded-vocab-size --vocab-extra-ids --no-pad-vocab-size --disable-pad-vocab-size",
        "--vocab-size and --make-vocab-size-divisible-by say how many rows the embedding has.",
    ),
    # Checkpoints.
    replace(
        "--ckpt-format",
        "--ckpt-format fsdp_dtensor",
        "It is the project's own; Megatron-LM's torch and torch_dist are neither written nor read.",
        *("torch", "torch_dist"),
        unless="use_torch_fsdp2",
    ),
    replace(
        "--ckpt-format",
        "--ckpt-format torch_dcp",
        "Megatron-LM's torch and torch_dist are neither written nor read.",
        *("torch", "torch_dist"),
    ),
    no_effect(
        "--use-dist-ckpt --auto-detect-ckpt-format --ckpt-fully-parallel-* "
        "--no-ckpt-fully-parallel-save --ckpt-assume-constant-structure "
        "--use-persistent-ckpt-worker --async-strategy --async-ckpt-* --dist-ckpt-workers "
        "--dist-ckpt-optim-fully-reshardable --distrib-optim-fully-reshardable-mem-efficient "
        "--verify-integrity --no-save-tokenizer-assets --disable-save-tokenizer-assets "
        "--no-use-tokenizer-model-from-checkpoint-args",
        "Every rank writes its part, with digests, and any number of ranks loads it.",
    ),
    replace("--persistent-save-interval", "--save-interval {value}", "It is the same setting."),
    replace("--pretrained-checkpoint", "--load {value} --finetune", "It is the same setting."),
    remove("--no-save-rng", "Random states are always saved; --no-load-rng does not load them."),
    remove(
        "--use-checkpoint-args --use-mp-args-from-checkpoint-args",
        "Give the model's flags: a checkpoint that they do not fit is refused.",
    ),
    remove(
        "--non-persistent-*",
        "--save-interval-seconds, --async-save and --save-keep-last take their place.",
    ),
    remove("--ckpt-convert-*", "`python -m tools.checkpoint convert` converts checkpoints."),
    # Recovery and reports.
    no_effect(
        "--no-check-for-nan-in-loss-and-grad",
        "A step whose loss is not finite is skipped, unless --check-for-nan-in-loss ends the run.",
    ),
    replace(
        "--check-for-nan-in-loss-and-grad", "--check-for-nan-in-loss", "It is the same setting."
    ),
    no_effect("--rerun-mode", "Steps are not run again.", "disabled"),
    remove(
        "--rerun-mode --check-for-spiky-loss --check-for-large-grads --error-injection-*",
        "Steps are not run again; --check-for-nan-in-loss ends a run whose loss is not finite.",
    ),
    no_effect(
        "--exit-signal",
        "It is among those of --exit-signal-handler.",
        *("SIGTERM", "SIGUSR1", "SIGINT"),
    ),
    remove("--exit-signal", "--exit-signal-handler heeds SIGTERM, SIGUSR1 and SIGINT."),
    remove(
        "--adlr-autoresume* --enable-ft-package --calc-ft-timeouts --ft-* --inprocess-*",
        "The watchdog (--hang-timeout-seconds) and torchrun's --max-restarts bring a run back.",
    ),
    no_effect(
        "--log-throughput --log-progress --log-params-norm --log-timers-to-tensorboard "
        "--log-memory-* --log-validation-ppl-to-tensorboard --log-world-size-to-tensorboard "
        "--no-log-loss-scale-to-tensorboard --log-device-memory-used --log-energy "
        "--log-max-attention-logit --log-straggler --logging-level --timing-log-option "
        "--tensorboard-log-interval --tensorboard-queue-size --no-barrier-with-level-1-timing "
        "--no-one-logger --one-logger-* --app-tag-run-*",
        "Reports have one form, with throughput and memory, and do not change what is computed.",
    ),
    remove("--wandb-entity", "Set WANDB_ENTITY in the environment."),
    remove(
        "--profile --profile-ranks --profile-step-* --use-pytorch-profiler --pytorch-profiler-* "
        "--nvtx-ranges --record-memory-history --record-shapes --memory-snapshot-path",
        "--profile-lanes 10:12 records lanes and phases; for kernels, run the command under a "
        "profiler.",
    ),
    remove("--yaml-cfg", "--config FILE takes these flags' names as keys."),
)
