"""Refusals at the decorator: statements without effect, and options that mean something else.

Goal: a script that tests nothing never passes without a message. Method: one mistake a script, written from the page
of the contract, decorated as a test would be. Origin: scripts that were green and should not have been; D08.
Mutant: none, the harness is what is tested.
"""

from typing import Any

import pytest
from wrong_scripts import ONE_STAGE

from ci.register import register_cpu_ci
from scripted import BadCall, ScriptDefinitionError, ScriptedSim, scripted

register_cpu_ci(est_time=1, suite="base-cpu")

HEAD = "from engine import EngineConfig\nfrom scripted import scripted\nONE = EngineConfig()\n"


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.parametrize(
    ("body", "words"),
    [
        (
            "r = t.start_req(prompt_len=5)\n    yield\n    r.finish_reason == 'stop'",
            "write 'assert r.finish_reason == ",
        ),
        ("yield\n    not t.state.running", "write 'assert not t.state.running'"),
        ("yield\n    t.flush_cache", "'t.flush_cache' does nothing; call it"),
        ("yield\n    assert (t.state.running, 'nothing runs')", "always holds, because a tuple is true"),
        ("yield\n    assert (r.finished for r in ())", "always holds"),
        ("yield\n    assert 'no retraction'", "always holds"),
        ("helper(t)\n    yield", "makes a generator that never runs; write 'yield from helper"),
        ("yield\n    assert r.status == 'finished' or 'aborted'", "always holds, because a part of it is always true"),
        ("yield\n    assert r.status is not 'aborted'", "asks whether it is the very same object; write == or !="),
        ("yield\n    assert r.finish_reason in 'length or stop'", "looks for a part of a text; write a tuple"),
        ("yield from t.run_until(lambda: 'finished')", "waits for a constant"),
    ],
)
def test_what_comes_to_nothing_is_refused_at_collection(body: str, words: str, tmp_path) -> None:
    """D08: with the line of it."""
    file = tmp_path / "test_comes_to_nothing.py"
    text = f"{HEAD}def helper(t):\n    yield\n\ndef test_a(t):\n    {body}\n\nscripted(ONE)(test_a)\n"
    file.write_text(text)
    with pytest.raises(ScriptDefinitionError, match=r"tests nothing in line \d+") as caught:
        exec(compile(text, str(file), "exec"), {})
    assert words in str(caught.value)


def test_a_look_that_must_raise_is_no_idle_statement() -> None:
    def looks(t):
        flush = t.flush_cache()
        with pytest.raises(BadCall):
            flush.status  # noqa: B018 - looking is the test
        yield

    with ScriptedSim.start(ONE_STAGE) as sim:
        sim.run(looks)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"must_reach": "window"}, "write must_reach=['window']"),
        ({"must_reach": ["a", ""]}, "non-empty names"),
        ({"must_reach": ["a", "a"]}, "names each window once"),
        ({"tiers": ("sim", "sim")}, "each once"),
        ({"max_steps": 2.5}, "whole number"),
        ({"timeout_s": float("nan")}, "timeout_s must be a number of seconds > 0"),
        ({"oracle": "no"}, "True or False"),
    ],
)
def test_options_that_mean_something_else_are_refused(options: dict[str, Any], words: str) -> None:
    """Code that cannot be a test is refused at its line (D08)."""
    with pytest.raises(ScriptDefinitionError) as caught:
        scripted(ONE_STAGE, **options)
    assert words in str(caught.value)
