"""A connector to an external encoder cache, which has every second image and sends it within some steps."""

from __future__ import annotations

from typing import Any

from vllm.distributed.ec_transfer.ec_connector.base import ECConnectorBase, ECConnectorMetadata


class Loaded(ECConnectorMetadata):
    def __init__(self, loads: list[tuple[str, int]]) -> None:
        self.loads = loads


class OutsideImages(ECConnectorBase):
    """Plays the scheduler's role; a requested image arrives when due."""

    def __init__(self, vllm_config: Any, role: Any) -> None:
        super().__init__(vllm_config, role)
        self._now = 0
        self.due: dict[str, int] = {}
        self._steps: int = vllm_config.ec_transfer_config.ec_connector_extra_config["steps"]
        self._asked: list[tuple[str, int]] = []

    def begin(self, step: int) -> None:
        self._now = step

    @property
    def is_waited_for(self) -> bool:
        """Whether an image is in transit."""
        return any(due >= self._now for due in self.due.values())

    def ensure_cache_available(self, request: Any, num_computed_tokens: int) -> bool:
        needed = [
            one.identifier
            for one in request.mm_features
            if one.mm_position.offset + one.mm_position.length > num_computed_tokens and is_outside(one.identifier)
        ]
        self.due |= {name: self._now + self._steps for name in needed if name not in self.due}
        return all(self.due[name] <= self._now for name in needed)

    def has_cache_item(self, identifier: str) -> bool:
        return self.due.get(identifier, self._now + 1) <= self._now

    def update_state_after_alloc(self, request: Any, index: int) -> None:
        if self.has_cache_item(request.mm_features[index].identifier):
            self._asked.append((request.request_id, index))

    def build_connector_meta(self, scheduler_output: Any) -> ECConnectorMetadata:
        del scheduler_output
        asked, self._asked = self._asked, []
        return Loaded(asked)

    def _of_workers(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError("the machine loads and saves")

    start_load_caches = save_caches = _of_workers


def is_outside(identifier: str) -> bool:
    return int(identifier.rpartition("-")[2]) % 2 == 1
