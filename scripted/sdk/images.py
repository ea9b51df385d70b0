"""Images in prompts, which stand for any encoder input: their positions and their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from scripted.core.prompts import prompt_of

# The number of tokens in an image, by the image's number. Equal numbers are equal images.
_SIZES: Final = (3, 6, 5)
_SEED: Final = 1_000
_AGAIN: Final = 2
SMALLEST_IMAGE: Final = min(_SIZES)
LARGEST_IMAGE: Final = max(_SIZES)


class Image(msgspec.Struct, frozen=True):
    """An image at ``count`` positions of a prompt, starting at ``start``."""

    start: int
    count: int
    number: int


def images_in(prompt: int, count: int, first: int, *, behind: int = 0) -> tuple[Image, ...]:
    """Place up to ``count`` images in this many tokens, each in its own part.

    They are numbered from ``first``; the first two repeat, as in the turns of a conversation. The tokens follow the
    first ``behind`` tokens of a prompt.
    """
    part = prompt // count if count else 0
    numbers = [first + (at if at < _AGAIN else at - _AGAIN) for at in range(count)]
    images = [Image(at * part, _SIZES[number % len(_SIZES)], number) for at, number in enumerate(numbers)]
    # In the middle of its part; an image without room is left out.
    return tuple(
        [
            msgspec.structs.replace(image, start=behind + image.start + (part - image.count) // 2)
            for image in images
            if image.count <= part
        ]
    )


def with_images(prompt_ids: Sequence[int], images: Sequence[Image]) -> tuple[int, ...]:
    """Return the prompt with its images' tokens, which stand for the encoder's output."""
    ids = list(prompt_ids)
    for image in images:
        ids[image.start : image.start + image.count] = prompt_of(image.count, _SEED + image.number)
    return tuple(ids)
