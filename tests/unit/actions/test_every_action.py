"""Every action is known everywhere: to schedules, the search, scripts, recordings, reports, the shell and the docs.

The tests run over the classes themselves, so a new action takes part by being one, and fails by its name.
"""

from __future__ import annotations

import re
import shlex
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pytest
from base_workloads import WORKLOADS
from every_case import every_case
from scripted_lockstep.actions import (
    EngineCall,
    FailGrammar,
    FailTransfer,
    HoldGrammars,
    HoldLoras,
    HoldTransfers,
    LoraLoad,
    LoraUnload,
    Press,
    ReleaseGrammars,
    ReleaseLoras,
    ReleaseTransfers,
    Relieve,
    ResumeServing,
    ResumeStage,
    StallStage,
    StartRequest,
    Update,
    all_actions,
)
from scripted_lockstep.script.context import ScriptContext
from scripted_lockstep.step_words import call_names, event_text
from scripted_lockstep.tiers.sim.runner import EngineSim
from thinned import thinned

from engine.core.config import EngineConfig
from engine.core.messages import (
    ClientMessage,
    Completion,
    Event,
    Generate,
    GetStats,
    Grammar,
    LoraRead,
    OperatorEvent,
    PagesReceived,
    PagesSent,
    PipelineEvent,
)
from engine.core.scheduler import StepRecord
from scripted.core.action import Action
from scripted.core.adapters import adapter_named
from scripted.core.common_actions import AdvanceClock, HoldResults, ReleaseResults
from scripted.core.placed_action import Placed, parse_placed
from scripted.core.prompts import Recipe, prompt_of
from scripted.core.schedule import Schedule
from scripted.core.translation import action_of
from scripted.core.verb import Verb
from scripted.script.loader import load_test
from scripted.script.options import ScriptOptions
from scripted.search.execution import execute, record
from scripted.search.strategies import extras_of
from scripted.search.written_test import write_test
from scripted.shell.command_line import help_text, read_command
from scripted.shell.statements import VerbCall, lines_of
from scripted.shell.words import ShellWord, words_of

DOCS: Final = Path(__file__).parents[3] / "docs"
CLAUSES: Final = Path(__file__).parents[3] / "benchmarks/tables/clauses.md"
CONFIG: Final = EngineConfig(pp_size=2, page_size=4, max_total_tokens=512, chunked_prefill_size=64)
# Before the example: a request that is alive, with some cache beside it.
BASE: Final = (Placed(1, StartRequest(rid="a", prompt=40, new=12)), Placed(1, StartRequest(rid="c", prompt=20, seed=5)))
# After an example that acts on the grammars to come.
WITH_A_GRAMMAR: Final = StartRequest(rid="g", prompt=9, regex="[a-c]{2}")
WINDOWED: Final = CONFIG.model_copy(update={"model": "embedded-window"})
ADAPTED: Final = CONFIG.model_copy(update={"lora": "x=embedded-lora:1", "max_loras": 2})
DECODING: Final = CONFIG.model_copy(update={"role": "decode"})
PREFILLING: Final = CONFIG.model_copy(update={"role": "prefill"})
STEP: Final = 9
# What is found in no event of its own, and why.
WITHOUT_EVENT: Final = {
    HoldResults: "results that do not come",
    ReleaseResults: "the results themselves",
    StallStage: "results that do not come",
    ResumeStage: "the results themselves",
    HoldGrammars: "grammars that do not become ready",
    ReleaseGrammars: "that grammars are ready",
    HoldLoras: "LoRAs that are not read",
    ReleaseLoras: "that LoRAs are read",
    HoldTransfers: "transfers that do not end",
    ReleaseTransfers: "the ends of transfers",
    AdvanceClock: "the time of a step",
}
# What a search never adds to a workload by itself, and why.
NEVER_ADDED: Final = {
    ReleaseResults: "it undoes what is held; the strategies pct and random add it",
    ReleaseGrammars: "it undoes what is held; the strategy random adds it",
    ReleaseLoras: "it undoes what is held; generated targets with held LoRAs have it",
    ReleaseTransfers: "it undoes what is held; the strategy random adds it",
    Relieve: "it undoes pressure; the strategy random adds it",
    StallStage: "to the scheduler it is the same as results that are held",
    ResumeStage: "it undoes a stall, which is not added",
}
# Events that no action makes, and why.
WITHOUT_ACTION: Final = {
    GetStats: "it changes nothing; every run of the search ends with one",
    LoraRead: "the end of every reading, as a result is that of a microbatch",
    PagesReceived: "the end of every transfer, as a result is that of a microbatch",
    PagesSent: "the same in the engine that sends",
}
RIDS: Final = ("a", "b")
ROLES: Final = ("lockstep-decode", "lockstep-prefill")

ALL: Final = all_actions()
EXAMPLES: Final = [
    pytest.param(parse_placed(f"{STEP} {text}", all_actions()).action, id=text) for cls in ALL for text in cls.examples
]
each_example = pytest.mark.parametrize("action", EXAMPLES)
all_examples = every_case("action", EXAMPLES)
all_kinds = every_case("kind", ALL)


class Verbatim:
    """Reads events back with the names and prompts that the examples have."""

    def __init__(self, like: Action) -> None:
        self._like = like

    def name_of(self, rid: str) -> str:
        return rid.removesuffix("-0")  # the first choice of an answer of several

    def new_tokens_of(self, message: Generate) -> int:
        return message.sampling.max_new_tokens

    def regex_of(self, grammar: Grammar) -> str:
        return grammar.text

    def recipe_of(self, prompt: tuple[int, ...]) -> Recipe:
        start = self._like
        begun = len(prompt) - len(start.prompt_ids) if isinstance(start, StartRequest) and start.after else 0
        if not isinstance(start, StartRequest) or prompt[max(0, begun) :] != start.prompt_ids:
            return Recipe(seed=0)
        turn = {"after": start.after, "cut": start.cut, "begun": begun}
        return Recipe(seed=start.seed, shared=start.shared, tail=start.tail, parts=start.parts, **turn)


def config_for(action: Action) -> EngineConfig:
    """An engine that has what the action acts on."""
    if isinstance(action, HoldTransfers | ReleaseTransfers | FailTransfer):
        return DECODING
    if isinstance(action, StartRequest) and action.first_page is not None:
        return PREFILLING
    if isinstance(action, LoraLoad | LoraUnload) or (isinstance(action, StartRequest) and action.lora is not None):
        return ADAPTED
    return WINDOWED if isinstance(action, Press) and action.window is not None else CONFIG


def scheduled(action: Action) -> Schedule:
    after = [Placed(STEP, WITH_A_GRAMMAR)] if isinstance(action, FailGrammar) else []
    before = [Placed(1, HoldTransfers())] if isinstance(action, FailTransfer) else []
    return Schedule(config_for(action)).with_placed([*before, *BASE, Placed(STEP, action), *after])


def events_of(action: Action, records: list[StepRecord] | tuple[StepRecord, ...]) -> list[Event]:
    """The events that are this action's; a schedule does not say which stop token, sampling or stage it was."""
    events = [event for one in records for event in one.events if type(event) is action.event]
    reader = Verbatim(action)
    return [event for event in events if without_detail(action_of(event, ALL, reader)) == without_detail(action)]


def without_detail(action: Action | None) -> Action | None:
    if isinstance(action, FailTransfer):
        return FailTransfer()
    if not isinstance(action, StartRequest):
        return action
    kept = ("rid", "prompt", "new", "seed", "priority", "shared", "tail", "parts", "after", "cut")
    return StartRequest(**{name: getattr(action, name) for name in kept})


def values_of(action: Action) -> dict[str, Any]:
    return {name: getattr(action, name) for name in action.__struct_fields__}


@all_kinds
def test_an_action_has_examples_of_its_own_kind(kind: type[Action]) -> None:
    assert kind.examples, f"{kind.__name__} has no example of its clause"
    assert all(type(parse_placed(f"1 {text}", all_actions()).action) is kind for text in kind.examples)


def words() -> Mapping[str, ShellWord]:
    """Return the words that can be typed in the engine's shell."""
    found: dict[str, ShellWord] = {}

    def script(t: Any) -> Iterator[None]:
        found.update(words_of(t))
        yield

    EngineSim(CONFIG).run(script)
    return found


WORDS: Final = words()


def test_no_two_actions_have_a_word_in_common() -> None:
    words = [word for kind in ALL for word in kind.shell_words]
    tags = [kind.__struct_config__.tag for kind in ALL]
    assert len(set(words)) == len(words)
    assert len(set(tags)) == len(tags)


@all_examples
def test_its_text_is_what_is_read(action: Action) -> None:
    placed = Placed(STEP, action)
    assert parse_placed(str(placed), all_actions()) == placed


@all_kinds
def test_the_page_of_the_search_has_its_clause(kind: type[Action]) -> None:
    assert f"`{kind.__struct_config__.tag}" in CLAUSES.read_text(encoding="utf-8")


# -- the search --


@each_example
def test_a_run_with_it_keeps_every_promise(action: Action) -> None:
    assert execute(scheduled(action)).failure is None


@each_example
def test_what_it_becomes_is_read_back(action: Action) -> None:
    _, records = record(scheduled(action))
    if action.event is None:
        assert type(action) in WITHOUT_EVENT, f"{type(action).__name__} names no event; say why here"
    else:
        assert events_of(action, records), f"no event is {action}"


@all_kinds
def test_a_search_adds_it_or_has_a_reason(kind: type[Action]) -> None:
    roles = [Schedule.parse(text, of=of) for of in ROLES for text in adapter_named(of).workloads.values()]
    added = any(type(extra) is kind for base in (*WORKLOADS.values(), *roles) for extra in extras_of(base))
    assert added != (kind in NEVER_ADDED), f"{kind.__name__} says in extras() what of it is added; or say here why not"


@all_examples
def test_what_is_smaller_is_another_one_and_ends(action: Action) -> None:
    seen = [action]
    while smaller := list(seen[-1].smaller()):
        seen.append(smaller[0])
        assert len(set(seen)) == len(seen) < 1_000, f"{action} is shrunk forever"
    assert all(parse_placed(str(Placed(1, one)), all_actions()).action == one for one in seen)


# -- scripts --


@each_example
def test_its_line_of_script_does_it(action: Action) -> None:
    assert_in_a_script(action, lambda t, names: [exec(str(verb), names) for verb in action.verbs()])


@pytest.mark.parametrize("action", [one for one in EXAMPLES if not one.id.startswith("disconnect")])
def test_it_is_performed_in_a_script(action: Action) -> None:
    assert_in_a_script(action, lambda t, names: action.perform(t))


def assert_in_a_script(action: Action, act: Any) -> None:
    records: list[StepRecord] = []
    config = config_for(action)

    def script(t: Any) -> Any:
        names: dict[str, Any] = {"t": t, "prompt_of": prompt_of}
        if isinstance(action, FailTransfer):
            t.hold_transfers()
        # A prefill engine has no clients of its own.
        for placed in BASE if config.role != "prefill" else ():
            assert isinstance(placed.action, StartRequest)
            names[placed.action.variable] = placed.action.verbs()[0].perform(t)
        for _ in range(STEP - 1):
            yield
        act(t, names)
        if isinstance(action, FailGrammar):
            WITH_A_GRAMMAR.perform(t)
        for _ in range(6):
            yield
        records.extend(t.history)

    EngineSim(config).run(script, options=ScriptOptions())
    if action.event is not None:
        assert events_of(action, records), f"no event is {action}"


@all_examples
def test_its_verb_is_on_the_page_of_the_contract(action: Action) -> None:
    page = (DOCS / "script_api.md").read_text(encoding="utf-8")
    for verb in action.verbs():
        assert f"`{verb.name}(" in page
        assert verb.name.startswith("clock.") or hasattr(ScriptContext, verb.name)


@pytest.mark.parametrize("action", thinned(EXAMPLES, one_in=5))
def test_a_test_that_is_written_with_it_passes(action: Action, tmp_path: Path) -> None:
    written = write_test([scheduled(action)], name="written")
    assert written.said == ("the schedule does not fail; the test of it passes",)
    path = tmp_path / "test_written.py"
    path.write_text(written.text or "", encoding="utf-8")
    test = load_test(str(path), "test_written")
    EngineSim(test.config).run(test.script, options=test.options)


# -- reports and the shell --


@all_examples
def test_a_report_has_words_for_it(action: Action) -> None:
    _, records = record(scheduled(action))
    for event in events_of(action, records):
        assert event_text(event) not in ("", type(event).__name__)
    if isinstance(action, EngineCall):
        names = call_names(records)
        assert all(names[event.call_id] not in ("", type(event).__name__) for event in events_of(action, records))


@all_kinds
def test_it_can_be_typed_in_the_shell(kind: type[Action]) -> None:
    """The shell takes the script line of each of its examples, and the help has the word."""
    verbs = [verb for text in kind.examples for verb in parse_placed(f"1 {text}", all_actions()).action.verbs()]
    paths = {word.path: word for word in WORDS.values()}
    alive = [VerbCall(f"{rid} = t.start_req()", rid, rid) for rid in RIDS]
    for verb in verbs:
        word = paths[verb.name]
        assert word.text in re.findall(r"\w+", help_text(WORDS).partition("help WORD")[2])
        keywords = {name: getattr(value, "value", value) for name, value in verb.keywords.items()}
        values = [str(getattr(value, "text", value)) for value in verb.arguments]
        values += [f"{name}={value}" for name, value in keywords.items()]
        read = read_command(shlex.join([word.text, *values]), [] if kind is StartRequest else alive, WORDS)
        written = next(lines_of([read])).removeprefix(f"{read.name} = ")
        # A session has handles where a schedule has rids.
        line = str(Verb(verb.name, *verb.arguments, **keywords))
        assert written in {line, *(line.replace(f'"{rid}"', rid) for rid in RIDS)}


@all_examples
def test_its_clause_can_be_typed_in_the_shell(action: Action) -> None:
    """It is the line of script that does the same."""
    alive = [VerbCall(f"{rid} = t.start_req()", rid, rid) for rid in RIDS]
    clause = str(Placed(1, action)).removeprefix("1 ")
    read = read_command(clause, [] if isinstance(action, StartRequest) else alive, WORDS, ALL)
    (verb,) = action.verbs()
    keywords = {name: getattr(value, "value", value) for name, value in verb.keywords.items()}
    written = next(lines_of([read])).removeprefix(f"{read.name} = ")
    assert re.sub(r"[\"']", "", written) in (
        re.sub(r"[\"']", "", str(Verb(verb.name, *verb.arguments, **keywords))),
        # It may be the verb's own form as well, with the same name.
        f"t.{verb.name}({', '.join(f'{name}={value}' for name, value in as_words(action))})",
    )


def as_words(action: Action) -> list[tuple[str, str]]:
    return [(name, value) for name, _, value in (word.partition("=") for word in str(Placed(1, action)).split()[2:])]


# -- the engine's events --


@every_case("event", [one for union in (ClientMessage, OperatorEvent, PipelineEvent) for one in typing.get_args(union)])
def test_every_event_from_outside_is_an_actions(event: type) -> None:
    made = any(kind.event is event for kind in ALL)
    assert made != (event in WITHOUT_ACTION), f"no action becomes {event.__name__}; add one, or say here why not"


def test_a_result_is_no_action_unless_it_failed() -> None:
    assert action_of(Completion(microbatch_id=0, token_ids=(1,)), ALL, Verbatim(ResumeServing())) is None


def test_an_update_to_a_folder_is_read_back_as_one_to_embedded_weights() -> None:
    """A schedule runs without files."""
    event = Update(path_of_weights="/there/model", timeout_s=2).message("call-1")
    assert action_of(event, ALL, Verbatim(ResumeServing())) == Update(timeout_s=2.0)


def test_a_call_knows_its_own_message_from_another_ones() -> None:
    first, second = (kind for kind in ALL if kind.__name__ in ("Flush", "ResumeServing"))
    assert isinstance(call := first(), EngineCall)
    assert isinstance(other := second(), EngineCall)
    assert call.is_sent_as(call.message("any id"))
    assert not call.is_sent_as(other.message("any id"))
