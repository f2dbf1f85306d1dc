"""GPTModel: names, causality, ties, losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megatron.core.materialize import materialize
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.fused_weight import fused_weights

VOCAB = 40
LLAMA: dict[str, Any] = {
    "swiglu": True,
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "group_query_attention": True,
    "num_query_groups": 2,
    "untie_embeddings_and_output_weights": True,
}


DELTA_NETS: dict[str, Any] = {
    "linear_attention_freq": "2",
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}


def _config(**changes: Any) -> TransformerConfig:
    values: dict[str, Any] = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "ffn_hidden_size": 48,
    }
    return TransformerConfig(
        **{**values, "attention_dropout": 0.0, "hidden_dropout": 0.0, **changes}
    )


def _model(config: TransformerConfig) -> GPTModel:
    with torch.device("meta"):
        model = GPTModel(config, VOCAB)
    materialize(model, "cpu", seed=0)
    return model


def _batch(batch: int = 2, seq_length: int = 12) -> tuple[Tensor, Tensor]:
    text = torch.randint(VOCAB, (batch, seq_length + 1), generator=torch.Generator().manual_seed(0))
    return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def test_parameter_names_of_a_llama_like_model() -> None:
    layer = "decoder.layers.0."
    with torch.device("meta"):
        model = GPTModel(_config(num_layers=1, qk_layernorm=True, **LLAMA), VOCAB)
    assert {name: tuple(parameter.shape) for name, parameter in model.named_parameters()} == {
        "embedding.word_embeddings.weight": (VOCAB, 32),
        layer + "input_layernorm.weight": (32,),
        layer + "self_attention.linear_qkv.weight": (64, 32),
        layer + "self_attention.q_layernorm.weight": (8,),
        layer + "self_attention.k_layernorm.weight": (8,),
        layer + "self_attention.linear_proj.weight": (32, 32),
        layer + "pre_mlp_layernorm.weight": (32,),
        layer + "mlp.linear_fc1.weight": (96, 32),
        layer + "mlp.linear_fc2.weight": (32, 48),
        "decoder.final_layernorm.weight": (32,),
        "output_layer.weight": (VOCAB, 32),
    }
    assert {name: fused.sections for name, fused in fused_weights(model).items()} == {
        layer + "self_attention.linear_qkv.weight": (("query", 32), ("key", 16), ("value", 16)),
        layer + "mlp.linear_fc1.weight": (("gate", 48), ("up", 48)),
    }


def test_tied_gradient_is_the_sum_of_embedding_and_output_gradients() -> None:
    tied, untied = _model(_config()), _model(_config(untie_embeddings_and_output_weights=True))
    untied.load_state_dict(
        {**tied.state_dict(), "output_layer.weight": tied.embedding.word_embeddings.weight}
    )
    for model in (tied, untied):
        model(*_batch()).mean().backward()
    assert untied.output_layer is not None
    both = untied.embedding.word_embeddings.weight.grad + untied.output_layer.weight.grad
    torch.testing.assert_close(tied.embedding.word_embeddings.weight.grad, both)


@pytest.mark.parametrize("changes", [{}, LLAMA, {"position_embedding_type": "none"}])
def test_later_tokens_change_no_earlier_logit(changes: dict[str, Any]) -> None:
    model = _model(_config(init_method_std=0.3, **changes)).eval()
    tokens, _ = _batch(batch=1)
    changed = tokens.clone()
    changed[0, 7] = (changed[0, 7] + 1) % VOCAB
    with torch.no_grad():
        before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] != after[:, 7:]).any(dim=-1).all()


@pytest.mark.parametrize("changes", [{}, LLAMA])
def test_losses_are_the_cross_entropy_of_the_logits(changes: dict[str, Any]) -> None:
    model = _model(_config(**changes))
    tokens, labels = _batch()
    logits, losses = model(tokens), model(tokens, labels)
    assert logits.shape == (2, 12, VOCAB)
    assert losses.shape == (2, 12)
    assert losses.dtype == torch.float32
    expected = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none").view(2, 12)
    torch.testing.assert_close(losses, expected)
    losses.mean().backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    expected.mean().backward()
    for got, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(got, parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    "changes", [{}, {"untie_embeddings_and_output_weights": True}, {"final_logit_softcapping": 0.5}]
)
def test_losses_that_count_differently_have_one_sum_with_the_same_gradients(
    changes: dict[str, Any],
) -> None:
    model = _model(_config(**changes, z_loss_coeff=0.1))
    tokens, labels = _batch()
    weights = torch.rand(2, 12, generator=torch.Generator().manual_seed(0)) / 24
    logits = model(tokens)
    losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="none")
    z_loss = 0.1 * (weights.flatten() * logits.flatten(0, 1).logsumexp(1).square()).sum()
    expected = (losses * weights.flatten()).sum() + z_loss
    expected.backward()
    gradients = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()

    found = model(tokens, labels, loss_weights=weights)
    torch.testing.assert_close(found.loss, expected)
    torch.testing.assert_close(found.z_loss, z_loss)
    found.loss.backward()
    for gradient, parameter in zip(gradients, model.parameters(), strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


def test_outputs_are_no_views() -> None:
    # Sharding wrappers hang their hooks on the output, and an in-place operation on a view would
    # lose them.
    model = _model(_config())
    assert not model(*_batch())._is_view()
    assert not model(_batch()[0])._is_view()


@pytest.mark.parametrize("changes", [DELTA_NETS, {"attn_logit_softcapping": 5.0}])
def test_autocast_trains_a_model_as_fp32_does_but_for_roundings(changes: dict[str, Any]) -> None:
    model = _model(_config(**changes))
    results = []
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            losses = model(*_batch())
            losses.mean().backward()
        results.append([losses.detach(), *(p.grad for p in model.parameters())])
        model.zero_grad()

    exact, narrow = results
    assert not torch.equal(exact[0], narrow[0]), "something was computed in bf16"
    for a, b in zip(narrow, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.05 * b.norm() + 1e-5


def test_inputs_that_do_not_fit_are_rejected() -> None:
    model = _model(_config(max_position_embeddings=12))
    tokens, labels = _batch()
    model(tokens, labels)
    with pytest.raises(
        ValueError, match="Expected at most --max-position-embeddings 12 tokens, got 13"
    ):
        model(F.pad(tokens, (0, 1)))
    with pytest.raises(ValueError, match=r"Expected labels of shape \(2, 12\), got \(2, 11\)"):
        model(tokens, labels[:, 1:])
    weights = torch.ones(2, 11)
    with pytest.raises(ValueError, match=r"Expected loss weights of shape \(2, 12\), got"):
        model(tokens, labels, loss_weights=weights)
    with pytest.raises(ValueError, match="Expected labels with loss weights, got none"):
        model(tokens, loss_weights=weights)
    with pytest.raises(ValueError, match=r"Expected int64 tokens \[batch, seq\]"):
        model(tokens[0])
    with pytest.raises(ValueError, match="at least one token, got 0"):
        GPTModel(_config(), 0)


@pytest.mark.parametrize("name", ["hidden_dropout", "attention_dropout"])
def test_dropout_acts_in_training_only(name: str) -> None:
    model = _model(_config(init_method_std=0.3, **{name: 0.2}))
    tokens, labels = _batch()
    assert not torch.equal(model(tokens, labels), model(tokens, labels))
    model.eval()
    assert torch.equal(model(tokens, labels), model(tokens, labels))
