"""Every recipe in `test_cases/`, through the one runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.functional_tests.helpers.runner import CASES, Recipe, build_corpus, check


@pytest.fixture(scope="session")
def data_prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_corpus(tmp_path_factory.mktemp("license"))


@pytest.mark.parametrize("name", sorted(path.name for path in CASES.iterdir()))
def test_the_recipe_holds(name: str, tmp_path: Path, data_prefix: Path) -> None:
    check(Recipe.read(name), tmp_path, data_prefix)
