"""What is served, as far as it shows before any process is forked: settings, the model's facts, limits.

Refuses what cannot be served. It reads files and measures memory; it starts and computes nothing.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from engine.config import embedded_seed, loras_of, require_lora_names
from engine.limits import Limits, ModelFacts, embedded_facts
from engine.output_files import require_writable
from engine.settings import ServerSettings


def openvino_is_likely(settings: ServerSettings) -> bool:
    """Whether OpenVINO will compute, as far as it shows before the costly imports: they are for what is likely."""
    if settings.backend != "auto":
        return settings.backend == "openvino"
    is_embedded = embedded_seed(settings.model, settings.seed) is not None
    return not is_embedded and importlib.util.find_spec("openvino") is not None


def refuse_early(settings: ServerSettings) -> None:
    """Raise EngineError for a model that is not there, numbers that the embedded one cannot have, files closed to it.

    Before the costly imports: a misspelled path is refused in a fraction of a second.
    """
    from engine.model.checkpoint import require_files
    from engine.model.lora_config import require_lora

    require_files(settings)
    if settings.record:
        require_writable("record", Path(settings.record))
    if settings.flight_dir:
        require_writable("flight_dir", Path(settings.flight_dir) / "flight.rec")
    if settings.profile_dir and settings.placement == "local":
        require_writable("profile_dir", Path(settings.profile_dir) / "profile" / "stage-0.json")
    require_lora_names(settings.lora, settings.model_name)
    for _, path in loras_of(settings.lora):
        require_lora(path)
    if settings.speculative_draft_model:
        require_files(settings.draft_config())
    if embedded_seed(settings.model, settings.seed) is not None:
        Limits.of(settings, embedded_facts(settings.model))


def resolve(settings: ServerSettings) -> tuple[ServerSettings, ModelFacts, Limits]:
    """What the model's files, the backend and this machine's memory make of the settings. Raises EngineError."""
    from engine.model.backend import takes_openvino, with_its_pages
    from engine.model.capacity import measure_kv_tokens, require_memory
    from engine.model.checkpoint import read_facts

    facts = read_facts(settings)
    if settings.speculative_draft_model:
        facts = facts.with_draft(read_facts(settings.draft_config()))
    settings = with_its_pages(settings)
    if settings.placement != "local":
        # Other machines compute. Each says what it can and how much it holds, once it has joined.
        return settings, facts, Limits.of(settings, facts)
    takes_openvino(settings)
    capacity = measure_kv_tokens(settings, facts) if settings.max_total_tokens is None else None
    limits = Limits.of(settings, facts, capacity)
    if settings.max_total_tokens is not None:
        require_memory(settings, facts, limits)
    return settings, facts, limits
