"""From an image file to patches of pixels, as Qwen's image processors make them."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote, unquote_to_bytes

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageOps
from torch import Tensor

from megatron.core.datasets.image_text_files import ImageFormat, StoredImage
from megatron.core.device import send
from megatron.core.files import UnusableFileError, read_regular
from megatron.core.json_reading import parse_json
from megatron.core.log import printable
from megatron.core.models.multimodal.patch_grid import PatchGrid
from megatron.core.models.multimodal.vision_config import VisionConfig
from megatron.core.options import ConfigError, expect

PROCESSOR_FILE = "preprocessor_config.json"
_MAX_IMAGE_BYTES = 1 << 28
_MAX_CONFIG_BYTES = 1 << 20
_MOST_PIXELS = 1 << 28  # of a picture, before it is resized
_MAX_GRAY = (1 << 16) - 1
_MOST_ELONGATED = 200  # times as long as wide


class ImageError(ValueError):
    """A picture that cannot be used. The message names it and the reason."""


@dataclass(frozen=True)
class ImageProcessing:
    """How pictures become patches.

    Attributes:
        patch_size: pixels of a patch in each direction.
        merge_size: patches in each direction that become one token.
        min_pixels, max_pixels: of a resized picture. Its sides are multiples of patch_size *
            merge_size, and keep their ratio as far as that allows.
        mean, std: what pixels from 0 to 1 are normalised with, by channel.
    """

    patch_size: int = 16
    merge_size: int = 2
    min_pixels: int = 65536
    max_pixels: int = 16777216
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    def __post_init__(self) -> None:
        for flag, value in (("--patch-size", self.patch_size), ("--merge-size", self.merge_size)):
            expect(value >= 1, flag, "an integer >= 1", value)
        expect(
            1 <= self.min_pixels <= self.max_pixels,
            "--max-pixels",
            f"at least --min-pixels {self.min_pixels}, itself at least 1",
            self.max_pixels,
        )
        for flag, values in (("--image-mean", self.mean), ("--image-std", self.std)):
            expect(len(values) == 3, flag, "three numbers", list(values))
        expect(min(self.std) > 0, "--image-std", "numbers > 0", list(self.std))

    @classmethod
    def of_folder(cls, folder: str | Path) -> ImageProcessing:
        """Reads the preprocessor_config.json of a model directory of the transformers library.

        Raises:
            ConfigError: the file is missing, or belongs to another image processor than Qwen's.
        """
        path = Path(folder) / PROCESSOR_FILE
        try:
            content: Any = parse_json(
                read_regular(path, max_bytes=_MAX_CONFIG_BYTES, what="an image processor's config")
            )
            size = content.get("size") or {}
            smallest = size.get("shortest_edge", content.get("min_pixels"))
            largest = size.get("longest_edge", content.get("max_pixels"))
            for name in ("do_resize", "do_rescale", "do_normalize", "do_convert_rgb"):
                if content.get(name, True) is not True:
                    raise ValueError(f"{name} {content[name]}")
            if content.get("resample", 3) != 3:
                raise ValueError(f"resample {content['resample']}, which is not bicubic (3)")
            return cls(
                int(content["patch_size"]),
                int(content["merge_size"]),
                int(smallest),
                int(largest),
                tuple(float(one) for one in content["image_mean"]),
                tuple(float(one) for one in content["image_std"]),
            )
        except (
            UnusableFileError,
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ) as error:
            raise ConfigError(
                f"--processor: expected the config of a Qwen image processor in {path}, "
                f"got {printable(repr(error))}."
            ) from error

    @classmethod
    def of_model(cls, vision: VisionConfig) -> ImageProcessing | None:
        """The preprocessing of the pictures that a model was trained with; None if not recorded."""
        smallest, largest = vision.image_min_pixels, vision.image_max_pixels
        mean, std = vision.image_mean, vision.image_std
        if smallest is None or largest is None or mean is None or std is None:
            return None
        patch, merge = vision.vision_patch_size, vision.vision_merge_size
        return cls(patch, merge, smallest, largest, mean, std)

    def format(self, image_token: int) -> ImageFormat:
        """What files of such patches have in common."""
        return ImageFormat(image_token=image_token, **dataclasses.asdict(self))

    def resized(self, height: int, width: int) -> tuple[int, int]:
        """The size that a picture is brought to: multiples of a block, about the same ratio, and
        between `min_pixels` and `max_pixels`. ImageError for one that is too elongated.
        """
        if max(height, width) > _MOST_ELONGATED * min(height, width):
            raise ImageError(
                f"expected at most {_MOST_ELONGATED} times as long as wide, got {height} x {width}"
            )

        block = self.patch_size * self.merge_size
        sides = [round(side / block) * block for side in (height, width)]
        if math.prod(sides) > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            sides = [max(block, math.floor(s / shrink / block) * block) for s in (height, width)]
        elif math.prod(sides) < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            sides = [math.ceil(side * grow / block) * block for side in (height, width)]
        return sides[0], sides[1]

    def load(self, source: Path | bytes) -> StoredImage:
        """The patches of a picture in a file, or of the file's content.

        Raises:
            ImageError: a file that is missing, no picture, broken, or too large.
        """
        name = "data:" if isinstance(source, bytes) else source
        try:
            content = source if isinstance(source, bytes) else _read(source)
            with warnings.catch_warnings(), Image.open(io.BytesIO(content)) as image:
                warnings.simplefilter("error", Image.DecompressionBombWarning)
                if image.width * image.height > _MOST_PIXELS:
                    raise ImageError(
                        f"expected at most {_MOST_PIXELS} pixels, got {image.width} x "
                        f"{image.height}"
                    )
                return self.patches_of(in_rgb(ImageOps.exif_transpose(image)))
        except ImageError as error:
            raise ImageError(f"{name}: {error}.") from error
        except Exception as error:  # the library raises many kinds for broken files
            raise ImageError(
                f"{name}: expected a picture, got {printable(f'{type(error).__name__}: {error}')}."
            ) from error

    def patches_of(self, image: Any) -> StoredImage:
        """The patches of a Pillow picture in RGB. Raises ImageError as `resized`."""
        height, width = self.resized(image.height, image.width)
        pixels = np.asarray(image.resize((width, height), Image.Resampling.BICUBIC))
        grid = PatchGrid(1, height // self.patch_size, width // self.patch_size)
        return StoredImage(grid, self._in_patches(pixels, grid))

    def _in_patches(self, pixels: NDArray[np.uint8], grid: PatchGrid) -> NDArray[np.uint8]:
        """[rows, columns, channels] -> [patches, channels * pixel rows * pixel columns]."""
        merge, size = self.merge_size, self.patch_size
        blocks = pixels.reshape(
            grid.rows // merge, merge, size, grid.columns // merge, merge, size, 3
        )
        # Blocks of patches row by row, patches row by row in them; then the pixels by channel.
        in_order = blocks.transpose(0, 3, 1, 4, 6, 2, 5)
        return np.ascontiguousarray(in_order).reshape(grid.num_patches, -1)


def in_rgb(image: Image.Image) -> Image.Image:
    """A picture in RGB. White shows through where it is transparent, as in the transformers
    library.

    Gray values of 16 bits keep their upper 8 bits, as Pillow does with colors of 16 bits.

    Raises:
        ImageError: gray values without a known range.
    """
    transparent = image.info.get("transparency")
    if image.mode == "F" or image.mode.startswith("I"):
        values = np.asarray(image)
        if image.mode == "F" or values.min() < 0 or values.max() > _MAX_GRAY:
            raise ImageError(
                f"expected gray values from 0 to {_MAX_GRAY}, got {image.mode} from "
                f"{values.min()} to {values.max()}. Convert it to 8 bits"
            )
        image = Image.fromarray((values >> 8).astype(np.uint8))
        if transparent is not None:
            # Compared before the lower bits are gone: other values share the upper 8.
            image.putalpha(Image.fromarray(np.where(values == transparent, 0, 255).astype("u1")))
            transparent = None

    if transparent is None and not {"A", "a"} & set(image.getbands()):
        return image.convert("RGB")
    white = Image.new("RGBA", image.size, "white")
    return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")


def _read(path: Path) -> bytes:
    return read_regular(path, max_bytes=_MAX_IMAGE_BYTES, what="a picture")


def find_picture(named: str, folder: Path) -> Path | bytes:
    """The file that a conversation names, or the content that it has.

    Args:
        named: a path, or a URI of the kind `file://` or `data:`.
        folder: base directory of relative paths.

    Raises:
        ImageError: another kind of URI, or a broken one.
    """
    scheme, colon, rest = named.partition(":")
    scheme = scheme.lower() if colon else ""
    if scheme in ("http", "https"):
        raise ImageError(
            f"expected a path, a file:// or a data: URI, got {named[:100]}; pictures are not "
            "downloaded"
        )
    if scheme == "file":
        host, slash, path = rest.removeprefix("//").partition("/")
        if not rest.startswith("//") or not slash or host not in ("", "localhost"):
            raise ImageError(f"expected a URI like file:///images/picture.png, got {named[:100]}")
        return Path(unquote(f"/{path}"))
    if scheme != "data":
        return folder / named
    kind, comma, content = rest.partition(",")
    if not comma:
        raise ImageError(f"expected a URI like data:image/png;base64,..., got {named[:100]}")
    if not kind.endswith(";base64"):
        return unquote_to_bytes(content)
    try:
        return base64.b64decode(unquote_to_bytes(content), validate=True)
    except ValueError as error:
        raise ImageError(f"expected base64 in a data: URI, got {error}") from error


def normalized_patches(
    pixels: Tensor, mean: Sequence[float], std: Sequence[float], num_frames: int
) -> Tensor:
    """Converts stored pixels to the input of a vision tower.

    Args:
        pixels: [patches, channels * pixels of a patch] uint8.
        mean, std: of pixels from 0 to 1, by channel.
        num_frames: how often a picture is repeated in time.

    Returns:
        [patches, channels * num_frames * pixels of a patch] fp32.
    """
    by_channel = pixels.float().unflatten(1, (len(mean), -1))  # [patches, channels, pixels]
    scale = torch.tensor([1 / (255 * one) for one in std]).unsqueeze(1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)]).unsqueeze(1)
    normalized = by_channel * send(scale, pixels.device) - send(shift, pixels.device)
    in_time: Tensor = normalized.unsqueeze(2).expand(-1, -1, num_frames, -1)
    return in_time.flatten(1)
