"""The encoder of the simulated device: computes the images of prompts, and keeps a bounded number of their tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from scripted.core.violation import Violation
from scripted.sdk.images import LARGEST_IMAGE, Image
from scripted.sdk.messages import Batch


class SimulatedEncoder:
    """Computes images, and caches at most ``room`` tokens of them; 0 for a model without images."""

    def __init__(self, room: int) -> None:
        self.room = room
        # How many tokens each computed image has, by the image's number.
        self._encoded: dict[int, int] = {}

    def encode(self, batch: Batch, images_of: Callable[[str], Sequence[Image]]) -> None:
        """Compute a batch's images, and check that the batch reads only computed images. Raises Violation."""
        for number in batch.dropped:
            self._encoded.pop(number, None)
        beside = {share.rid for share in batch.shares if share.crossed is not None}
        for rid, place in batch.encoded:
            image = images_of(rid)[place]
            self._encoded[image.number] = LARGEST_IMAGE if rid in beside else image.count
        kept = sum(self._encoded.values())
        if kept > self.room:
            raise Violation(
                f"with the images of batch {batch.id} the encoder's cache holds {kept} tokens, of at most {self.room}"
            )
        for share in batch.shares:
            end = share.start + share.count
            for image in images_of(share.rid)[: None if share.crossed is None else 1]:
                is_read = image.start < end and share.start < image.start + image.count
                is_read = is_read if share.crossed is None else share.start == 0
                if is_read and image.number not in self._encoded:
                    raise Violation(
                        f"{share.rid} computes positions {share.start} to {end - 1}, but of its image at positions "
                        f"{image.start} to {image.start + image.count - 1} the device has nothing"
                    )


def output_of(images: Sequence[Image]) -> list[int]:
    """Return the encoder's output for images beside a prompt, padded to the largest: a fingerprint for each token."""
    return [place + ~((image.number + 2) * LARGEST_IMAGE) for image in images for place in range(LARGEST_IMAGE)]
