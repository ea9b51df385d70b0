"""The shares of LoRAs between their reading and the change that takes them."""

from __future__ import annotations

from typing import Any

import pytest

from engine.core.errors import CheckpointError, IntegrityError
from engine.model.lora import ReadLoras


class Loras:
    """The LoRAs of a stage with this way to compute. ``meanwhile`` is called in the middle of a reading."""

    def __init__(self, products: str = "separate") -> None:
        self.products = products
        self.meanwhile = lambda: None

    def load(self, path: str) -> str:
        self.meanwhile()
        return f"share of {path}"

    def has_the_products_of(self, other: Loras) -> bool:
        return self.products == other.products


def read(version: int = 1, loras: Loras | None = None) -> Any:
    kept: Any = ReadLoras()
    kept.want(version)
    kept.read(version, "/x", loras or Loras())
    return kept


def test_a_share_is_taken_once() -> None:
    kept = read()
    assert kept.take(1, Loras()) == "share of /x"
    with pytest.raises(IntegrityError, match="version 1 of a LoRA must be read before it is taken"):
        kept.take(1, Loras())


@pytest.mark.parametrize("end", ["forget", "clear"])
def test_a_share_that_is_forgotten_meanwhile_is_dropped_when_it_is_read(end: str) -> None:
    """Otherwise an unload, or a failure of another stage, would leave 100 MB behind."""
    loras, kept = Loras(), ReadLoras()
    loras.meanwhile = {"forget": lambda: kept.forget(1), "clear": kept.clear}[end]
    of_stage: Any = loras
    kept.want(1)
    kept.read(1, "/x", of_stage)
    assert kept._read == {}
    with pytest.raises(IntegrityError):
        kept.take(1, of_stage)


def test_a_share_that_was_read_for_other_products_is_refused() -> None:
    """A weight update may come between its reading and the change."""
    kept = read(loras=Loras("separate"))
    with pytest.raises(CheckpointError, match="the weights changed while the LoRA was read"):
        kept.take(1, Loras("side by side"))
    assert kept._read == {}
