"""Generated targets: configurations and workloads that are drawn from what an adapter declares, not written by hand."""

from scripted.search.generated.requests import EVENT, REQUEST_FEATURES, Marks, drawn_events, drawn_requests, event_kinds
from scripted.search.generated.space import (
    TWIST,
    Row,
    Space,
    first_of,
    generated_schedule,
    generated_target,
    number_of,
    row_of,
)

__all__ = [
    "EVENT",
    "REQUEST_FEATURES",
    "TWIST",
    "Marks",
    "Row",
    "Space",
    "drawn_events",
    "drawn_requests",
    "event_kinds",
    "first_of",
    "generated_schedule",
    "generated_target",
    "number_of",
    "row_of",
]
