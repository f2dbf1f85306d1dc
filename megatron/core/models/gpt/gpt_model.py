"""GPTModel: tokens to logits, or to the loss of every token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megatron.core.models.gpt.output_layer import Output, OutputLayer, Targets, project
from megatron.core.transformer.config import TransformerConfig
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer import TransformerLayer
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.linear_cross_entropy import HeadOptions
from megatron.core.transformer.norms import build_norm
from megatron.core.transformer.rotary import RotaryAngles, rotary_angles
from megatron.core.transformer.router import RouterReport
from megatron.core.transformer.sequence_slice import SequenceSlice
from megatron.core.transformer.spec import GatedDeltaNetSpec, Mixer, ModelSpec, RotarySpec
from megatron.core.transformer.tensor_exchange import TensorExchange, own_rows


class WordEmbeddings(nn.Embedding):
    """`nn.Embedding` whose initial weights are normal(0, init_std).

    Attributes:
        tensor: how ranks that divide the vocabulary exchange positions; None: this rank has all
            tokens. Tensor parallelism sets it.
    """

    tensor: TensorExchange | None = None
    tensor_dims: ClassVar[Mapping[str, int]] = {"weight": 0}

    def __init__(self, vocab_size: int, hidden_size: int, init_std: float) -> None:
        # Before nn.Embedding's constructor, which calls reset_parameters.
        self.init_std = init_std
        super().__init__(vocab_size, hidden_size)

    def reset_parameters(self) -> None:
        """Draws the initial weights from the default generator of their device."""
        nn.init.normal_(self.weight, mean=0.0, std=self.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, hidden]; with an exchange [batch, seq / ranks,
        hidden].
        """
        if self.tensor is None:
            return super().forward(tokens)
        numbers, is_own = own_rows(tokens, len(self.weight), self.tensor)
        # One rank has the row and the others add zeros, so sums are exact.
        rows = super().forward(numbers).masked_fill(~is_own.unsqueeze(-1), 0)
        return self.tensor.scatter(rows)


class LanguageModelEmbedding(nn.Module):
    """Word embeddings, scaled, with dropout. Positions enter in the layers."""

    def __init__(self, spec: ModelSpec, vocab_size: int) -> None:
        super().__init__()
        self.scale = spec.embedding_scale
        self.dropout = spec.dropout
        self.word_embeddings = WordEmbeddings(vocab_size, spec.hidden_size, spec.init_std)

    def forward(self, tokens: Tensor) -> Tensor:
        """[batch, seq] int64 -> [batch, seq, hidden], of the positions of this rank."""
        hidden = self.word_embeddings(tokens)
        if self.scale != 1.0:
            hidden = hidden * _rounded(self.scale, hidden.dtype)
        return F.dropout(hidden, self.dropout, self.training)


@cache
def _rounded(scale: float, dtype: torch.dtype) -> float:
    """`scale` as `dtype` has it, which is how the models that have a scale were trained.

    A number, not a tensor: an accelerator would wait for the copy of the tensor in each forward.
    """
    return torch.tensor(scale, dtype=dtype, device="cpu").item()


@dataclass(frozen=True, eq=False)
class Places:
    """Positions of the tokens of a batch.

    Attributes:
        positions: [batch, seq] int64, or [axes, batch, seq] with `sections`; [seq]: of every row;
            None: counted in each row.
        sections: how many planes of the rotation turn by each axis: see `rotary_angles`.
        documents: documents, of which tokens see only their own; None: each row is one.
    """

    positions: Tensor | None = None
    sections: tuple[int, ...] | None = None
    documents: Documents | None = None

    def check(self, batch: int, seq_length: int) -> None:
        """ValueError unless they are the places of `batch` rows of `seq_length` tokens."""
        axes = () if self.sections is None else (len(self.sections),)
        shape = (*axes, batch, seq_length)
        if self.positions is not None and self.positions.shape != shape:
            raise ValueError(
                f"Expected positions of shape {shape}, got {tuple(self.positions.shape)}."
            )
        if self.documents is not None:
            self.documents.check(batch, seq_length)

    def cut(self, part: SequenceSlice, tokens: Tensor) -> Places:
        """The places of the part of tokens [batch, seq] that a rank computes. Documents still
        describe whole rows.
        """
        counted = self.counted(tokens) if self.positions is None else self
        assert counted.positions is not None, "they have just been counted"
        return replace(self, positions=part.cut(counted.positions))

    def counted(self, tokens: Tensor) -> Places:
        """With positions that are counted in each row of tokens [batch, seq]."""
        return replace(self, positions=torch.arange(tokens.shape[1], device=tokens.device))

    def angles(self, spec: RotarySpec, hidden: Tensor) -> RotaryAngles:
        """The angles by which layers turn the heads of [batch, seq, hidden]."""
        if self.positions is None:
            return rotary_angles(spec, torch.arange(hidden.shape[1], device=hidden.device))
        return rotary_angles(spec, self.positions, self.sections)


IN_ROWS = Places()


class RoutingReport(NamedTuple):
    """What all routers of a model report about one microbatch.

    Attributes:
        balance_loss, z_loss: sums over the layers with experts, times their coefficients; scalars,
            fp32, differentiable. Add them to the loss to train with them.
        load: tokens that chose each expert: [layers with experts, experts] int64.
    """

    balance_loss: Tensor
    z_loss: Tensor
    load: Tensor

    @classmethod
    def of(cls, reports: Sequence[RouterReport]) -> RoutingReport | None:
        """From the reports of the layers, first to last; None without any."""
        if not reports:
            return None
        balance, z, loads = zip(*reports, strict=True)
        return cls(torch.stack(balance).sum(), torch.stack(z).sum(), torch.stack(loads))

    def over(self, tensor: TensorExchange) -> RoutingReport:
        """With the losses' means over ranks that have different positions and one loss."""
        losses = torch.stack((self.balance_loss, self.z_loss)) / tensor.num_ranks
        balance_loss, z_loss = tensor.total(losses)
        return RoutingReport(balance_loss, z_loss, self.load)


class TransformerBlock(nn.Module):
    """The stack of layers and the normalization after them."""

    def __init__(self, spec: ModelSpec, recompute_granularity: str | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            TransformerLayer(
                layer,
                spec.hidden_size,
                init_std=spec.init_std,
                output_init_std=spec.output_init_std,
                recompute_granularity=recompute_granularity,
            )
            for layer in spec.layers
        )
        self._rotaries = [_rotary_of(layer.mixer) for layer in spec.layers]
        self.final_layernorm = build_norm(spec.final_norm, spec.hidden_size)

    def forward(
        self, hidden: Tensor, places: Places = IN_ROWS, additions: Sequence[Tensor] = ()
    ) -> tuple[Tensor, RoutingReport | None]:
        """Runs the layers.

        Args:
            hidden: [batch, seq, hidden].
            additions: tensors added behind the first layer, the second, and so on; of the shape of
                `hidden`, at most as many as there are layers.

        Returns:
            [batch, seq, hidden], and the reports of routers, if any.
        """
        # Layers that turn their heads alike share the angles.
        angles = {
            rotary: places.angles(rotary, hidden)
            for rotary in dict.fromkeys(self._rotaries)
            if rotary is not None
        }
        reports: list[RouterReport] = []
        for number, (layer, rotary) in enumerate(zip(self.layers, self._rotaries, strict=True)):
            output = layer(hidden, None if rotary is None else angles[rotary], places.documents)
            if isinstance(output, tuple):
                hidden, report = output
                reports.append(report)
            else:
                hidden = output
            if number < len(additions):
                hidden = hidden + additions[number]
        return self.final_layernorm(hidden), RoutingReport.of(reports)


def _rotary_of(mixer: Mixer) -> RotarySpec | None:
    return None if isinstance(mixer, GatedDeltaNetSpec) else mixer.rotary


class GPTModel(nn.Module):
    """A decoder-only language model.

    With tied embeddings (the default) the output projection reads the embedding's weight: one
    parameter under one name, `embedding.word_embeddings.weight`.

    Args:
        config: what `spec`, the description of its layers, is derived from.
        vocab_size: rows of the embedding and of the output projection, padding included.

    Attributes:
        sequence_slice: the part of each sequence that this rank computes; None: all of it.
        tensor: how ranks that compute the same part, and divide the layers and the vocabulary,
            exchange the losses of routers and the statistics of logits; None: this rank has whole
            layers.
    """

    sequence_slice: SequenceSlice | None = None
    tensor: TensorExchange | None = None

    def __init__(self, config: TransformerConfig, vocab_size: int) -> None:
        super().__init__()
        if vocab_size < 1:
            raise ValueError(f"Expected a vocabulary of at least one token, got {vocab_size}.")

        self.config = config
        self.spec = spec = model_spec(config)
        self.vocab_size = vocab_size
        self.embedding = LanguageModelEmbedding(spec, vocab_size)
        self.decoder = TransformerBlock(spec, config.recompute_granularity)
        self._head = HeadOptions(spec.logit_softcap, spec.z_loss_coeff)
        self.output_layer = (
            None
            if spec.is_tied
            else OutputLayer(spec.hidden_size, vocab_size, self._head, init_std=spec.init_std)
        )

    def forward(
        self,
        tokens: Tensor,
        labels: Tensor | None = None,
        *,
        positions: Tensor | None = None,
        documents: Documents | None = None,
        loss_weights: Tensor | None = None,
        with_routing: bool = False,
    ) -> Output | tuple[Output, RoutingReport | None]:
        """The model's logits, or its losses against `labels`.

        Args:
            tokens: [batch, seq] int64.
            labels: [batch, seq] int64, the token that follows each.
            positions: [batch, seq] int64; None: counted from the beginning of each row.
            documents: the documents in the rows, if tokens are to see their own only.
            loss_weights: [batch, seq] fp32, how much the loss of each token counts in their sum.
            with_routing: whether to return the reports of routers, too.

        Returns:
            Without labels logits [batch, seq, vocab] in the compute dtype. With labels losses
            [batch, seq] fp32; with `loss_weights`, too, a `WeightedLoss`, whose gradient takes one
            matrix product less. With `with_routing` a pair: one of these, and the report, None in a
            model without experts.

            With a `sequence_slice`, all of them are of this rank's part. With `tensor`, logits are
            of this rank's part of the vocabulary, and losses, but not loads, the same on every
            rank. The weighted loss is
            multiplied by the number of parts, so that its mean over the ranks is the sum over whole
            sequences, as FSDP's mean of the ranks' gradients expects.

        Raises:
            ValueError: tokens are not [batch, seq], labels, weights or positions have another
                shape, there are weights without labels, documents do not fill the rows, or the
                sequence is longer than max_position_embeddings.
        """
        places = Places(positions, documents=documents)
        targets = self.checked_targets(tokens, labels, loss_weights, places)
        (tokens,), targets, places = self.cut((tokens,), targets, places)
        return self.decode(self.embedding(tokens), targets, places, with_routing=with_routing)

    def cut(
        self, inputs: Sequence[Tensor], targets: Targets | None, places: Places
    ) -> tuple[Sequence[Tensor], Targets | None, Places]:
        """The part of the inputs, [batch, seq] each, that this rank computes."""
        part = self.sequence_slice
        if part is None:
            # The layers do not see how many positions there are.
            is_counted = self.tensor is not None and places.positions is None
            return inputs, targets, places.counted(inputs[0]) if is_counted else places
        if targets is not None:
            weights = targets.weights
            targets = Targets(
                part.cut(targets.labels), None if weights is None else part.cut(weights) * part.size
            )
        return [part.cut(tensor) for tensor in inputs], targets, places.cut(part, inputs[0])

    def decode(
        self,
        hidden: Tensor,
        targets: Targets | None,
        places: Places,
        additions: Sequence[Tensor] = (),
        *,
        with_routing: bool,
    ) -> Output | tuple[Output, RoutingReport | None]:
        """What `forward` returns, from embeddings [batch, seq, hidden]. See `TransformerBlock` for
        the additions.
        """
        hidden, report = self.decoder(hidden, places, additions)
        if report is not None and self.tensor is not None:
            report = report.over(self.tensor)
        output: Output
        if self.output_layer is None:
            weight = self.embedding.word_embeddings.weight
            output = project(hidden, weight, self._head, targets, self.tensor)
        else:
            output = self.output_layer(hidden, targets, self.tensor)
        return (output, report) if with_routing else output

    def checked_targets(
        self, tokens: Tensor, labels: Tensor | None, loss_weights: Tensor | None, places: Places
    ) -> Targets | None:
        """The targets, if any. ValueError for inputs that `forward` does not take."""
        if tokens.dim() != 2 or tokens.dtype != torch.int64:
            raise ValueError(
                f"Expected int64 tokens [batch, seq], got {tokens.dtype} {tuple(tokens.shape)}."
            )

        longest = self.spec.max_length
        if longest is not None and tokens.shape[1] > longest:
            raise ValueError(
                f"Expected at most --max-position-embeddings {longest} tokens, got "
                f"{tokens.shape[1]}."
            )

        places.check(*tokens.shape)
        if labels is None:
            if loss_weights is not None:
                raise ValueError("Expected labels with loss weights, got none.")
            return None
        targets = Targets(labels, loss_weights)
        targets.check(tokens)
        return targets
