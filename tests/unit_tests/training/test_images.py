"""Patches of pictures equal the ones of Qwen's image processors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.core.options import ConfigError
from megatron.training.images import ImageError, ImageProcessing, normalized_patches

PIL = pytest.importorskip("PIL.Image")


def processor(processing: ImageProcessing) -> Any:
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    return qwen.Qwen2VLImageProcessorPil(
        patch_size=processing.patch_size,
        merge_size=processing.merge_size,
        temporal_patch_size=2,
        size={"shortest_edge": processing.min_pixels, "longest_edge": processing.max_pixels},
        image_mean=list(processing.mean),
        image_std=list(processing.std),
    )


def picture(width: int, height: int, mode: str = "RGB") -> Any:
    generator = np.random.default_rng(width + 1000 * height)
    small = generator.integers(0, 256, (5, 7, 3), dtype=np.uint8)
    return PIL.fromarray(small).resize((width, height)).convert(mode)


SMALL = ImageProcessing(4, 2, 16 * 16, 40 * 40, mean=(0.4, 0.5, 0.6), std=(0.2, 0.3, 0.4))


@pytest.mark.parametrize("processing", [SMALL, ImageProcessing(max_pixels=300 * 300)], ids=str)
@pytest.mark.parametrize("size", [(31, 17), (8, 8), (333, 60), (20, 200), (257, 255), (3, 500)])
def test_patches_match_transformers(processing: ImageProcessing, size: tuple[int, int]) -> None:
    image = picture(*size)
    expected = processor(processing)(images=[image], return_tensors="pt")
    found = processing.patches_of(image)
    assert list(found.grid) == expected["image_grid_thw"][0].tolist()
    patches = normalized_patches(torch.from_numpy(found.pixels), processing.mean, processing.std, 2)
    torch.testing.assert_close(patches, expected["pixel_values"], rtol=0, atol=1e-5)


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([(14, 2), (16, 2), (4, 1)]),
    st.sampled_from([(1, 10**6), (56 * 56, 28 * 28 * 1280), (10**6, 2 * 10**6)]),
)  # fmt: skip
def test_pictures_are_resized_as_in_transformers(
    height: int, width: int, patches: tuple[int, int], pixels: tuple[int, int]
) -> None:
    qwen = pytest.importorskip("transformers.models.qwen2_vl.image_processing_pil_qwen2_vl")
    own = ImageProcessing(*patches, *pixels)
    if max(height, width) > 200 * min(height, width):
        with pytest.raises(ImageError, match="200 times as long as wide"):
            own.resized(height, width)
        return
    expected = qwen.smart_resize(height, width, patches[0] * patches[1], *pixels)
    assert own.resized(height, width) == expected


def test_files_of_many_formats_are_read_upright_and_in_rgb(tmp_path: Path) -> None:
    image = picture(24, 16)
    expected = SMALL.patches_of(image)
    for name in ("a.png", "b.bmp", "c.webp"):
        image.save(tmp_path / name, lossless=True)
        assert np.array_equal(SMALL.load(tmp_path / name).pixels, expected.pixels), name

    exif = PIL.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    image.rotate(90, expand=True).save(tmp_path / "turned.png", exif=exif)
    assert np.array_equal(SMALL.load(tmp_path / "turned.png").pixels, expected.pixels)

    for mode in ("L", "P", "RGBA", "1"):
        picture(24, 16, mode).save(tmp_path / f"{mode}.png")
        assert SMALL.load(tmp_path / f"{mode}.png").grid == expected.grid


# A black disc on a transparent ground, whose hidden color is red, green, or black.
def cutout(mode: str, hidden: tuple[int, int, int]) -> Any:
    rows, columns = np.mgrid[:32, :40]
    distance = np.hypot(rows - 15.5, columns - 19.5)
    alpha = np.clip((14 - distance) * 50, 0, 255).astype(np.uint8)
    colors = np.where((alpha > 0)[..., np.newaxis], np.uint8(0), np.uint8(hidden))
    image = PIL.fromarray(np.dstack([colors, alpha]))
    return image if mode == "RGBA" else image.convert(mode)


def palette(shown: tuple[int, int, int]) -> Any:
    image = PIL.new("P", (40, 32), 3)
    image.putpalette([9, 9, 9, *shown, 0, 0, 0, 200, 0, 0])
    image.paste(1, (8, 8, 24, 24))
    return image


def single_color(mode: str, color: Any) -> Any:
    image = PIL.new(mode, (40, 32), color)
    image.paste({"1": 1, "L": 77, "RGB": (77, 7, 200)}[mode], (8, 8, 24, 24))
    return image


TRANSPARENT = {
    "rgba.png": (cutout("RGBA", (0, 0, 0)), {}),
    "hidden.png": (cutout("RGBA", (255, 0, 0)), {}),
    "la.png": (cutout("LA", (0, 255, 0)), {}),
    "rgba.webp": (cutout("RGBA", (255, 0, 0)), {"lossless": True}),
    "rgba.tiff": (cutout("RGBA", (0, 255, 0)), {}),
    "index.gif": (palette((0, 90, 180)), {"transparency": 3}),
    "index.png": (palette((0, 90, 180)), {"transparency": 3}),
    "shares.png": (palette((0, 90, 180)), {"transparency": bytes([255, 128, 0, 30])}),
    "gray.png": (single_color("L", 5), {"transparency": 5}),
    "bits.png": (single_color("1", 0), {"transparency": 0}),
    "color.png": (single_color("RGB", (1, 2, 3)), {"transparency": (1, 2, 3)}),
}


@pytest.mark.parametrize("name", TRANSPARENT)
def test_transparent_pictures_have_a_white_ground_as_in_transformers(
    tmp_path: Path, name: str
) -> None:
    image, options = TRANSPARENT[name]
    image.save(tmp_path / name, **options)
    found = SMALL.load(tmp_path / name)
    with PIL.open(tmp_path / name) as opened:
        expected = processor(SMALL)(images=[opened], return_tensors="pt")["pixel_values"]
    patches = normalized_patches(torch.from_numpy(found.pixels), SMALL.mean, SMALL.std, 2)
    torch.testing.assert_close(patches, expected, rtol=0, atol=1e-5)
    corner = found.pixels[0].reshape(3, SMALL.patch_size, SMALL.patch_size)[:, 0, 0]
    assert (corner > 200).all(), "nothing is there"


def test_rotated_transparent_pictures_keep_their_transparency(tmp_path: Path) -> None:
    exif = PIL.Exif()
    exif[0x0112] = 3  # upside down
    palette((0, 90, 180)).save(tmp_path / "turned.png", transparency=3, exif=exif)
    palette((0, 90, 180)).rotate(180).save(tmp_path / "upright.png", transparency=3)
    turned = SMALL.load(tmp_path / "turned.png").pixels
    assert np.array_equal(turned, SMALL.load(tmp_path / "upright.png").pixels)
    assert turned.max() == 255


@pytest.mark.parametrize("name", ["deep.png", "deep.tiff", "wide.tiff", "wide.pgm"])
def test_gray_values_of_16_bits_keep_their_upper_8(tmp_path: Path, name: str) -> None:
    ramp = np.linspace(0, 65535, 40 * 32).reshape(32, 40)
    values = ramp.astype(np.uint16 if name.startswith("deep") else np.int32)
    PIL.fromarray(values).save(tmp_path / name)
    expected = PIL.fromarray((values // 256).astype(np.uint8)).convert("RGB")
    assert np.array_equal(SMALL.load(tmp_path / name).pixels, SMALL.patches_of(expected).pixels)


def test_one_transparent_gray_value_of_16_bits_is_not_its_neighbor(tmp_path: Path) -> None:
    values = np.full((32, 40), 1000, np.uint16)
    values[:, 20:] = 1001
    PIL.fromarray(values).save(tmp_path / "deep.png", transparency=1000)
    upper = np.where(values == 1000, 255, 1001 // 256).astype(np.uint8)
    expected = SMALL.patches_of(PIL.fromarray(upper).convert("RGB"))
    assert np.array_equal(SMALL.load(tmp_path / "deep.png").pixels, expected.pixels)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        (np.linspace(0, 1, 1280, dtype=np.float32), r"got F from 0\.0 to 1\.0"),
        (np.linspace(-5, 5, 1280).astype(np.int32), "got I from -5 to 5"),
        (np.linspace(0, 1 << 20, 1280).astype(np.int32), "got I from 0 to 1048576"),
    ],
)
def test_gray_values_without_a_known_range_are_rejected(
    tmp_path: Path, values: Any, told: str
) -> None:
    PIL.fromarray(values.reshape(32, 40)).save(tmp_path / "values.tiff")
    with pytest.raises(ImageError, match=rf"values\.tiff: .*{told}.*8 bits"):
        SMALL.load(tmp_path / "values.tiff")


def test_other_files_than_pictures_are_rejected_with_their_name(tmp_path: Path) -> None:
    picture(64, 64).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    (tmp_path / "cut.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "text.png").write_text("no picture")
    (tmp_path / "empty.png").touch()
    picture(2, 500).save(tmp_path / "long.png")
    for name in ("cut.png", "text.png", "empty.png", "missing.png"):
        with pytest.raises(ImageError, match=rf"{name}: expected a picture, got"):
            SMALL.load(tmp_path / name)
    with pytest.raises(ImageError, match=r"long\.png: expected at most 200 times as long as wide"):
        SMALL.load(tmp_path / "long.png")
    with pytest.raises(ImageError, match="expected a picture"):
        SMALL.load(tmp_path)


PUBLISHED = {
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"longest_edge": 16777216, "shortest_edge": 65536},
}


def test_a_processor_directory_specifies_how_pictures_are_prepared(tmp_path: Path) -> None:
    file = tmp_path / "preprocessor_config.json"
    file.write_text(json.dumps(PUBLISHED))
    assert ImageProcessing.of_folder(tmp_path) == ImageProcessing()
    processor(SMALL).save_pretrained(tmp_path)
    assert ImageProcessing.of_folder(tmp_path) == SMALL

    for changed, told in (
        ({"resample": 2}, "not bicubic"),
        ({"do_normalize": False}, "do_normalize False"),
        ({"patch_size": None}, "TypeError"),
        ({"image_mean": 0.5}, "TypeError"),
        ({"image_std": [0.0, 1.0, 1.0]}, "--image-std: expected numbers > 0"),
    ):
        file.write_text(json.dumps({**PUBLISHED, **changed}))
        with pytest.raises(ConfigError, match=told):
            ImageProcessing.of_folder(tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"--processor: expected the config.*preprocessor_config"):
        ImageProcessing.of_folder(tmp_path)


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"patch_size": 0}, "--patch-size"),
        ({"min_pixels": 9, "max_pixels": 8}, "--max-pixels: expected at least --min-pixels 9"),
        ({"mean": (0.5,)}, "--image-mean: expected three numbers"),
    ],
)
def test_invalid_settings_of_processors_are_rejected(values: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        ImageProcessing(**values)
