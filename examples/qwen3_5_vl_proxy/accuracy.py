"""Measures the share of held-out pictures that a model describes without a mistake.

    python examples/qwen3_5_vl_proxy/accuracy.py --load runs/qwen3_5_vl_proxy --data data/shapes

generates a caption for each picture with greedy decoding, and compares the whole caption. Two
controls measure the accuracy without the picture: a plain grey picture, and a picture with another
caption. By chance, one of 144 captions is right.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from PIL import Image

from megatron.core.models.multimodal.vision_language_model import VisionLanguageModel
from megatron_hybrid.generate import load_model, sample
from megatron_hybrid.picture_reader import PictureReader

_MOST_WORDS = 12


class Examiner:
    """Generates the captions of pictures."""

    def __init__(self, load: str, iteration: int | None = None) -> None:
        model, self._tokenizer, self._length = load_model(load, iteration)
        assert isinstance(model, VisionLanguageModel), "the proxy reads pictures"
        self._reader = PictureReader.of_model(model, self._tokenizer, load)

    def answer(self, question: str, picture: Path) -> str:
        """Returns the greedily decoded reply to a question about a picture."""
        asked = self._reader.ask(question, [picture])
        tokens = sample(
            asked.model,
            asked.tokens,
            num_new_tokens=_MOST_WORDS,
            context_length=self._length,
            num_tokens=self._tokenizer.vocab_size,
            eod=self._reader.end,
            temperature=0.0,
            top_k=0,
            generator=torch.Generator(),
        )
        return self._tokenizer.detokenize(tokens)

    def accuracy(
        self, questions: Sequence[str], pictures: Sequence[Path], captions: Sequence[str]
    ) -> float:
        """Returns the share of pictures whose reply equals the caption."""
        answers = map(self.answer, questions, pictures)
        right = [answer == caption for answer, caption in zip(answers, captions, strict=True)]
        return sum(right) / len(right)


def main() -> None:
    parser = argparse.ArgumentParser(
        description="Measures a model's captions of held-out pictures."
    )
    parser.add_argument("--load", required=True, help="a run, a checkpoint or an exported model")
    parser.add_argument("--ckpt-step", type=int, help="iteration to load instead of the newest")
    parser.add_argument("--data", type=Path, default=Path("data/shapes"))
    parser.add_argument("--count", type=int, default=400, help="largest number of pictures")
    arguments = parser.parse_args()

    lines = (arguments.data / "held_out.jsonl").read_text().splitlines()[: arguments.count]
    asked, said = zip(*(json.loads(line)["messages"] for line in lines), strict=True)
    pictures = [arguments.data / turn["content"][0]["image"] for turn in asked]
    questions = [turn["content"][1]["text"] for turn in asked]
    captions = [turn["content"] for turn in said]

    examiner = Examiner(arguments.load, arguments.ckpt_step)
    with tempfile.TemporaryDirectory() as folder:
        grey = Path(folder) / "grey.png"
        Image.new("RGB", (48, 48), (128, 128, 128)).save(grey)
        by_kind = {
            "held-out pictures": pictures,
            "control, one grey": [grey] * len(pictures),
            "control, other pictures": pictures[1:] + pictures[:1],
        }
        for kind, shown in by_kind.items():
            accuracy = examiner.accuracy(questions, shown, captions)
            print(f"accuracy, {kind}: {100 * accuracy:.1f} % of {len(pictures)}", flush=True)


if __name__ == "__main__":
    main()
