"""A module to make mistakes with, and what is to be said of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from torch import nn

from tests.unit_tests.core.distributed.fsdp.fully_shard.helpers.stacks import (
    DIM,
)


def assert_raises(error: type[Exception], message: str, call: Callable[[], Any]) -> None:
    with pytest.raises(error, match=message):
        call()


def linear(**options: Any) -> nn.Linear:
    return nn.Linear(DIM, DIM, **options)
