"""The record of the slots: what was written where, and each way in which a row can come to read what is not its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from engine.core.config import EngineConfig
from engine.core.errors import IntegrityError
from engine.core.limits import EMBEDDED_FACTS, EMBEDDED_WINDOW_FACTS, Limits
from engine.core.plan import SamplingSpec, Segment
from engine.model.batch import ForwardBatch
from engine.model.kv_pool import KVPool
from engine.model.slot_record import SlotRecord

PAGE = 4
WINDOW = EMBEDDED_WINDOW_FACTS.window_tokens
CPU = torch.device("cpu")
SPEC = SamplingSpec(seed=0)


class Recorded:
    """A pool and its record. ``write`` is what a stage does with a plan before it computes it."""

    def __init__(self, *, sanitize: bool = True, windowed: bool = False) -> None:
        facts = EMBEDDED_WINDOW_FACTS if windowed else EMBEDDED_FACTS
        config = EngineConfig(
            model=facts.name, page_size=PAGE, max_total_tokens=512, context_length=256, max_running_requests=4
        )
        self.limits = Limits.of(config, facts)
        self.pool = self._pool()
        if windowed:
            self.pool.window = self._pool(window_tokens=self.limits.window_tokens)
        self.record = SlotRecord(self.pool, sanitize=sanitize)

    def _pool(self, **options: int) -> KVPool:
        return KVPool(self.limits, layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=CPU, **options)

    def write(self, *segments: Segment) -> None:
        for segment in segments:
            self.pool.adopt(segment)
        self.record.write(ForwardBatch(list(segments), self.pool, CPU))


def part(
    row: int, ids: Any, *, start: int = 0, pages: Any = (), place: int = 0, new: bool | None = None, **more: Any
) -> Segment:
    sampling = SPEC if (start == 0 if new is None else new) else None
    return Segment(f"r{row}", row, start, tuple(ids), place, tuple(pages), True, sampling, **more)


def test_what_was_written_is_counted_and_is_the_row_s_history() -> None:
    recorded = Recorded()
    empty = recorded.record.digest()
    assert recorded.record.slots_written == 0
    recorded.write(part(0, (7, 8, 9, 10, 11), pages=(3, 1)))
    recorded.write(part(0, (12,), start=5))
    assert recorded.record.slots_written == 6
    assert recorded.record.history(part(0, (12,), start=5)).tolist() == [7, 8, 9, 10, 11, 12]
    assert recorded.record.history(part(0, (9,), start=2)).tolist() == [7, 8, 9]
    assert recorded.record.digest() != empty
    recorded.record.forget()
    assert (recorded.record.slots_written, recorded.record.digest()) == (0, empty)


def test_a_digest_tells_tokens_positions_and_places_apart() -> None:
    """One script runs in both tiers, on one stage and on several (D01)."""

    def digest(*segments: Segment) -> str:
        recorded = Recorded(sanitize=False)
        for segment in segments:
            recorded.write(segment)
        return recorded.record.digest()

    base = digest(part(0, (1, 2), pages=(1,)))
    assert base == digest(part(3, (1,), pages=(1,)), part(3, (2,), start=1))
    others = [part(0, (2, 1), pages=(1,)), part(0, (1, 2), pages=(2,)), part(0, (1, 2), start=1, pages=(1,), new=True)]
    assert base not in [digest(other) for other in others]


def test_a_cached_prefix_is_gone_on_with_by_another_row() -> None:
    recorded = Recorded()
    recorded.write(part(0, range(8), pages=(0, 1)))
    hit = part(1, (50,), start=8, pages=(0, 1, 2), new=True)
    recorded.write(hit)
    assert recorded.record.history(hit).tolist() == [*range(8), 50]


def test_a_page_of_another_sequence_is_found() -> None:
    """B15: at its first position, with the page, the token and the position that it holds."""
    recorded = Recorded()
    recorded.write(part(0, range(8), pages=(0, 1)))
    recorded.write(part(2, range(100, 108), pages=(2, 3)))
    with pytest.raises(
        IntegrityError, match=r"KV of r1 \(row 1\) at position 4 .* page 3 holds token 104 of position 4"
    ):
        recorded.write(part(1, (50,), start=8, pages=(0, 3, 4), new=True))


@pytest.mark.parametrize("pages", [(1, 0), (0, 0), (1, 1), (0, 5), (5, 1)])
def test_pages_in_another_order_or_never_written_are_found(pages: tuple[int, int]) -> None:
    recorded = Recorded()
    recorded.write(part(0, range(8), pages=(0, 1)))
    with pytest.raises(IntegrityError, match="must be its own"):
        recorded.write(part(1, (50,), start=8, pages=(*pages, 2), new=True))


def test_two_owners_of_a_page_are_found_in_the_microbatch_that_gives_it_away() -> None:
    """B15: what one segment writes, another one of the same microbatch reads."""
    recorded = Recorded()
    recorded.write(part(0, range(6), pages=(0, 1)))
    with pytest.raises(IntegrityError, match=r"KV of r0 \(row 0\) at position 4 must be its own"):
        recorded.write(part(0, (9,), start=6), part(1, (60, 61), pages=(1,)))


def test_a_row_whose_end_was_overwritten_is_found() -> None:
    """B15: the chain goes on from where it ended, not from what lies there now."""
    recorded = Recorded()
    recorded.write(part(0, range(4), pages=(0,)))
    recorded.write(part(1, (9, 9, 9, 9), pages=(0,)))
    with pytest.raises(IntegrityError, match="must continue from position 4, where it ended, but at position 4"):
        recorded.write(part(0, (5,), start=4, pages=(1,), place=1, new=False))


def test_a_row_that_leaves_a_token_out_is_found() -> None:
    recorded = Recorded()
    recorded.write(part(0, range(3), pages=(0,)))
    with pytest.raises(IntegrityError, match="must continue from position 3, where it ended, but at position 2"):
        recorded.write(part(0, (5,), start=2))


def test_what_was_abandoned_is_not_checked_until_the_next_request() -> None:
    """A05: later parts of a failed prompt read what was never written; no client sees the result."""
    recorded = Recorded()
    failed = part(0, range(4), pages=(0,))
    recorded.pool.adopt(failed)
    recorded.record.abandon([failed])
    recorded.write(part(0, (5,), start=4, pages=(1,), place=1, new=False))
    recorded.write(part(0, range(4), pages=(2,)))
    with pytest.raises(IntegrityError):
        recorded.write(part(0, (5,), start=5, pages=(3,), place=1, new=False))


def test_forgetting_lets_a_row_begin_anew() -> None:
    recorded = Recorded()
    recorded.write(part(0, range(4), pages=(0,)))
    recorded.record.abandon([part(1, (1,))])
    recorded.record.forget()
    recorded.write(part(0, (1,), pages=(0,)))
    with pytest.raises(IntegrityError):
        recorded.write(part(1, (5,), start=4, pages=(1, 2), new=False))


@pytest.mark.parametrize("updates", [1, 2])
def test_kv_of_other_weights_is_found(updates: int) -> None:
    """KV that outlived an update of the weights is no longer right (B15)."""
    recorded = Recorded()
    recorded.write(part(0, range(8), pages=(0, 1)))
    for _ in range(updates):
        recorded.record.change_weights()
    with pytest.raises(IntegrityError, match="older than the weights"):
        recorded.write(part(1, (50,), start=8, pages=(0, 1, 2), new=True))
    recorded.write(part(2, range(8), pages=(4, 5)))
    recorded.write(part(3, (50,), start=8, pages=(4, 5, 6), new=True))


def test_a_row_of_other_weights_begins_anew() -> None:
    """Where it ended before is forgotten, so that what its next request begins with is not taken for its rest."""
    recorded = Recorded()
    recorded.write(part(0, range(3), pages=(0,)))
    recorded.record.change_weights()
    recorded.write(part(0, range(2), pages=(0,), new=False))


def test_without_the_sanitizer_nothing_is_checked_and_all_is_recorded() -> None:
    recorded = Recorded(sanitize=False)
    recorded.write(part(0, (5,), start=8, pages=(0, 1, 2), new=True))
    assert recorded.record.slots_written == 1


LONG = WINDOW + 2 * PAGE


def windowed(row: int, count: int, *, first_page: int = 0, window_first: int = 0) -> Segment:
    pages = range(first_page, first_page + -(-count // PAGE))
    places = tuple(page - first_page + window_first for page in pages)
    return part(row, [token % 250 for token in range(count)], pages=pages, window_pages=places)


def test_a_window_that_holds_what_it_should_is_read() -> None:
    recorded = Recorded(windowed=True)
    recorded.write(windowed(0, LONG))
    recorded.write(part(0, (3,), start=LONG, pages=(40,), place=LONG // PAGE, window_pages=(40,)))


def test_a_window_page_that_was_given_back_too_early_is_found() -> None:
    """B15: within the window; what is out of it is not read any more."""
    recorded = Recorded(windowed=True)
    recorded.write(windowed(0, LONG))
    seen = (LONG - WINDOW + 1) // PAGE
    # Its tokens are those of the row's first page, at another place of the sequence.
    recorded.write(part(1, (9, 9, 9, 9), pages=(50,), window_pages=(seen - 1,)))
    recorded.write(part(0, (3,), start=LONG, pages=(40,), place=LONG // PAGE, window_pages=(40,)))
    recorded.write(part(2, (9, 9, 9, 9), pages=(51,), window_pages=(seen + 1,)))
    with pytest.raises(IntegrityError, match=f"window page {seen + 1} holds the KV of another sequence"):
        recorded.write(part(0, (4,), start=LONG + 1))


def test_the_first_position_of_the_window_is_checked_and_the_one_before_is_not() -> None:
    for start, found in ((LONG, True), (LONG + 1, False)):
        recorded = Recorded(windowed=True)
        recorded.write(windowed(0, start))
        last = start - WINDOW + 1 - (0 if found else 1)
        recorded.record._window_fingerprints[last] += 1
        following = part(
            0,
            (3,),
            start=start,
            pages=(40,) if start % PAGE == 0 else (),
            place=start // PAGE,
            window_pages=(40,) if start % PAGE == 0 else (),
        )
        if found:
            with pytest.raises(IntegrityError, match=f"at position {last} must be its own"):
                recorded.write(following)
        else:
            recorded.write(following)
