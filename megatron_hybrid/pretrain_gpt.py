"""Trains a GPT. Run it alone or under torchrun; `--help` lists the flags, README.md shows the two
commands.

    python -m megatron_hybrid launch --nproc-per-node 2 pretrain_gpt.py \\
        --config examples/gpt_cpu.yaml
    python -m megatron_hybrid launch --nproc-per-node 2 -m megatron_hybrid pretrain \\
        --config run.yaml
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from collections.abc import Callable, Sequence

import torch
from torch import nn

from megatron.core import log
from megatron.core.datasets.builder import build_answer_datasets, build_gpt_datasets, without_prefix
from megatron.core.datasets.sample_dataset import SplitDatasets
from megatron.core.log import printable
from megatron.core.models.gpt.flops import num_floating_point_operations
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.options import ConfigError
from megatron.core.transformer.documents import Documents
from megatron.core.transformer.layer_specs import model_spec
from megatron.core.transformer.spec import ModelSpec
from megatron.training.arguments import parse_command_line
from megatron.training.config import RunConfig
from megatron.training.health.exits import (
    ExitCode,
    ExitError,
    code_of,
    is_foreseen,
    process_status,
)
from megatron.training.launch import Launch
from megatron.training.model_loss import ModelLoss, loss_of, mean_of, mean_of_all, weight_of
from megatron.training.pretrain import Outcome, pretrain
from megatron.training.step import Batch, ForwardStep
from megatron.training.tokenizer import Tokenizer, build_tokenizer, padded_vocab_size, say_prefix

_SECONDS_TO_SAY_IT = 10.0
_MOST_CHARACTERS = 4000  # of an error's line


def forward_step_of(spec: ModelSpec, *, is_per_token: bool = False) -> ForwardStep:
    """Returns the forward step of models with this spec: the mean cross entropy over a microbatch's
    tokens in the loss mask, and the losses of routers.

    Args:
        is_per_token: whether microbatches are weighted by their number of such tokens.
    """
    has_routers = bool(spec.mixtures)

    def forward_step(model: nn.Module, batch: Batch) -> torch.Tensor | ModelLoss:
        labels, mask = batch["labels"], batch.get("loss_mask")
        output = model(
            batch["tokens"],
            labels,
            positions=batch.get("positions"),
            documents=Documents(batch["lengths"], batch.get("padding", ()))
            if "lengths" in batch
            else None,
            loss_weights=mean_of_all(labels) if mask is None else mean_of(mask),
            with_routing=has_routers,
        )
        weight = None if mask is None else weight_of(mask, is_per_token=is_per_token)
        return loss_of(spec, output, weight)

    return forward_step


def run(argv: Sequence[str]) -> Outcome:
    """Parses the command line and trains. Raises ConfigError before building the model."""
    launch = Launch.from_environment()
    parsed = parse_command_line(argv, launch.world_size)
    config = parsed.config
    if config.vision is not None:
        raise ConfigError(
            "--vision-num-layers: expected a text model, got one with a vision tower, which "
            "pretrain_vlm.py trains."
        )
    logger = log.configure(launch.rank, short_time=config.logging.is_short)
    parsed.log_without_effect()

    tokenizer = build_tokenizer(config.tokenizer, rows_of=config.checkpoint.hf_model)
    tensor_size = config.parallel.tensor_model_parallel_size
    vocab_size = padded_vocab_size(config.tokenizer, tokenizer, tensor_size)
    _log_prefix(config, tokenizer, logger)

    def model_provider(config: RunConfig) -> nn.Module:
        return GPTModel(config.model, vocab_size)

    def datasets_provider(config: RunConfig, num_samples: tuple[int, int, int]) -> SplitDatasets:
        build = build_answer_datasets if config.data.sft else build_gpt_datasets
        return build(
            config.data, num_samples, tokenizer.vocab_size, config.training.seed, tokenizer.eod
        )

    spec = model_spec(config.model)
    return pretrain(
        config,
        model_provider=model_provider,
        datasets_provider=datasets_provider,
        forward_step=forward_step_of(spec, is_per_token=config.training.calculate_per_token_loss),
        flops_per_sequence=num_floating_point_operations(spec, vocab_size, config.data.seq_length),
    )


def _log_prefix(config: RunConfig, tokenizer: Tokenizer, logger: logging.Logger) -> None:
    """Logs the prefix of texts, and warns about data without it."""
    sentence = say_prefix(tokenizer)
    if sentence is None or config.data.mock_data:
        return
    if lacking := without_prefix(config.data, tokenizer.prefix):
        logger.warning(
            "%s, but the documents of %s do not; preprocess them again to add it",
            sentence,
            ", ".join(lacking),
        )
    else:
        logger.info("%s", sentence)


def main(argv: Sequence[str] | None = None, program: str = "pretrain_gpt.py") -> int:
    """Trains. Returns the exit status; docs/recovery.md lists them."""
    return run_to_its_end(run, sys.argv[1:] if argv is None else argv, program)


def run_to_its_end(
    run: Callable[[Sequence[str]], Outcome], argv: Sequence[str], program: str
) -> int:
    """Runs a training program. Prints errors, and returns the exit status."""
    try:
        launch = Launch.from_environment()
        outcome = run(argv)
    except Exception as error:
        code = code_of(error)
        if not is_foreseen(error):
            traceback.print_exc()
        elif not (isinstance(error, ExitError) and error.is_reported):
            _say(program, error, code)
        return int(code)
    return process_status(outcome.code, launch.is_elastic)


def _say(program: str, error: Exception, code: ExitCode) -> None:
    """Prints an error in one line, or a line for each bad setting, on the first rank."""
    if code is not ExitCode.BAD_CONFIGURATION:
        text = printable(str(error), _MOST_CHARACTERS)  # it may quote a file
        print(f"{program}: rank {os.environ.get('RANK', '0')}: {text}", file=sys.stderr)
        return

    # Usually all ranks have this error, and the first one prints it. The launcher ends all ranks of
    # a machine as soon as one exits, so the others wait for that. If they survive, only this
    # machine or this rank has the error.
    local_rank = os.environ.get("LOCAL_RANK", "0")
    is_first_machine = os.environ.get("RANK", local_rank) == local_rank
    if patience := _SECONDS_TO_SAY_IT * ((local_rank != "0") + (not is_first_machine)):
        time.sleep(patience)

    if isinstance(error, ConfigError):
        text = error.report()
    else:
        text = printable(str(error), _MOST_CHARACTERS)
    print(f"{program}: {text}", file=sys.stderr)
