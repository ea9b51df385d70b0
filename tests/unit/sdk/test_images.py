"""Images in prompts: an encoder computes them before a batch reads them, and keeps them until ordered to drop them.

Goal: nobody reads an image that the device does not have, and it keeps no more than there is room for. Method: plans
written by hand. Origin: vLLM pull requests 31857 and 45347. Mutant: in `SimulatedRunner._encode`, drop nothing, or look
at no share.
"""

from __future__ import annotations

import pytest
from planned_run import PlannedRun, share

from scripted.core.prompts import prompt_ids
from scripted.sdk import Violation
from scripted.sdk.images import Image, images_in, with_images


def run_with(*, room: int = 8, images: int = 1) -> PlannedRun:
    """A request of 14 tokens: of image 0 it has positions 5 to 7; with two images the second is at 7 to 12."""
    run = PlannedRun(images=room)
    run.add("a", prompt=14, images=images)
    return run


def test_images_stand_in_the_middle_of_their_parts_and_come_again() -> None:
    assert images_in(14, 1, 0) == (Image(5, 3, 0),)
    assert images_in(14, 2, 0) == (Image(2, 3, 0), Image(7, 6, 1))
    assert [image.number for image in images_in(40, 4, 0)] == [0, 1, 0, 1]
    assert images_in(5, 1, 1) == images_in(14, 0, 0) == ()


def test_only_the_tokens_of_an_image_are_its_own() -> None:
    text = prompt_ids(14, 0)
    seen, other = (with_images(text, images_in(14, 1, number)) for number in (0, 3))
    assert len(seen) == len(text)
    assert seen[:5] == other[:5] == text[:5]
    assert seen[8:] == other[8:] == text[8:]
    assert seen[5:8] != other[5:8]
    assert with_images(prompt_ids(20, 1), (Image(9, 3, 0),))[9:12] == seen[5:8]


def test_text_before_an_image_needs_nothing() -> None:
    run = run_with()
    run.launch("a", 0, 5, 1, 2)


@pytest.mark.parametrize(("start", "count"), [(0, 6), (0, 8), (0, 14)])
def test_a_share_that_reads_an_image_needs_it(start: int, count: int) -> None:
    run = run_with()
    with pytest.raises(Violation, match=r"of its image at positions 5 to 7 the device has nothing"):
        run.step(share("a", start, count, 1, 2, 3, 4))


def test_an_image_is_kept_for_later_chunks_and_other_requests() -> None:
    run = run_with()
    run.step(share("a", 0, 6, 1, 2), encoded=(("a", 0),))
    run.take_result()
    run.step(share("a", 6, 4, 1, 2, 3))
    run.add("b", prompt=14, images=1)
    run.step(share("b", 0, 14, 4, 5, 6, 7))


def test_what_is_dropped_is_gone_unless_it_is_encoded_again() -> None:
    run = run_with()
    run.step(share("a", 0, 6, 1, 2), encoded=(("a", 0),))
    run.take_result()
    run.step(share("a", 6, 1, 1, 2), dropped=(0,), encoded=(("a", 0),))
    run.take_result()
    with pytest.raises(Violation, match=r"computes positions 7 to 8, but of its image"):
        run.step(share("a", 7, 2, 1, 2, 3), dropped=(0,))


def test_the_device_keeps_no_more_than_there_is_room_for() -> None:
    run = run_with(images=2)
    with pytest.raises(Violation, match=r"the encoder's cache holds 9 tokens, of at most 8"):
        run.step(share("a", 0, 5, 1, 2), encoded=(("a", 0), ("a", 1)))


def crossed_run() -> PlannedRun:
    run = PlannedRun(images=8)
    run.add("a", prompt=8, new=3, images=1)
    run.step(share("a", 0, 4, 1, crossed=(5, 7)), encoded=(("a", 0),))
    run.take_result()
    return run


def test_what_a_decoder_reads_of_its_encoder_is_written_once() -> None:
    """The image may be dropped: its first share has written what is read."""
    run = crossed_run()
    run.step(share("a", 4, 4, 1, 2, crossed=(5, 7)), dropped=(0,))


def test_it_has_room_for_the_largest_image() -> None:
    """The image has 3 tokens; the blocks have 4 slots each."""
    run = PlannedRun(images=8)
    run.add("a", prompt=8, new=3, images=1)
    with pytest.raises(Violation, match=r"its image, 6 tokens, but has room for 4 in its blocks \[5\]"):
        run.step(share("a", 0, 4, 1, crossed=(5,)), encoded=(("a", 0),))


def test_it_must_be_there() -> None:
    run = crossed_run()
    with pytest.raises(Violation, match=r"a reads what its encoder made of its image, but its blocks \[6, 7\]"):
        run.step(share("a", 4, 4, 1, 2, crossed=(6, 7)))
    run = PlannedRun(images=8)
    run.add("a", prompt=8, new=3, images=1)
    with pytest.raises(Violation, match=r"of its image at positions .* the device has nothing"):
        run.step(share("a", 0, 4, 1, crossed=(5, 7)))
