"""A request's place in its grammar: what may follow, what is taken back, and when it is complete."""

from __future__ import annotations

import json
import random
import re

import numpy as np
import pytest

from engine.core.limits import EMBEDDED_FACTS
from engine.core.messages import FinishReason, Grammar, GrammarKind, GrammarReady
from engine.core.plan import GrammarOrder
from engine.grammar.compiled import CompiledGrammars, GrammarError, Matcher, UnfollowableGrammar
from engine.grammar.source import fault_of, schema_grammar
from engine.model.embedded import embedded_folder
from engine.pipeline.beside import GrammarCompiler

END = EMBEDDED_FACTS.eos_token_ids[0]
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "age", "ok"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def grammars() -> CompiledGrammars:
    text = (embedded_folder(0, windowed=False) / "tokenizer.json").read_text(encoding="utf-8")
    facts = EMBEDDED_FACTS
    return CompiledGrammars(lambda: text, vocab_size=facts.vocab_size, eos_token_ids=facts.eos_token_ids)


def matcher_of(grammars: CompiledGrammars, grammar: Grammar, number: int = 1) -> Matcher:
    grammars.want(number)
    assert grammars.compile(number, grammar) is None
    return grammars.begin(number)


def ids(text: str) -> np.ndarray:
    return np.array(list(text.encode()), np.int32)


def allowed(matcher: Matcher, said: str) -> list[int]:
    return np.flatnonzero(matcher.allowed(ids(said))).tolist()


def test_a_complete_output_can_only_end(grammars: CompiledGrammars) -> None:
    matcher = matcher_of(grammars, Grammar(GrammarKind.REGEX, "[a-c]{2}x?"))
    assert allowed(matcher, "") == [97, 98, 99]
    assert allowed(matcher, "ab") == [120, END]
    assert allowed(matcher, "abx") == [END]


def test_a_guess_is_taken_back(grammars: CompiledGrammars) -> None:
    """B11: with drafts the same row is asked for several outputs, of which the later ones may be wrong."""
    matcher = matcher_of(grammars, Grammar(GrammarKind.REGEX, "[a-c]{3}[0-9]{2}"))
    assert allowed(matcher, "ab") == [97, 98, 99]
    assert allowed(matcher, "abc")[0] == ord("0")
    with pytest.raises(GrammarError, match="does not allow token 120 after 3 tokens"):
        matcher.allowed(ids("abcx"))
    assert allowed(matcher, "aba")[-1] == ord("9")
    assert allowed(matcher, "a") == [97, 98, 99]
    assert allowed(matcher, "abc12") == [END]


LISTS = {"type": "array", "items": {"$ref": "#/$defs/l"}}
UNBOUNDED = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "size": {"type": "number"},
        "inner": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]},
    },
    "required": ["name", "tags", "size", "inner"],
}


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize(
    ("grammar", "most"),
    [
        (schema_grammar(UNBOUNDED), 90),
        (schema_grammar({"type": "array", "items": UNBOUNDED, "minItems": 1}), 95),
        (Grammar(GrammarKind.REGEX, "[a-z]+x[0-9]+"), 40),
    ],
    ids=["object", "array", "regex"],
)
def test_a_model_that_would_end_is_led_to_an_end(
    grammars: CompiledGrammars, grammar: Grammar, most: int, seed: int
) -> None:
    """46.7: it writes at random for a while, then would end at each token; without a lead it goes on for thousands."""
    matcher, chance, said, ended = matcher_of(grammars, grammar), random.Random(seed), np.empty(0, np.int32), 0
    while not (mask := matcher.allowed(said))[END]:
        if len(said) >= 20:
            ended += 1
            best = np.flatnonzero(mask).tolist()
            chance.shuffle(best)
            mask = matcher.ending(mask, best[:64])
        assert ended < most, bytes(said.astype(np.uint8))
        said = np.append(said, np.int32(chance.choice(np.flatnonzero(mask).tolist())))


def test_what_leads_to_an_end_may_follow(grammars: CompiledGrammars) -> None:
    matcher = matcher_of(grammars, schema_grammar(UNBOUNDED))
    for said in ("{", '{"name": "ab', '{"name": "a", "tags": ["b', '{"name": "", "tags": [], "size": 1'):
        mask = matcher.allowed(ids(said))
        led = matcher.ending(mask, np.flatnonzero(mask).tolist()[:64])
        assert led.any()
        assert not (led & ~mask).any()
    assert np.flatnonzero(led).tolist() == [ord(",")]
    mask = matcher.allowed(ids('{"name": "ab'))
    assert np.flatnonzero(matcher.ending(mask, [])).tolist() == [ord('"')]


@pytest.mark.parametrize("pattern", ["a|b", r"[\]},]*b", "z$"])
def test_text_that_must_still_match_is_led_to_a_match(grammars: CompiledGrammars, pattern: str) -> None:
    """Brackets and commas are text there, and lead nowhere."""
    matcher = matcher_of(grammars, schema_grammar({"type": "array", "items": {"pattern": pattern}, "minItems": 1}))
    chance, said = random.Random(0), ids('["')
    while not (mask := matcher.allowed(said))[END]:
        assert len(said) < 60, bytes(said.astype(np.uint8))
        led = np.flatnonzero(matcher.ending(mask, [])).tolist()
        said = np.append(said, np.int32(chance.choice(led)))


def test_lists_within_each_other_are_closed(grammars: CompiledGrammars) -> None:
    """The next mask is the same after each of their ends."""
    matcher = matcher_of(grammars, schema_grammar({"$defs": {"l": LISTS}, "$ref": "#/$defs/l"}))
    mask = matcher.allowed(ids("[[" * 50 + "]"))
    assert np.flatnonzero(matcher.ending(mask, [])).tolist() == [ord("]")]


@pytest.mark.parametrize("names", [{"enum": ["a", "b"]}, {"type": "string", "enum": ["b", "a"]}])
def test_no_name_is_awaited_after_the_last_one(grammars: CompiledGrammars, names: dict[str, object]) -> None:
    """As zod describes a record whose keys are an enumeration."""
    record = {
        "type": "object",
        "propertyNames": names,
        "additionalProperties": {"type": "null"},
        "required": ["a", "b"],
    }
    matcher = matcher_of(grammars, schema_grammar(record))
    first, last = names["enum"]
    assert ord(",") in allowed(matcher, f'{{"{first}":null')
    assert {*b",}"} & {*allowed(matcher, f'{{"{first}":null,"{last}":null')} == {*b"}"}


@pytest.mark.parametrize("seed", range(40))
def test_every_random_output_is_json_of_the_schema(grammars: CompiledGrammars, seed: int) -> None:
    matcher, chance, said = matcher_of(grammars, schema_grammar(SCHEMA)), random.Random(seed), np.empty(0, np.int32)
    for _ in range(2000):
        token = chance.choice(np.flatnonzero(matcher.allowed(said)).tolist())
        if token == END:
            break
        said = np.append(said, np.int32(token))
    value = json.loads(bytes(said.tolist()).decode())
    assert value.keys() <= SCHEMA["properties"].keys()  # type: ignore[attr-defined]
    assert isinstance(value["name"], str)
    assert len(value["name"]) <= 6
    assert 0 <= value["age"] <= 150
    assert isinstance(value["ok"], bool)
    assert set(value.get("tags", ())) <= {"a", "b"}


DEAD_END = "start: /[a-d]{4}/ MORE\nMORE: /x/ & /y/"
# Beyond the library's bound on what may come next, from the fifth token on.
TOO_MANY = "start: /[a-d]{4}/ t\nt: " + " | ".join(f"r{i}" for i in range(2100))
TOO_MANY += "".join(f'\nr{i}: "x" s{i}\ns{i}: "c"' for i in range(2100))


@pytest.mark.parametrize(
    ("text", "why"), [(DEAD_END, "nothing may come there"), (TOO_MANY, r"has 2\d{3} items; max is 2000")]
)
def test_a_grammar_that_fails_late_is_the_requests_own_fault(
    grammars: CompiledGrammars, text: str, why: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """A05: no look at its beginning shows it, and the library must not write to the log."""
    assert fault_of(Grammar(GrammarKind.EBNF, text)) is None
    matcher = matcher_of(grammars, Grammar(GrammarKind.EBNF, text))
    assert allowed(matcher, "abc") == [97, 98, 99, 100]
    with pytest.raises(
        UnfollowableGrammar, match=f"after 4 tokens of output: .*{why}.*; correct or simplify it"
    ) as caught:
        matcher.allowed(ids("abcd"))
    assert caught.value.reason is FinishReason.INVALID
    assert capfd.readouterr() == ("", "")


def test_a_guess_into_a_dead_end_is_taken_back(grammars: CompiledGrammars) -> None:
    """B11: the library never leaves its error, and it was the guess's."""
    text = 'start: /[a-d]{2}/ ("x" dead | "y")\ndead: dead'
    matcher = matcher_of(grammars, Grammar(GrammarKind.EBNF, text))
    assert allowed(matcher, "ab") == [120, 121]
    with pytest.raises(UnfollowableGrammar, match="after 3 tokens"):
        matcher.allowed(ids("abx"))
    assert allowed(matcher, "aby") == [END]


def test_whose_fault_it_is_that_a_grammar_is_not_compiled() -> None:
    """A token that the vocabulary lacks is the request's; a tokenizer that cannot be read is not."""

    def missing() -> str:
        raise FileNotFoundError("tokenizer.json")

    text = (embedded_folder(0, windowed=False) / "tokenizer.json").read_text(encoding="utf-8")
    for read, reason in ((lambda: text, FinishReason.INVALID), (missing, FinishReason.ERROR)):
        compiled = CompiledGrammars(read, vocab_size=EMBEDDED_FACTS.vocab_size, eos_token_ids=(END,))
        error = compiled.compile(1, Grammar(GrammarKind.EBNF, "start: <[99999]>"))
        assert error is not None
        assert error.reason is reason


def test_a_copy_for_each_request(grammars: CompiledGrammars) -> None:
    one = matcher_of(grammars, Grammar(GrammarKind.CHOICE, '["yes", "no"]'))
    other = grammars.begin(1)
    assert allowed(one, "y") == [ord("e")]
    assert allowed(other, "n") == [ord("o")]


def test_a_grammar_in_gbnf(grammars: CompiledGrammars) -> None:
    matcher = matcher_of(grammars, Grammar(GrammarKind.EBNF, 'root ::= "a" num\nnum ::= [0-9]'))
    assert allowed(matcher, "") == [97]
    assert allowed(matcher, "a7") == [END]


def test_what_is_forgotten_cannot_begin(grammars: CompiledGrammars) -> None:
    before = matcher_of(grammars, Grammar(GrammarKind.REGEX, "ab"), 5)
    grammars.forget(5)
    with pytest.raises(GrammarError, match="grammar 5 must be compiled before it is used"):
        grammars.begin(5)
    assert allowed(before, "a") == [98]


def test_a_grammar_that_is_forgotten_while_it_is_compiled_is_not_kept(grammars: CompiledGrammars) -> None:
    assert grammars.compile(6, Grammar(GrammarKind.REGEX, "a")) is None
    with pytest.raises(GrammarError, match="grammar 6 must be compiled"):
        grammars.begin(6)


def test_what_cannot_be_compiled_says_why(grammars: CompiledGrammars) -> None:
    grammars.want(7)
    error = grammars.compile(7, Grammar(GrammarKind.REGEX, "(a"))
    assert error is not None
    assert re.search("cannot be compiled.*unclosed group", str(error))


def test_the_compiler_answers_every_order_once(grammars: CompiledGrammars) -> None:
    answers: list[GrammarReady] = []
    compiler = GrammarCompiler(grammars, answers.append)
    for number in range(10, 20):
        compiler.order(GrammarOrder(number, Grammar(GrammarKind.REGEX, f"a{{{number}}}" if number % 2 else "(")))
        if number == 13:
            compiler.order(GrammarOrder(number, None))
    compiler.wait()
    assert [answer.grammar_id for answer in answers] == list(range(10, 20))
    assert [answer.error is None for answer in answers] == [bool(number % 2) for number in range(10, 20)]


class Panic(BaseException):
    """The library's exception when it gives up, which is no Exception."""


class Panicking:
    """A library's matcher that gives up after some tokens."""

    def __init__(self, most: int) -> None:
        self._most = most

    def deep_copy(self) -> Panicking:
        return Panicking(self._most)

    def try_consume_tokens(self, tokens: list[int]) -> int:
        self._most -= len(tokens)
        if self._most < 0:
            raise Panic("a bound was met")
        return len(tokens)

    def is_error(self) -> bool:
        return False

    def compute_bitmask(self) -> bytes:
        return b"\xff"


def test_a_panic_of_the_library_is_the_request_s_own_end() -> None:
    """A panic is no Exception, so `except Exception` did not catch it."""
    matcher = Matcher(Panicking(2), 8)
    assert matcher.allowed(np.array([1, 2], np.int32)).all()
    with pytest.raises(UnfollowableGrammar, match="after 3 tokens of output: Panic: a bound was met; correct"):
        matcher.allowed(np.array([1, 2, 3], np.int32))
    assert matcher.allowed(np.array([1], np.int32)).all(), "a guess that led there spoils nothing"
