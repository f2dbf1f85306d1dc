"""Runs of a model that reads images: resumed, offloaded, frozen, from and to Hugging Face."""

from __future__ import annotations

import contextlib
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pretrain_gpt
import pretrain_vlm
from megatron.core.options import ConfigError
from megatron_hybrid import generate
from megatron_hybrid.checkpoint import command as checkpoint
from megatron_hybrid.picture_reader import PictureReader
from megatron_hybrid.preprocess_multimodal import SampleMaker, preprocess
from tests.functional_tests.helpers.runs import losses_of
from tests.helpers.ranks import run_ranks
from tests.helpers.vlm_runs import (
    OFFLOADED,
    PROCESSING,
    TRAINING,
    are_equal,
    data_flags,
    draw_shapes,
    flags,
    run,
    save_what_is_loaded,
    tensors_of,
)

LAST, SAVED = 5, 3


@pytest.fixture(scope="module")
def shapes(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return draw_shapes(tmp_path_factory.mktemp("shapes"), num_train=40, num_held_out=3)


def train(folder: Path, save: Path, *others: object, world_size: int = 2) -> dict[int, float]:
    """A run that saves; returns its losses."""
    saving = ["--save", save, "--ckpt-format", "fsdp_dtensor"]
    return losses_of(flags(folder, *saving, *others), save, world_size, pretrain_vlm)


@pytest.fixture(scope="module")
def undisturbed(
    shapes: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[int, float]]:
    """A run that saves after each iteration, and its losses."""
    save = tmp_path_factory.mktemp("undisturbed")
    return save, train(shapes, save, *OFFLOADED, "--save-interval", 1)


def test_a_resumed_run_has_the_losses_and_tensors_of_the_undisturbed_one(
    shapes: Path, undisturbed: tuple[Path, dict[int, float]], tmp_path: Path
) -> None:
    root, expected = undisturbed
    assert len(set(expected.values())) == LAST
    load = ["--load", root / f"iter_{SAVED:07d}", "--save-interval", LAST]
    found = train(shapes, tmp_path, *OFFLOADED, *load)
    assert found == {n: expected[n] for n in range(SAVED + 1, LAST + 1)}
    assert are_equal(tensors_of(tmp_path, LAST), tensors_of(root, LAST))
    assert not are_equal(tensors_of(root, LAST - 1), tensors_of(root, LAST))


@pytest.mark.parametrize("world_size", [1, pytest.param(4, marks=pytest.mark.wide)])
def test_a_checkpoint_loads_on_any_number_of_ranks_bit_for_bit(
    shapes: Path, undisturbed: tuple[Path, dict[int, float]], tmp_path: Path, world_size: int
) -> None:
    root, _ = undisturbed
    load = ["--load", root / f"iter_{SAVED:07d}"]
    run_ranks(world_size, save_what_is_loaded, flags(shapes, *OFFLOADED, *load), str(tmp_path))
    loaded, saved = tensors_of(tmp_path, "loaded"), tensors_of(root, SAVED)
    saved = {key: tensor for key, tensor in saved.items() if not key.startswith("rng.")}
    assert sum(key.startswith("optim") for key in saved) > 2 * 40
    assert are_equal({key: loaded[key] for key in saved}, saved)


def test_plain_mlps_are_one_tensor_and_fused_weights_are_sections(
    undisturbed: tuple[Path, dict[int, float]],
) -> None:
    keys = set(tensors_of(undisturbed[0], LAST))
    tower, decoder = "model.vision_model.layers.0.", "model.language_model.decoder.layers."
    assert f"{tower}mlp.linear_fc1.weight" in keys
    assert {f"{tower}self_attention.{part}.bias" for part in ("query", "key", "value")} <= keys
    assert {f"{decoder}0.mlp.gate.weight", f"{decoder}0.mlp.up.weight"} <= keys
    assert {f"{decoder}0.self_attention.{part}.weight" for part in ("z", "alpha", "beta")} <= keys
    assert not any("linear_qkv" in key or "in_proj" in key for key in keys)


def test_unmasked_tokens_have_the_same_weight_at_any_microbatch_size(
    shapes: Path, tmp_path: Path
) -> None:
    lines = tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "red " * 50}]
    lines.write_text("\n".join([json.dumps({"messages": turns})] * 40))
    preprocess([lines], str(tmp_path / "text"), SampleMaker(str(shapes / "tokenizer"), PROCESSING))
    few = ["--train-iters", 2, "--data-path", "1", tmp_path / "text", "1", shapes / "train"]
    whole = [*few, "--micro-batch-size", 4]
    expected = train(shapes, tmp_path / "whole", *whole, world_size=1)
    found = train(shapes, tmp_path / "rows", *few, "--calculate-per-token-loss")
    assert found == pytest.approx(expected, rel=1e-4)
    assert train(shapes, tmp_path / "default", *few)[1] != pytest.approx(expected[1], rel=1e-6)


@pytest.mark.parametrize("frozen", [pytest.param("", marks=pytest.mark.wide, id="all"), "vision"])
def test_offloaded_training_of_a_vlm_is_bit_equal_to_training_on_the_device(
    shapes: Path, undisturbed: tuple[Path, dict[int, float]], tmp_path: Path, frozen: str
) -> None:
    more = ["--lr-multipliers", "vision=0.1", "decoder=2", "--save-interval", LAST - 1]
    if frozen:
        more += ["--freeze", frozen]
    expected = train(shapes, tmp_path / "device", *more)
    assert train(shapes, tmp_path / "host", *more, *OFFLOADED) == expected
    found = tensors_of(tmp_path / "host", LAST)
    assert are_equal(found, tensors_of(tmp_path / "device", LAST))

    root, plain_losses = undisturbed
    assert plain_losses != expected, "what is frozen, and the rates, matter"
    plain = tensors_of(root, LAST)
    of_tower = {key for key in plain if "vision_model" in key and key.startswith("optim")}
    weights = sum(t.nbytes for key, t in plain.items() if key.startswith("model.vision_model."))
    assert sum(plain[key].nbytes for key in of_tower) >= 2 * weights > 0
    assert found.keys() == (plain.keys() - of_tower if frozen else plain.keys())
    if frozen:
        before = tensors_of(tmp_path / "host", LAST - 1)
        for key in (key for key in found if key.startswith("model.")):
            is_same = torch.equal(before[key], found[key])
            assert is_same == key.startswith("model.vision_model."), key


def test_batches_without_images_train_with_others_that_have_some(
    shapes: Path, tmp_path: Path
) -> None:
    text = tmp_path / "text.jsonl"
    turns = [{"role": "user", "content": "what ?"}, {"role": "assistant", "content": "red circle"}]
    text.write_text("\n".join([json.dumps({"messages": turns})] * 60))
    preprocess([text], str(tmp_path / "text"), SampleMaker(str(shapes / "tokenizer"), PROCESSING))
    blend = ["--data-path", "1", tmp_path / "text", "1", shapes / "train"]
    expected = train(shapes, tmp_path / "one", *blend, world_size=1)
    found = train(shapes, tmp_path / "two", *blend)
    assert found == pytest.approx(expected, rel=1e-5)


EXPERTS = (
    "--num-experts 4 --moe-router-topk 2 --moe-ffn-hidden-size 16 "
    "--moe-router-load-balancing-type none"
).split()
DEEPSTACK = ["--vision-deepstack-layers", "0", "1"]


def test_decoders_of_experts_with_deepstack_features_train_alike_on_any_number_of_ranks(
    shapes: Path, tmp_path: Path
) -> None:
    model = [*EXPERTS, *DEEPSTACK]
    parallel = ["--expert-model-parallel-size", "2"]
    expected = train(shapes, tmp_path / "one", *model, world_size=1)
    two, saving = tmp_path / "two", ["--save-interval", 1]
    found = train(shapes, two, *model, *OFFLOADED, *parallel, *saving)
    assert found == pytest.approx(expected, rel=1e-5)
    assert len(set(found.values())) == LAST
    keys = set(tensors_of(two, LAST))
    assert any("deepstack_projections.1." in key for key in keys if key.startswith("optim"))
    assert any("experts" in key for key in keys if key.startswith("optim"))

    load = ["--load", two / f"iter_{SAVED:07d}", *saving]
    resumed = train(shapes, tmp_path / "resumed", *model, *OFFLOADED, *parallel, *load)
    assert resumed == {n: loss for n, loss in found.items() if n > SAVED}
    assert are_equal(tensors_of(tmp_path / "resumed", LAST), tensors_of(two, LAST))


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


def save_theirs(transformers: Any, shapes: Path, folder: Path) -> Any:
    """A tiny model of the library, with its tokenizer and processor files."""
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(shapes / "tokenizer" / "tokenizer.json"), eos_token="<|endoftext|>"
    )
    ids = {
        name: tokenizer.convert_tokens_to_ids(token)
        for name, token in {
            "image_token_id": "<|image_pad|>",
            "video_token_id": "<|video_pad|>",
            "vision_start_token_id": "<|vision_start|>",
            "vision_end_token_id": "<|vision_end|>",
        }.items()
    }
    config = transformers.Qwen3_5Config(
        text_config={
            "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 40,
            "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1,
            "head_dim": 16, "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "max_position_embeddings": 512,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
                "mrope_section": [2, 1, 1], "mrope_interleaved": True,
            },
        },
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 24, "num_heads": 2,
            "patch_size": 4, "out_hidden_size": 32, "num_position_embeddings": 36,
        },
        **ids,
    )  # fmt: skip
    torch.manual_seed(0)
    model = transformers.Qwen3_5ForConditionalGeneration(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    qwen = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl
    processor = qwen.Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, temporal_patch_size=2,
        size={"shortest_edge": PROCESSING.min_pixels, "longest_edge": PROCESSING.max_pixels},
        image_mean=list(PROCESSING.mean), image_std=list(PROCESSING.std),
    )  # fmt: skip
    processor.save_pretrained(folder)
    return model


def test_a_model_directory_is_trained_and_exported_for_transformers(
    transformers: Any, shapes: Path, tmp_path: Path
) -> None:
    folder, runs, out = (tmp_path / name for name in ("theirs", "runs", "out"))
    save_theirs(transformers, shapes, folder)
    argv = [
        *("--hf-model", folder, "--data-path", shapes / "train"),
        *("--save", runs, "--save-interval", LAST, "--save-hf-weights", "bf16"),
        *TRAINING, *OFFLOADED,
    ]  # fmt: skip
    run_ranks(2, run, [str(word) for word in argv])
    assert checkpoint.main(["export", str(runs), str(out), "--dtype", "fp32"]) == 0
    for name in ("preprocessor_config.json", "tokenizer.json", "config.json"):
        assert (out / name).exists(), name

    theirs, report = transformers.AutoModelForImageTextToText.from_pretrained(
        out, output_loading_info=True
    )
    assert not any(report.values())
    ours, tokenizer, _ = generate.load_model(str(runs), None)
    exported, _, _ = generate.load_model(str(out), None)
    picture = shapes / "held_out" / "00000.png"
    asked = PictureReader.of_model(ours, tokenizer, str(runs)).ask("what ?", [picture])
    again = PictureReader.of_model(exported, tokenizer, str(out)).ask("what ?", [picture])
    tokens = torch.tensor([asked.tokens])
    images = asked.model._images
    with torch.no_grad():
        own = asked.model(tokens)
        assert torch.equal(again.model(tokens), own)
        logits = theirs.eval()(
            input_ids=tokens,
            mm_token_type_ids=(tokens == ours.vision.image_token_id).int(),
            pixel_values=images.patches,
            image_grid_thw=torch.tensor([list(grid) for grid in images.grids]),
        ).logits
    torch.testing.assert_close(own, logits, rtol=1e-4, atol=1e-4)
    within = runs / f"iter_{LAST:07d}" / "hf"
    assert not any(
        transformers.AutoModelForImageTextToText.from_pretrained(within, output_loading_info=True)[
            1
        ].values()
    )


def test_generate_continues_a_prompt_about_a_picture(
    shapes: Path, undisturbed: tuple[Path, dict[int, float]], capsys: pytest.CaptureFixture[str]
) -> None:
    picture = str(shapes / "held_out" / "00000.png")
    argv = ["--load", str(undisturbed[0]), "--max-new-tokens", "3", "--temperature", "0"]
    assert generate.main([*argv, "--image", picture, "--prompt", "what is in the picture ?"]) == 0
    assert "00000.png: 'what is in the picture ?'" in capsys.readouterr().out
    assert generate.main([*argv, "--image", str(shapes / "train.jsonl")]) == 2
    assert "train.jsonl: expected a picture" in capsys.readouterr().err
    assert generate.main([*argv, "--image", picture, "--max-new-tokens", "1000"]) == 2
    assert "--max-new-tokens: expected at most 160" in capsys.readouterr().err


def refusal(program: Any, argv: list[str]) -> str:
    """Why a program does not run."""
    with pytest.raises(ConfigError) as caught, contextlib.redirect_stdout(io.StringIO()):
        program(argv)
    return str(caught.value)


REFUSED = {
    "--vision-patch-size 8": "expected 4, as the data has it, got 8",
    "--image-token-id 3": "--image-token-id: expected",
    "--freeze tower": "--freeze: expected parts of the model",
    "--freeze vision projector decoder": "something left to train",
    "--lr-multipliers vision": "--lr-multipliers: expected NAME=FACTOR",
    "--lr-multipliers tower=2": "--lr-multipliers: expected parts of the model",
    "--seq-length 32": "--seq-length: expected at least",
}


def test_settings_that_do_not_fit_are_one_clear_error(shapes: Path) -> None:
    runs = [(pretrain_vlm, flags(shapes, *changed.split())) for changed in REFUSED]
    text = "--num-layers 1 --hidden-size 8 --num-attention-heads 1".split()
    runs.append((pretrain_vlm, [*data_flags(shapes), *TRAINING, *text]))
    runs.append((pretrain_gpt, flags(shapes)))

    def refusals() -> list[str]:
        return [refusal(program.run, argv) for program, argv in runs]

    expected = [*REFUSED.values(), "trained by pretrain_gpt.py", "which pretrain_vlm.py trains"]
    for told, part in zip(run_ranks(1, refusals)[0], expected, strict=True):
        assert part in told
