"""Rows of the table of Megatron-LM's flags (megatron_flags.py): those seldom met in scripts.

Rows with values stand before those without: the first row that covers a flag answers it.
"""

from __future__ import annotations

from megatron.training.flag_rows import MegatronFlags, no_effect, remove, replace

OTHER_FLAGS: tuple[MegatronFlags, ...] = (
    # Parallelism.
    no_effect(
        "--num-layers-per-virtual-pipeline-stage --num-virtual-stages-per-pipeline-rank "
        "--microbatch-group-size-per-virtual-pipeline-stage --pipeline-model-parallel-layout "
        "--decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers "
        "--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split "
        "--overlap-p2p-communication-warmup-flush --overlap-param-gather-with-optimizer-step "
        "--defer-embedding-wgrad-compute --wgrad-deferral-limit --delay-wgrad-compute "
        "--delta-offload-bytes-across-pp-ranks",
        "These act among pipeline stages, and there is one.",
    ),
    no_effect(
        "--cp-comm-type --hierarchical-context-parallel-sizes --max-seqlen-per-dp-cp-rank",
        "These act among context-parallel ranks, and there is one.",
    ),
    no_effect(
        "--no-clone-scatter-output-in-embedding --disable-clone-scatter-output-in-embedding "
        "--symmetric-ar-type",
        "These act among tensor-parallel ranks, and there is one.",
    ),
    no_effect("--model-parallel-size", "All ranks are data-parallel.", "1"),
    remove(
        "--model-parallel-size --tensor-parallel-num-weight-shards --gtp-remat-* --gtp-expert-*",
        "Tensor parallelism is not offered; FSDP shards.",
    ),
    # Engine and kernels.
    no_effect("--DDP-impl", "The engine is that of --use-megatron-fsdp.", "local", "torch"),
    no_effect(
        "--ddp-reduce-scatter-with-fp32-accumulation "
        "--ddp-param-name-patterns-for-fp32-local-accumulation --no-use-layer-wise-param-layout "
        "--lazy-mpu-init --high-priority-a2a-comm-stream --ep-overlap-early-attn-memory-release "
        "--train-sync-interval",
        "They choose how weights and gradients move, and when.",
    ),
    no_effect(
        "--disable-jit-fuser --fused-residual-rmsnorm --use-fused-weighted-squared-relu "
        "--use-grouped-gemm-for-dense-mlp --use-te-activation-func "
        "--use-transformer-engine-op-fuser --use-kitchen-attention --kitchen-attention-backend",
        "They choose kernels; PyTorch's and the project's own are used.",
    ),
    no_effect(
        "--reuse-grad-buf-for-mxfp8-param-ag --disable-fp8-wgrad",
        "It is for fp8, which is not offered.",
    ),
    remove(
        "--disable-bf16-reduced-precision-matmul --fp16-lm-cross-entropy --output-logit-dtype "
        "--deterministic-mode --batch-invariant-*",
        "No switch chooses such arithmetic: PyTorch's defaults hold, and the loss is fp32.",
    ),
    remove(
        "--enable-full-sharding-in-hsdp",
        "--outer-dp-sharding-strategy says what is sharded between groups.",
    ),
    remove("--fake-process-group", "A run has all of its ranks."),
    # Model.
    remove(
        "--enable-mhc-connections --mhc-* --embedding-init-method-std --freeze-all-layers "
        "--relative-attention-*",
        "This variant of the model is not offered.",
    ),
    remove(
        "--disable-dsa-* --no-dsa-* --disable-mamba-* --img-h --img-w --patch-dim --num-channels "
        "--num-classes --swin-backbone-type --mask-* --iter-per-epoch --classes-fraction "
        "--data-per-class-fraction",
        "The model is a GPT of attention and gated delta nets; pretrain_vlm.py gives it a tower "
        "for images (--vision-num-layers).",
    ),
    remove(
        "--biencoder-* --block-data-path --embedding-path --evidence-data-path "
        "--titles-data-path --indexer-* --retriever-* --query-in-block-prob --use-one-sent-docs "
        "--short-seq-prob --output-bert-embeddings --sample-rate --head-lr-mult",
        "It is for BERT and retrieval, which are not offered.",
    ),
    # Inference, reinforcement learning, distillation, other programs.
    remove(
        "--decode-only-* --enable-chunked-prefill --flash-decode --max-tokens-to-oom "
        "--mlp-chunks-for-prefill --mlp-chunks-for-training --nccl-all-reduce-for-prefill "
        "--no-inference-* --num-speculative-tokens --refit-method --use-legacy-static-engine "
        "--onnx-safe",
        "It is for inference; python -m megatron_hybrid generate samples from a checkpoint.",
    ),
    remove(
        "--langrl-* --no-rl-* --use-same-sampling-seed-across-dp-ranks",
        "This program pretrains, and trains on conversations (--sft).",
    ),
    remove("--logits-*", "Distillation is not offered."),
    remove(
        "--export-* --modelopt-enabled --finetune-hf-dataset --enable-gpt-oss",
        "It is for ModelOpt, which is not offered.",
    ),
    # Memory.
    replace(
        "--checkpoint-activations --activations-checkpoint-method",
        "--recompute-granularity full",
        "Layers are recomputed whole.",
    ),
    # Batches and schedule.
    replace("--warmup", "--lr-warmup-fraction FRACTION", "It was a percentage of all iterations."),
    replace(
        "--override-opt_param-scheduler",
        "--override-opt-param-scheduler",
        "It is the same setting.",
    ),
    replace(
        "--use-checkpoint-opt_param-scheduler",
        "--use-checkpoint-opt-param-scheduler",
        "It is the same setting.",
    ),
    remove("--phase-transition-iterations --iterations-to-skip", "Every iteration trains."),
    # Data and tokenizer.
    remove("--no-data-sharding", "Every rank reads its own samples."),
    remove(
        "--chat-template --tokenizer-special-tokens --tokenizer-metadata --tokenizer-hf-* "
        "--tokenizer-sentencepiece-* --disable-tokenizer-sentencepiece-* "
        "--no-tokenizer-sentencepiece-* --null-tokenizer-* --allow-ambiguous-pad-tokens",
        "--tokenizer-model is a tokenizer.json, which says these things itself; "
        "preprocess_data.py has --chat-template.",
    ),
    no_effect("--trust-remote-code", "Code that lies in a model's folder is never run."),
    no_effect("--use-gigatoken", "It chooses how text is tokenized, not into what."),
    remove(
        "--object-storage-cache-path --enable-msc",
        "Data lie in files; checkpoints may lie in a store that fsspec knows.",
    ),
    no_effect("--disable-msc", "Multi-Storage Client is not used."),
    # Checkpoints.
    no_effect(
        "--disable-ckpt-load-validate-sharding-integrity "
        "--no-ckpt-load-validate-sharding-integrity --ckpt-drop-redundant-extra-state "
        "--ckpt-pg-tensors-cache-* --dist-ckpt-format --dist-ckpt-save-pre-mcore-014 "
        "--disable-use-tokenizer-model-from-checkpoint-args",
        "They are for checkpoints of Megatron-LM's; here every file has a digest.",
    ),
    no_effect(
        "--load-main-params-from-ckpt", "Main weights are in the checkpoint, and always loaded."
    ),
    remove(
        "--disable-strict-fsdp-dtensor-load --no-strict-fsdp-dtensor-load",
        "--dist-ckpt-strictness and --load-skip-keys say what becomes of keys that do not fit.",
    ),
    remove(
        "--override-ckpt-iteration --dump-param-to-param-group-map --replication "
        "--replication-factor --replication-jump",
        "Checkpoints have one form; `python -m megatron_hybrid checkpoint` lists and converts "
        "them.",
    ),
    # Recovery and reports.
    no_effect(
        "--disable-flight-recorder-* --no-flight-recorder-* "
        "--disable-log-loss-scale-to-tensorboard "
        "--flight-recorder-include-stack-trace --flight-recorder-trace-buffer-size "
        "--disable-straggler-on-startup --straggler-* --config-logger-dir",
        "Reports have one form, and do not change what is computed.",
    ),
    remove(
        "--otel-* --flight-recorder-dump-path --run-workload-inspector-server "
        "--result-rejected-tracker-filename --save-activations-interval --save-dgrads-interval "
        "--save-params-interval --save-tokens-per-expert-interval --save-wgrads-interval",
        "No such report is written; --metrics-jsonl and the event log are.",
    ),
    remove(
        "--check-weight-hash-across-dp-replicas-interval --gpu-sniff-test-interval --test-mode",
        "No such check is made while it trains.",
    ),
    remove("--fault-injector-*", "--inject breaks a run on purpose, to see how it recovers."),
    replace(
        "--exit-signal-handler-for-training",
        "--exit-signal-handler",
        "It is the same setting.",
    ),
    no_effect(
        "--exit-signal-handler-for-dataloader", "Workers that read data end with their rank."
    ),
    replace(
        "--distributed-timeout-seconds-after-init",
        "--distributed-timeout-minutes MINUTES",
        "One timeout holds from the start.",
    ),
)
