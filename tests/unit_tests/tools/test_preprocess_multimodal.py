"""`preprocess-multimodal`: from conversations about pictures to training files."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from megatron.core.datasets.image_text_files import ImageTextFiles
from megatron.training.images import ImageProcessing
from megatron_hybrid import preprocess_multimodal
from megatron_hybrid.input_files import Line
from megatron_hybrid.sample_lines import SampleError, try_to_make
from tests.unit_tests.tools.helpers.odd_records import odd_records
from tests.unit_tests.training.helpers.chat_tokenizer import make_tokenizer

ROOT = Path(__file__).resolve().parents[3]


def line(picture: str | None, answer: str = "A cat.") -> str:
    parts: list[dict[str, Any]] = [{"type": "text", "text": "What is this?"}]
    if picture is not None:
        parts.insert(0, {"type": "image", "image": picture})
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    return json.dumps({"messages": turns})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With a tokenizer and three pictures of different sizes."""
    make_tokenizer(tmp_path)
    generator = np.random.default_rng(0)
    for number, (width, height) in enumerate(((16, 8), (8, 24), (40, 40))):
        pixels = generator.integers(0, 256, (height, width, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f"{number}.png")
    return tmp_path


def preprocess(folder: Path, lines: list[str], *flags: object, name: str = "out") -> int:
    (folder / "in.jsonl").write_text("\n".join(lines) + "\n")
    return preprocess_multimodal.main(
        [
            *("--input", str(folder / "in.jsonl"), "--output-prefix", str(folder / name)),
            *("--tokenizer-model", str(folder), "--patch-size", "4", "--min-pixels", "64"),
            *map(str, flags),
        ]
    )


def test_samples_keep_their_order_regardless_of_the_number_of_workers(folder, capsys):
    lines = [line(f"{number % 3}.png", f"Picture {number}.") for number in range(50)]
    lines.insert(7, "")
    lines.insert(9, line(None))
    assert preprocess(folder, lines) == 0
    told = capsys.readouterr().out
    assert "out: 51 samples, 50 images, " in told
    assert ", 0 skipped, in " in told
    assert preprocess(folder, lines, "--workers", 2, name="other") == 0
    for ending in ("_text.bin", "_text.idx", "_images.bin", "_images.idx", ".json"):
        one, other = ((folder / f"{name}{ending}").read_bytes() for name in ("out", "other"))
        assert one == other, ending

    files = ImageTextFiles(folder / "out")
    assert [len(files[number].images) for number in range(7, 11)] == [1, 0, 1, 1]
    expected = ImageProcessing(patch_size=4, min_pixels=64).load(folder / "2.png")
    found = files[2].images[0]
    assert found.grid == expected.grid
    assert np.array_equal(found.pixels, expected.pixels)


PLACES = {"images": ["0.png"], "conversations": [{"from": "human", "value": "hi"}]}
BROKEN = {
    "{": "expected a JSON object, got",
    "[" * 100_000: "more than 32 levels",
    line("none.png"): "none.png",
    line("in.jsonl"): "in.jsonl",
    json.dumps(PLACES): "expected a place <image>",
    line("0.png", "<|image_pad|>"): "<|image_pad|> once for each image",
}


def test_a_bad_line_is_an_error_with_its_place_and_leaves_no_files(folder, capsys):
    for bad, told in BROKEN.items():
        assert preprocess(folder, [line("0.png"), bad]) == 1
        error = capsys.readouterr().err
        assert f"{folder / 'in.jsonl'}, line 2: " in error
        assert told in error
        assert error.count("\n") == 1
        assert not list(folder.glob("out*"))


def test_bad_lines_are_skipped_and_counted_if_that_is_allowed(folder, capsys):
    bad = [*BROKEN, *["{"] * 5]
    lines = [line("0.png"), *bad, line("1.png"), *[line(None)] * (9 * len(bad) - 2)]
    assert preprocess(folder, lines, "--skip-bad-samples") == 0
    told = capsys.readouterr()
    assert f"out: {9 * len(bad)} samples, 2 images, " in told.out
    assert f"{len(BROKEN) + 5} skipped" in told.out
    assert told.err.count("skipped: ") == 11, "ten are printed"
    assert f"skipped: {len(BROKEN) + 5 - 10} more" in told.err
    assert preprocess(folder, [], name="none") == 1
    assert "at least one sample" in capsys.readouterr().err


def test_pictures_are_read_from_paths_and_uris(folder):
    content = base64.b64encode((folder / "0.png").read_bytes()).decode()
    part = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{content}"}}
    turns = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "A cat."}]
    spaced = folder / "a b.png"
    spaced.write_bytes((folder / "0.png").read_bytes())
    lines = [line("0.png"), line(spaced.as_uri()), json.dumps({"messages": turns})]
    assert preprocess(folder, lines) == 0
    files = ImageTextFiles(folder / "out")
    first, *others = (files[number].images[0].pixels for number in range(3))
    assert all(np.array_equal(first, other) for other in others)


@pytest.mark.parametrize(
    ("picture", "told"),
    [
        ("https://example.com/cat.png", "pictures are not downloaded"),
        ("file://host/cat.png", "expected a URI like file:///"),
        ("data:image/png;base64", "expected a URI like data:image/png;base64,"),
        ("data:image/png;base64,#", "expected base64 in a data: URI"),
        ("data:image/png;base64,AAAA", "data:: expected a picture"),
    ],
)
def test_uris_that_name_no_picture_are_rejected(folder, capsys, picture, told):
    assert preprocess(folder, [line(picture)]) == 1
    assert told in capsys.readouterr().err


def test_fields_of_any_type_make_a_sample_or_a_bad_line(folder):
    processing = ImageProcessing(patch_size=4, min_pixels=64)
    maker = preprocess_multimodal.SampleMaker(str(folder), processing)
    turns = [{"from": "human", "value": "<image>a"}, {"from": "gpt", "value": "b"}]
    num_bad = 0
    for record in (json.loads(line("0.png")), {"images": ["0.png"], "conversations": turns}):
        for odd in odd_records(record):
            made = try_to_make(maker, Line("line 7", json.dumps(odd).encode(), folder))
            num_bad += isinstance(made, SampleError)
    assert num_bad > 100


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--workers", "0"], "--workers: expected an integer >= 1"),
        (["--patch-size", "0"], "--patch-size: expected an integer >= 1"),
        (["--max-pixels", "10"], "--max-pixels: expected at least --min-pixels 64"),
        (["--image-mean", "0.5,0.5"], "--image-mean: expected three numbers"),
        (["--processor", "nowhere"], "--processor: expected the config"),
        (["--input", "nowhere.jsonl"], "--input: expected existing files"),
    ],
)
def test_flags_that_do_not_fit_are_one_line(folder, capsys, flags, told):
    assert preprocess(folder, [line("0.png")], *flags) == 1
    assert told in capsys.readouterr().err
