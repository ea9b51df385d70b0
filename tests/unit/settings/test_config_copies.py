"""A copy of a configuration with other values is checked as a new one is."""

from __future__ import annotations

from typing import Any

import pytest

from engine import EngineConfig
from engine.core.errors import ConfigError
from engine.process.settings import ServerSettings


@pytest.mark.parametrize("kind", [EngineConfig, ServerSettings])
@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"pp_sise": 3}, "pp_sise is not a field of .*; did you mean 'pp_size'"),
        ({"pp_size": -1}, "pp_size must be >= 1, got -1"),
        ({"pp_size": "many"}, "pp_size must be"),
        ({"pp_size": 2, "async_scheduling": True}, "async_scheduling needs one stage, got pp_size=2"),
        ({"priority_preemption": True}, "priority_preemption needs schedule_policy='priority'"),
    ],
)
def test_a_wrong_copy_is_refused(kind: type[EngineConfig], values: dict[str, Any], said: str) -> None:
    config = kind()
    with pytest.raises(ConfigError, match=said):
        config.model_copy(update=values)
    with pytest.raises(ConfigError, match=said):
        config.__replace__(**values)  # what copy.replace() calls


def test_a_copy_keeps_what_was_set_and_knows_that_it_was() -> None:
    config = EngineConfig(pp_size=2, page_size=32)
    copied = config.model_copy(update={"pp_async_depth": 1})
    assert copied == EngineConfig(pp_size=2, page_size=32, pp_async_depth=1)
    assert copied.model_fields_set == {"pp_size", "page_size", "pp_async_depth"}
    assert config.model_copy() == config
    assert hash(config.model_copy()) == hash(config)
    assert EngineConfig().model_copy(update={"backend": "openvino"}) == EngineConfig(backend="openvino")


def test_a_draft_model_is_on_one_stage_whatever_the_model_has() -> None:
    config = EngineConfig(
        pp_size=2, dynamic_chunking=True, speculative_algorithm="draft_model", speculative_draft_model="embedded:7"
    )
    draft = config.draft_config()
    assert (draft.model, draft.pp_size, draft.dynamic_chunking) == ("embedded:7", 1, False)
