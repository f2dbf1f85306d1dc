"""Pictures of drawn shapes with their captions: the data of the proxy.

    python examples/qwen3_5_vl_proxy/shapes.py --output data/shapes --train 6000 --held-out 400

writes PNGs, `train.jsonl` and `held_out.jsonl` (conversations about them), and a tokenizer with a
word for each word of the captions. A picture has up to three shapes of one kind and one colour in
one part of it: 144 captions, such as "two red circles at the top left". The same seed draws the
same pictures.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import NamedTuple

import tokenizers
from PIL import Image, ImageDraw
from tokenizers import models, pre_tokenizers

COLOURS = {
    "red": (220, 40, 40),
    "green": (40, 170, 60),
    "blue": (50, 80, 220),
    "yellow": (235, 205, 40),
}
SHAPES = ("circle", "square", "triangle")
COUNTS = ("one", "two", "three")
PLACES = ("top left", "top right", "bottom left", "bottom right")
QUESTION = "what is in the picture ?"
SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
# Pictures are of several sizes, so that not all have the same number of tokens.
SIZES = ((48, 48), (48, 56), (56, 48))
_RADIUS = 5


class Drawing(NamedTuple):
    """The contents of a picture."""

    count: int
    colour: str
    shape: str
    place: str

    @property
    def caption(self) -> str:
        ending = "s" if self.count > 1 else ""
        return f"{COUNTS[self.count - 1]} {self.colour} {self.shape}{ending} at the {self.place}"


def draw(drawing: Drawing, generator: random.Random) -> Image.Image:
    """The picture, on a grey ground of some shade. Shapes do not touch each other."""
    width, height = generator.choice(SIZES)
    shade = generator.randint(190, 250)
    image = Image.new("RGB", (width, height), (shade, shade, shade))
    canvas = ImageDraw.Draw(image)
    left = 0 if drawing.place.endswith("left") else width // 2
    top = 0 if drawing.place.startswith("top") else height // 2

    # Each shape is in one of the four cells of a quarter of the picture.
    half_width, half_height = width // 4, height // 4
    cells = generator.sample([(x, y) for x in (0, 1) for y in (0, 1)], drawing.count)
    for x, y in cells:
        centre = (
            left + x * half_width + half_width // 2 + generator.randint(-1, 1),
            top + y * half_height + half_height // 2 + generator.randint(-1, 1),
        )
        _draw_one(canvas, drawing, centre)
    return image


def _draw_one(canvas: ImageDraw.ImageDraw, drawing: Drawing, centre: tuple[int, int]) -> None:
    x, y = centre
    box = (x - _RADIUS, y - _RADIUS, x + _RADIUS, y + _RADIUS)
    colour = COLOURS[drawing.colour]
    if drawing.shape == "circle":
        canvas.ellipse(box, fill=colour)
    elif drawing.shape == "square":
        canvas.rectangle(box, fill=colour)
    else:
        canvas.polygon([(x, y - _RADIUS), (box[0], box[3]), (box[2], box[3])], fill=colour)


def any_drawing(generator: random.Random) -> Drawing:
    return Drawing(
        generator.randint(1, len(COUNTS)),
        generator.choice(list(COLOURS)),
        generator.choice(SHAPES),
        generator.choice(PLACES),
    )


def write_pictures(folder: Path, name: str, count: int, seed: int) -> None:
    """Writes `count` pictures, and the conversations about them."""
    generator = random.Random(f"{seed} {name}")
    (folder / name).mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        drawing = any_drawing(generator)
        path = Path(name) / f"{number:05d}.png"
        draw(drawing, generator).save(folder / path)
        asked = [{"type": "image", "image": str(path)}, {"type": "text", "text": QUESTION}]
        turns = [
            {"role": "user", "content": asked},
            {"role": "assistant", "content": drawing.caption},
        ]
        lines.append(json.dumps({"messages": turns}))
    (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")


def write_tokenizer(folder: Path) -> None:
    """Writes a tokenizer with a token for each word of the conversations."""
    words = {"system", "user", "assistant", *QUESTION.split()}
    for drawing in (
        Drawing(n, c, s, p) for n in (1, 2) for c in COLOURS for s in SHAPES for p in PLACES
    ):
        words.update(drawing.caption.split())
    vocabulary = ["<unk>", *sorted(words | set(COUNTS))]
    tokenizer = tokenizers.Tokenizer(
        models.WordLevel({word: number for number, word in enumerate(vocabulary)}, "<unk>")
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Draws shapes and writes what they are.")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--train", type=int, default=6000, help="pictures to train on")
    parser.add_argument("--held-out", type=int, default=400, help="pictures to be asked about")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    write_tokenizer(arguments.output / "tokenizer")
    write_pictures(arguments.output, "train", arguments.train, arguments.seed)
    write_pictures(arguments.output, "held_out", arguments.held_out, arguments.seed)


if __name__ == "__main__":
    main()
