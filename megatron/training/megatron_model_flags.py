"""Rows of the table of Megatron-LM's flags (megatron_flags.py): parallelism, engine, model.

Rows with values stand before those without: the first row that covers a flag answers it.
"""

from __future__ import annotations

from megatron.training.flag_rows import MegatronFlags, no_effect, remove, replace

MODEL_FLAGS: tuple[MegatronFlags, ...] = (
    # Parallelism.
    no_effect(
        "--tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size "
        "--expert-tensor-parallel-size",
        "All ranks are data-parallel.",
        "1",
    ),
    remove("--tensor-model-parallel-size", "Tensor parallelism is not offered; FSDP shards."),
    remove("--pipeline-model-parallel-size", "Pipeline parallelism is not offered; FSDP shards."),
    remove("--context-parallel-size", "Context parallelism is not offered."),
    no_effect(
        "--sequence-parallel --tp-comm-* --no-tp-comm-* --disable-tp-comm-*",
        "These act among tensor-parallel ranks, and there is one.",
    ),
    no_effect(
        "--no-overlap-p2p-communication --use-ring-exchange-p2p --pipeline-model-parallel-comm-"
        "backend",
        "These act among pipeline stages, and there is one.",
    ),
    # Engine.
    no_effect(
        "--use-distributed-optimizer",
        "--data-parallel-sharding-strategy says whether optimizer states are sharded.",
    ),
    no_effect(
        "--overlap-grad-reduce --overlap-param-gather --ddp-bucket-size --ddp-num-buckets "
        "--ddp-pad-buckets-for-high-nccl-busbw --ddp-average-in-collective --no-align-grad-reduce "
        "--disable-align-grad-reduce --no-align-param-gather --no-gradient-reduce-div-fusion "
        "--suggested-communication-unit-size",
        "Weights and gradients always move beside the computation, a layer at a time.",
    ),
    no_effect(
        "--use-nccl-ub --disable-symmetric-registration --fsdp-double-buffer "
        "--fsdp-manual-registration --fsdp-db-use-persist-buf-on-alloc-fail "
        "--megatron-fsdp-max-pool-double-buffer --megatron-fsdp-enable-fine-grained-param-gather "
        "--megatron-fsdp-version --create-all-gather-group",
        "They choose how Megatron-FSDP holds and moves its buffers, not what is computed.",
    ),
    no_effect(
        "--init-model-with-meta-device --use-cpu-initialization",
        "Initial weights are made layer by layer, and do not depend on device or ranks.",
    ),
    no_effect("--megatron-fsdp-main-params-dtype", "Main weights are fp32 by default.", "fp32"),
    replace(
        "--megatron-fsdp-main-params-dtype", "--main-params-dtype {value}", "It is one setting."
    ),
    replace("--megatron-fsdp-main-grads-dtype", "--main-grads-dtype {value}", "It is one setting."),
    replace(
        "--grad-reduce-in-bf16",
        "--megatron-fsdp-grad-comm-dtype bf16",
        "This flag has the dtype of reductions.",
    ),
    no_effect(
        "--accumulate-allreduce-grads-in-fp32",
        "Gradients are added in fp32 unless --main-grads-dtype says otherwise.",
    ),
    no_effect(
        "--distributed-backend --local-rank --use-tp-pp-dp-mapping --disable-gloo-process-groups "
        "--nccl-communicator-config-path --high-priority-stream-groups --use-sharp "
        "--sharp-enabled-group",
        "Process groups follow from the device and the launcher.",
    ),
    # Model and kernels.
    no_effect("--use-mcore-models --enable-experimental", "There is one kind of model."),
    no_effect(
        "--transformer-impl --attention-backend --use-flash-attn --flash-attention-version "
        "--attention-softmax-in-fp32 --no-gradient-accumulation-fusion "
        "--no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion "
        "--no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm "
        "--cross-entropy-loss-fusion --cross-entropy-fusion-impl --*-graph --*-graph-*",
        "They choose kernels; PyTorch's and the project's own are used.",
    ),
    no_effect("--te-rng-tracker --inference-rng-tracker", "Dropout has PyTorch's generator."),
    no_effect("--rope-type", "It is --position-embedding-type's rope.", "rope"),
    replace("--rope-type", "--position-embedding-type yarn", "It is one setting.", "yarn"),
    replace(
        "--use-rotary-position-embeddings", "--position-embedding-type rope", "It is one setting."
    ),
    no_effect(
        "--no-position-embedding",
        "It turns off learned absolute positions, which are not offered, and is for rope there.",
    ),
    replace(
        "--position-embedding-type",
        "--position-embedding-type rope",
        "--mrope-section of pretrain_vlm.py divides the rotation among the axes of images.",
        "mrope",
    ),
    remove(
        "--position-embedding-type",
        "Other positions than rope, yarn and none are not offered; rope is the default.",
        *("learned_absolute", "relative"),
    ),
    remove("--mrope-*", "A token of text has one position; pretrain_vlm.py has --mrope-section."),
    replace("--squared-relu", "--activation-func squared_relu", "It is one setting."),
    replace("--openai-gelu", "--activation-func gelu_tanh", "It is the same formula."),
    replace(
        "--quick-geglu",
        "--gated-linear-unit --activation-func quick_gelu",
        "A gate and its activation are two settings.",
    ),
    remove(
        "--apply-residual-connection-post-layernorm --fp32-residual-connection "
        "--apply-query-key-layer-scaling --init-method-xavier-uniform --no-initialization "
        "--data-parallel-random-init --qk-clip* --qk-l2-norm --use-mup --mup-* --spec",
        "This variant of the model is not offered.",
    ),
    remove(
        "--fp8-* --no-fp8-* --fp4-* --first-last-layers-bf16 --num-layers-at-start-in-bf16 "
        "--num-layers-at-end-in-bf16 --te-precision-config-file --keep-fp8-transpose-cache",
        "Compute in fp8 or fp4 is not offered; --bf16 is.",
    ),
    # Mixtures of experts.
    no_effect(
        "--moe-grouped-gemm --moe-permute-fusion --moe-router-fusion --moe-shared-expert-overlap "
        "--moe-single-grouped-* --moe-use-grouped-tensor --use-grouped-gemm-for-shared-expert "
        "--moe-pad-expert-input-to-capacity --moe-paged-stash --moe-paged-stash-*",
        "Tokens are sorted by expert once and computed without padding, by the fastest kernel.",
    ),
    no_effect(
        "--moe-token-dispatcher-type --moe-enable-deepep --moe-deepep-num-sms "
        "--moe-flex-dispatcher-* --moe-hybridep-* --moe-permute-fusion-into-hybridep "
        "--moe-ncclep-zero-copy --overlap-moe-expert-parallel-comm "
        "--overlap-dispatch-backward-with-experts-wgrad",
        "Tokens travel in one way, by all-to-all.",
    ),
    no_effect(
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype",
        "Tokens travel in the compute dtype.",
        "bf16",
    ),
    no_effect(
        "--moe-router-padding-for-*",
        "It is for fp8 and fp4, which are not offered: nothing is padded.",
    ),
    remove(
        "--moe-router-load-balancing-type",
        "aux_loss balances experts over a microbatch, seq_aux_loss over a sequence.",
        *("sinkhorn", "global_aux_loss"),
    ),
    replace(
        "--moe-layer-recompute", "--recompute-granularity full", "Layers are recomputed whole."
    ),
    remove(
        "--moe-apply-probs-on-input --moe-input-jitter-eps --moe-latent-size "
        "--moe-expert-rank-capacity-factor --moe-router-force-* --moe-router-quantile-* "
        "--moe-mlp-glu-interleave-size --moe-shared-expert-glu-interleave-size "
        "--moe-dispatch-fwd-dtype --moe-combine-bwd-dtype --moe-use-upcycling "
        "--moe-upcycling-granularity --moe-enable-routing-replay --moe-routing-trace-*",
        "This variant of a mixture of experts is not offered.",
    ),
    remove("--expert-tensor-parallel-*", "Tensor parallelism is not offered; FSDP shards."),
    no_effect("--rotary-scaling-factor", "Positions are not stretched.", "1.0", "1"),
    replace(
        "--rotary-scaling-factor",
        "--position-embedding-type yarn --yarn-rotary-scaling-factor {value} "
        "--yarn-original-max-position-embeddings 4096",
        "Latent attention has the YaRN of other attention.",
    ),
    no_effect("--mla-down-proj-fusion", "It chooses kernels; the projections are the same."),
    remove("--cache-mla-latents", "It is for inference."),
    remove("--mtp-*", "Multi-token prediction is not offered."),
    replace(
        "--experimental-attention-variant",
        "--linear-attention-freq N",
        "It says which layers have gated delta nets, and turns them on.",
        *("gdn", "gated_delta_net"),
        unless="linear_attention_freq",
    ),
    no_effect(
        "--experimental-attention-variant",
        "--linear-attention-freq says where gated delta nets are.",
        *("gdn", "gated_delta_net"),
    ),
    remove(
        "--mamba-* --hybrid-* --is-hybrid-model --gdp-* --dsa-* "
        "--experimental-attention-variant --heterogeneous-* --vision-pretraining* "
        "--vision-backbone-type --retro-* --bert-* "
        "--ict-* --dino-* --encoder-num-layers --decoder-num-layers --decoder-seq-length",
        "The model is a GPT of attention and gated delta nets; pretrain_vlm.py gives it a tower "
        "for images (--vision-num-layers).",
    ),
    remove(
        "--rl-* --grpo-* --perform-rl-step --inference-*",
        "This program pretrains, and trains on conversations (--sft).",
    ),
    remove(
        "--sft-tokenizer-*",
        "preprocess_data.py --chat has the tokenizer's own template, or --chat-template.",
    ),
)
