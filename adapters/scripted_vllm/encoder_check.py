"""Whether workers have what plans read of images, without a word of the search; standalone tests have this text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from scripted_vllm.readers import positions_of


def made_by(plan: Any) -> list[tuple[str, list[int]]]:
    """Which images of which requests the workers have with a plan: their encoder makes them, or they come."""
    come = [(name, [place]) for name, place in getattr(plan.ec_connector_metadata, "loads", ())]
    return [*plan.scheduled_encoder_inputs.items(), *come]


def missing_in(plans: Sequence[Any]) -> list[tuple[str, str]]:
    """Of all plans of a scheduler in order: each request that reads an image which the workers do not have then."""
    features: dict[str, Any] = {}
    there: set[str] = set()
    missing = []
    for plan in plans:
        features |= {new.req_id: new.mm_features for new in plan.scheduled_new_reqs}
        there -= set(plan.free_encoder_mm_hashes)
        for name, places in made_by(plan):
            there |= {features[name][place].identifier for place in places}
        for name in plan.num_scheduled_tokens:
            read = positions_of(plan, name)
            for one in features.get(name, ()):
                first, last = one.mm_position.offset, one.mm_position.offset + one.mm_position.length - 1
                if first <= read[-1] and read[0] <= last and one.identifier not in there:
                    missing.append((name, one.identifier))
    return missing
