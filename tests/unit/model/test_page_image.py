"""A page as bytes: whole, with its record, on every device, and refused where it would not fit."""

from __future__ import annotations

import msgspec
import pytest
import torch
from chained_stages import DEVICE

from engine.core.config import EngineConfig
from engine.core.errors import StepFailedError
from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.model.kv_pool import KVPool
from engine.model.page_image import PageImages
from engine.model.page_layout import KVOrigin, PageLayout
from engine.model.slot_record import SlotRecord


def pages_of(*, pages_first: bool = False, sanitize: bool = True, filled: bool = False) -> tuple[KVPool, SlotRecord]:
    limits = Limits.of(EngineConfig(page_size=4, max_total_tokens=16), EMBEDDED_FACTS)
    pool = KVPool(
        limits,
        layers=2,
        kv_heads=3,
        head_dim=5,
        dtype=torch.bfloat16,
        device=torch.device(DEVICE),
        pages_first=pages_first,
    )
    record = SlotRecord(pool, sanitize=sanitize)
    parts = (pool.keys, pool.values, *(torch.from_numpy(part) for page in range(4) for part in record.page(page)))
    for number, part in enumerate(parts if filled else ()):
        part.copy_((torch.arange(part.numel()) % 251 + number).reshape(part.shape))
    return pool, record


def content(pool: KVPool, record: SlotRecord, page: int) -> list[list[float]]:
    return [part.flatten().tolist() for part in (*pool.page(page), *record.page(page))]


@pytest.mark.parametrize("pages_first", [False, True])
@pytest.mark.parametrize("sanitize", [False, True])
def test_a_page_is_copied_whole_and_nothing_else(*, pages_first: bool, sanitize: bool) -> None:
    source = pages_of(pages_first=pages_first, sanitize=sanitize, filled=True)
    target = pages_of(pages_first=pages_first, sanitize=sanitize)
    reading, writing = (PageImages(*pages, stage=0, stages=1, origin=None) for pages in (source, target))
    assert reading.layout == writing.layout
    assert reading.layout.difference(writing.layout) is None
    before = content(*target, 3)
    image = reading.new_image()
    for page, to in ((0, 1), (3, 2), (2, 0)):
        reading.read(page, image)
        writing.write(to, image)
    assert [content(*target, page) for page in (1, 2, 0)] == [content(*source, page) for page in (0, 3, 2)]
    assert content(*target, 3) == before


def test_another_root_is_another_layout() -> None:
    pool, record = pages_of()
    before = PageImages(pool, record, stage=0, stages=1, origin=None).layout
    record.change_weights()
    difference = PageImages(pool, record, stage=0, stages=1, origin=None).layout.difference(before)
    assert str(difference).startswith("sanitizer_root must be the same on both engines, got ")


def test_a_layout_travels() -> None:
    layout = PageImages(*pages_of(), stage=1, stages=2, origin=KVOrigin((), "a digest")).layout
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(layout), type=PageLayout) == layout


@pytest.mark.parametrize("pages", [(4,), (-1,), (0, 3, 4)])
def test_pages_that_do_not_exist_are_refused(pages: tuple[int, ...]) -> None:
    with pytest.raises(StepFailedError, match=r"pages of a transfer must be in 0\.\.3, got"):
        PageImages(*pages_of(), stage=0, stages=1, origin=None).require(pages)
