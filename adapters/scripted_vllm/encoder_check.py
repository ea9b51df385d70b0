"""Checks the images in plans: the workers have them, and each is computed whole. Standalone tests contain this file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scripted_vllm.readers import positions_of


def made_by(plan: Any) -> list[tuple[str, list[int]]]:
    """Return the images that workers get with a plan, by request: encoded or received."""
    come = [(name, [place]) for name, place in getattr(plan.ec_connector_metadata, "loads", ())]
    return [*plan.scheduled_encoder_inputs.items(), *come]


def missing_in(plans: Sequence[Any]) -> list[tuple[str, str]]:
    """Return, over all plans of a scheduler in order, each request that reads an image that the workers lack."""
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


def cut_in(plans: Sequence[Any]) -> list[tuple[str, range]]:
    """Return, over all plans of a scheduler in order, each request whose share ends within an image, with its place."""
    features: dict[str, Any] = {}
    cut = []
    for plan in plans:
        features |= {new.req_id: new.mm_features for new in plan.scheduled_new_reqs}
        cut += cut_by(plan, features)
    return cut


def cut_by(plan: Any, features: Mapping[str, Any]) -> list[tuple[str, range]]:
    """Return the requests of a plan whose shares reach an image's first position but not its last."""
    cut = []
    for name in plan.num_scheduled_tokens:
        read = positions_of(plan, name)
        for one in features.get(name, ()):
            place = range(one.mm_position.offset, one.mm_position.offset + one.mm_position.length)
            if place[0] in read and place[-1] > read[-1]:
                cut.append((name, place))
    return cut
