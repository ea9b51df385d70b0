"""Scripts' requests with wrong grammars, as on a server: refused at once, or ended where the fault shows."""

from __future__ import annotations

from typing import Any

import pytest
from scripted_lockstep.tiers.server.runner import EngineServer

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import RequestRefused, ScriptedSim


def script(t: Any) -> Any:
    schema = {"type": "object", "properties": {"a": {"items": {"type": "strng"}}}}
    for wrong, message in (
        ({"json_schema": schema}, r"400.*json_schema.*/properties/a/items.*strng"),
        ({"regex": "(a"}, r"400.*regex.*unclosed group"),
        ({"regex": "a", "ebnf": "start: /a/"}, r"400.*at most one field.*regex and ebnf"),
    ):
        with pytest.raises(RequestRefused, match=f"(?s){message}"):
            t.start_req(prompt_len=20, **wrong)
    yield
    assert t.is_fully_idle


DEAD_END = "start: /[a-d]{6}/ MORE\nMORE: /x/ & /y/"
# With guesses of a model or of a look-up, which may run into the dead end.
CONFIGS = (
    EngineConfig(mixed_chunk=True),
    EngineConfig(speculative_algorithm="draft_model", speculative_draft_model="embedded", pp_size=2),
    EngineConfig(speculative_algorithm="ngram", speculative_ngram_min=1),
)
WHY = "sampling_params.ebnf: the grammar cannot be followed after 6 tokens of output: nothing may come there"


def late(t: Any) -> Any:
    """A grammar that leads nowhere ends its own request, with what it had said, and no other."""
    other = t.start_req(prompt_len=30, prompt_seed=1, max_new_tokens=12)
    streamed = t.start_req(prompt_len=20, ebnf=DEAD_END, max_new_tokens=20)
    whole = t.start_req(prompt_len=20, prompt_seed=2, ebnf=DEAD_END, max_new_tokens=20, stream=False)
    short = t.start_req(prompt_len=20, prompt_seed=3, ebnf=DEAD_END, max_new_tokens=6)
    yield from t.run_until_all_finished([other, streamed, whole, short])
    assert (other.finish_reason, short.finish_reason) == ("length", "length")
    for one in (streamed, whole):
        assert one.finish_reason == "invalid"
        assert len(one.output_ids) == 6
        assert all(chr(token) in "abcd" for token in one.output_ids)
        assert (one.client.error or "").startswith(WHY)
    assert (streamed.client.status, whole.client.status) == (200, 400)
    yield from t.run_until_idle()


@pytest.mark.parametrize("config", CONFIGS, ids=["mixed", "draft-model", "look-up"])
def test_a_grammar_that_leads_nowhere(config: EngineConfig) -> None:
    """A05, B11: the request's own fault, with any guesses."""
    with ScriptedSim.start(config) as engine:
        engine.run(late)


@pytest.mark.parametrize("config", CONFIGS[1:2], ids=["draft-model"])
def test_a_grammar_that_leads_nowhere_on_a_server(parent: PreloadedParent, config: EngineConfig) -> None:
    """A05: the same with the model."""
    with EngineServer.start(config, parent=parent) as engine:
        engine.run(late)


def test_a_wrong_grammar_is_refused() -> None:
    with ScriptedSim.start(EngineConfig()) as engine:
        engine.run(script)
