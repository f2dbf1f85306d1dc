"""Every recipe in `test_cases/`, through the one runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional_tests.helpers.runner import CASES, Recipe, build_corpus, check


@pytest.fixture(scope="session")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("license"))


# Other tests train and resume with these, too, in less time.
WIDE = {"gpt_bf16_resume", "gpt_bf16_fsdp2_resume", "gpt_fp32_resume"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(path.name, marks=pytest.mark.wide if path.name in WIDE else ())
        for path in sorted(CASES.iterdir())
    ],
)
def test_the_recipe_holds(name: str, tmp_path: Path, data_prefix: Path) -> None:
    check(Recipe.read(name), tmp_path, data_prefix)
