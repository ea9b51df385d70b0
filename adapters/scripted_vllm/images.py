"""Images in vLLM's plans: the ones to encode, and the ones that the workers may drop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from scripted.sdk import Violation
from scripted.sdk.images import LARGEST_IMAGE, Image, with_images
from scripted_vllm.encoder_check import cut_by, made_by
from scripted_vllm.ids import rid_of

_NAME: Final = "image-"
# The token that stands in a prompt for each token of an image.
_PLACEHOLDER: Final = 0


def name_of(image: Image) -> str:
    """Return the name by which vLLM recognises equal images."""
    return f"{_NAME}{image.number}"


def encoder_inputs(images: Sequence[Image], *, is_encoder_decoder: bool) -> list[tuple[int, int, str]]:
    """Return the position, length and name of each image; an encoder-decoder has one, padded, beside the prompt."""
    if is_encoder_decoder:
        return [(0, LARGEST_IMAGE, name_of(image)) for image in images[:1]]
    return [(image.start, image.count, name_of(image)) for image in images]


def placed_in(prompt: Sequence[int], images: Sequence[Image]) -> Sequence[int]:
    """Return the prompt as vLLM sees it: all images have the same tokens."""
    ids = list(prompt)
    for image in images:
        ids[image.start : image.start + image.count] = [_PLACEHOLDER] * image.count
    return ids


def seen_in(prompt: Sequence[int], features: Sequence[Any]) -> tuple[int, ...]:
    """Return a vLLM prompt with the content of its images."""
    places = [(one.mm_position.offset, one.mm_position.length, _number_of(one.identifier)) for one in features]
    return with_images(prompt, [Image(*place) for place in places])[: len(prompt)]


def check_whole(plan: Any, requests: Mapping[str, Any]) -> None:
    """Check that a plan computes each image in one share. Raises Violation."""
    for name, place in cut_by(plan, {name: requests[name].mm_features for name in plan.num_scheduled_tokens}):
        raise Violation(
            f"the share of {rid_of(name)} ends within its image at positions {place[0]} to {place[-1]}, but with "
            "disable_chunked_mm_input images are computed whole"
        )


class Images:
    """Collects the images of all plans since the last batch; workers also receive plans without a batch."""

    def __init__(self) -> None:
        self._dropped: tuple[int, ...] = ()
        self._encoded: tuple[tuple[str, int], ...] = ()
        # All images that were ever encoded.
        self._known: set[int] = set()

    def take(self, plan: Any, requests: Mapping[str, Any]) -> None:
        """Take a plan of these requests."""
        self._dropped += tuple(map(_number_of, plan.free_encoder_mm_hashes))
        for name, places in made_by(plan):
            self._encoded += tuple((rid_of(name), place) for place in places)
            self._known |= {_number_of(requests[name].mm_features[place].identifier) for place in places}

    def drop_all(self) -> None:
        """Forget all images, as the workers are told to."""
        self._dropped = tuple(sorted(self._known))

    def of_batch(self) -> dict[str, Any]:
        """Take the image fields for the next batch."""
        said = {"dropped": self._dropped, "encoded": self._encoded}
        self._dropped, self._encoded = (), ()
        return said


def _number_of(name: str) -> int:
    return int(name.removeprefix(_NAME))
