"""``transformers serve`` with the adapter's settings: its command line, and the settings off their defaults."""

from __future__ import annotations

from typing import ClassVar, Final

import msgspec

from scripted.core.server_description import ServeLine, ServerDescription
from scripted_transformers.machine import TransformersSettings

_FLAGS: Final = {
    "page_size": "--cb-block-size",
    "num_blocks": "--cb-num-blocks",
    "max_batch_tokens": "--cb-max-batch-tokens",
}


class TransformersServer(ServerDescription[TransformersSettings]):
    """A server with continuous batching on a GPU, where batches are asynchronous by default."""

    defaults: ClassVar = {"use_async_batching": True}
    sizes: ClassVar = (*_FLAGS, "max_requests_per_batch")
    token_counts: ClassVar = ("page_size", "max_batch_tokens")
    block_size: ClassVar = "page_size"
    switches: ClassVar = ("use_async_batching",)
    issue_form: ClassVar = (
        ("System Info", ("environment",)),
        ("Reproduction", ("flags", "what happens", "script", "cause", "who is affected", "what is known upstream")),
        ("Expected behavior", ("what should happen",)),
    )

    def command(self, config: TransformersSettings) -> ServeLine:
        given = msgspec.structs.asdict(config)
        words = [f"{flag} {given[name]}" for name, flag in _FLAGS.items()]
        changed = tuple(f"{name}={value}" for name, value in self.unusual(config).items())
        others = tuple(f"ContinuousBatchingConfig({one})" for one in changed)
        return ServeLine(f"transformers serve MODEL --continuous-batching {' '.join(words)}", (), others)
