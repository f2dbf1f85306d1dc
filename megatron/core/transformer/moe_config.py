"""MoeOptions: what decides the mixtures of experts of a model, as a part of its options."""

from __future__ import annotations

from dataclasses import dataclass

from megatron.core.options import expect, option
from megatron.core.transformer.spec import Balancing, DropPolicy, Scores

_MOST_EXPERTS = 2**16


@dataclass(frozen=True, kw_only=True)
class MoeOptions:
    """The options of mixtures of experts, under Megatron's names and, where it has them, with its
    defaults. A base of `TransformerConfig`, which checks them.
    """

    num_experts: int | None = option(
        None,
        "experts of each mixture-of-experts layer (default: a dense model)",
        at_least=1,
        ceiling=_MOST_EXPERTS,
    )
    moe_layer_freq: str | None = option(
        None,
        "layers with experts instead of an MLP: N is every N-th layer, starting with the first;"
        " a list such as [0]*3+[1]*24 has 1 for each of them (default: all layers)",
        requires="num_experts",
        noun='a number, or zeros and ones such as "[0]*3+[1]*24"',
        is_pattern=True,
    )
    moe_ffn_hidden_size: int | None = option(
        None,
        "channels inside an expert (default: --ffn-hidden-size)",
        at_least=1,
        ceiling=2**26,
        requires="num_experts",
    )
    moe_router_topk: int = option(
        2, "experts that process each token", at_least=1, requires="num_experts"
    )
    moe_router_score_function: str = option(
        Scores.SOFTMAX.value,
        "function that turns the router's logits into scores",
        choices=tuple(kind.value for kind in Scores),
        requires="num_experts",
    )
    moe_router_pre_softmax: bool = option(
        False,
        "apply the softmax to all experts before the top-k choice, instead of to the chosen "
        "ones after it",
        requires="num_experts",
    )
    moe_router_norm_topk: bool | None = option(
        None,
        "divide the scores of a token's chosen experts by their sum (default: on for sigmoid "
        "scores with --moe-router-topk above 1)",
        off_flag="--moe-router-no-norm-topk",
        requires="num_experts",
    )
    moe_router_topk_scaling_factor: float | None = option(
        None,
        "factor of the scores of a token's chosen experts (default: none)",
        more_than=0.0,
        requires="num_experts",
    )
    moe_router_num_groups: int | None = option(
        None,
        "groups of experts, from some of which each token takes its experts (default: no groups)",
        at_least=1,
        requires="num_experts",
    )
    moe_router_group_topk: int | None = option(
        None,
        "groups that each token takes its experts from, chosen by the largest sums of their "
        "two best scores; must be given with groups",
        at_least=1,
        requires="moe_router_num_groups",
    )
    moe_router_dtype: str | None = option(
        None,
        "dtype in which routers compute (default: the compute dtype)",
        choices=("fp32", "fp64"),
        requires="num_experts",
    )
    moe_router_enable_expert_bias: bool = option(
        False,
        "balance experts without a loss: each expert has a bias, used in the top-k choice only,"
        " that is adjusted after each step",
        requires="num_experts",
    )
    moe_router_bias_update_rate: float = option(
        1e-3,
        "change of an expert's bias in a step",
        at_least=0.0,
        no_effect_unless="moe_router_enable_expert_bias",
    )
    moe_router_load_balancing_type: str = option(
        Balancing.MICROBATCH.value,
        "tokens over which the auxiliary loss balances experts: a rank's microbatch (aux_loss),"
        " each sequence (seq_aux_loss), or none",
        choices=tuple(kind.value for kind in Balancing),
        requires="num_experts",
    )
    moe_aux_loss_coeff: float = option(
        0.0,
        "weight of the auxiliary loss that balances experts",
        at_least=0.0,
        requires="num_experts",
    )
    moe_z_loss_coeff: float | None = option(
        None,
        "weight of the z loss that keeps router logits small (default: no z loss)",
        more_than=0.0,
        requires="num_experts",
    )
    moe_shared_expert_intermediate_size: int | None = option(
        None,
        "channels inside all shared experts together, which process every token (default: no "
        "shared experts)",
        at_least=1,
        ceiling=2**26,
        requires="num_experts",
    )
    moe_shared_expert_gate: bool = option(
        False,
        "multiply the output of shared experts by a sigmoid gate, a learned projection of the "
        "token",
        requires="moe_shared_expert_intermediate_size",
    )
    moe_expert_capacity_factor: float | None = option(
        None,
        "most tokens of a rank's microbatch that an expert takes, as a multiple of an even "
        "share; others are dropped (default: no limit)",
        more_than=0.0,
        requires="num_experts",
    )
    moe_token_drop_policy: str = option(
        DropPolicy.PROBS.value,
        "tokens that a full expert keeps: probs, the ones with the highest scores; position, the "
        "first ones",
        choices=tuple(kind.value for kind in DropPolicy),
        requires="moe_expert_capacity_factor",
    )
    moe_expert_rows: str = option(
        "outputs",
        "how a checkpoint stores an expert's matrices: with a row per output channel (outputs),"
        " or per input channel, gate and up in alternating columns (inputs)",
        choices=("outputs", "inputs"),
        requires="num_experts",
    )

    @property
    def is_router_scored_first(self) -> bool:
        """Whether routers score all experts before the choice, not the chosen ones after it."""
        return self.moe_router_pre_softmax or self.moe_router_score_function == Scores.SIGMOID.value

    @property
    def is_router_normalized(self) -> bool:
        """Whether scores taken before the choice are divided by their sum. Not filled in, so that a
        config may be replaced by one with other scores.
        """
        if not self.is_router_scored_first:
            return False
        if self.moe_router_norm_topk is not None:
            return self.moe_router_norm_topk
        # As in Megatron.
        is_sigmoid = self.moe_router_score_function == Scores.SIGMOID.value
        return is_sigmoid and self.moe_router_topk > 1

    def _check_moe(self) -> None:
        """ConfigError for options of a mixture that contradict each other."""
        num_experts = self.num_experts
        if num_experts is None:
            return

        expect(
            self.moe_router_topk <= num_experts,
            "--moe-router-topk",
            f"at most --num-experts {num_experts}",
            self.moe_router_topk,
        )
        expect(
            self.moe_router_norm_topk is not False or self.is_router_scored_first,
            "--moe-router-no-norm-topk",
            "--moe-router-pre-softmax or sigmoid scores, since a softmax over the chosen experts "
            "adds up to one",
            None,
        )
        expect(
            self.moe_router_load_balancing_type != Balancing.NONE.value
            or not self.moe_aux_loss_coeff,
            "--moe-router-load-balancing-type",
            f"a loss for --moe-aux-loss-coeff {self.moe_aux_loss_coeff}, or a coefficient of 0",
            self.moe_router_load_balancing_type,
        )
        if self.moe_router_num_groups is not None:
            self._check_moe_groups(num_experts, self.moe_router_num_groups)

    def _check_moe_groups(self, num_experts: int, num_groups: int) -> None:
        expect(
            num_experts % num_groups == 0,
            "--moe-router-num-groups",
            f"a divisor of --num-experts {num_experts}",
            num_groups,
        )
        chosen = self.moe_router_group_topk
        expect(
            chosen is not None,
            "--moe-router-num-groups",
            "--moe-router-group-topk as well",
            None,
        )
        assert chosen is not None
        expect(
            chosen <= num_groups,
            "--moe-router-group-topk",
            f"at most --moe-router-num-groups {num_groups}",
            chosen,
        )
        expect(
            self.moe_router_topk <= chosen * (num_experts // num_groups),
            "--moe-router-topk",
            f"at most the {chosen * (num_experts // num_groups)} experts of "
            f"--moe-router-group-topk {chosen} groups",
            self.moe_router_topk,
        )
