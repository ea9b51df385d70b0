"""The compiled grammars of one engine, and the state of each request in its grammar.

Owns the library's tokenizer, created with the first grammar. The scheduler decides which grammars are kept; a thread
carries out its orders in sequence, beside the computation, and answers each order to compile once.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from threading import Lock
from typing import Any, ClassVar, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from engine.core.errors import EngineError
from engine.core.messages import FinishReason, Grammar, GrammarKind
from engine.grammar.distinct import Guard, Vocabulary, needs_guard
from engine.grammar.expressions import short_text
from engine.grammar.patterns import QUIET
from engine.grammar.source import definition_of, patterns_in, rewritten_schema, why_stuck


class GrammarError(EngineError):
    """Raised for an output that its grammar does not allow, or for a grammar that is not compiled: the engine's fault.

    ``reason`` is the finish reason of the request.
    """

    reason: ClassVar = FinishReason.ERROR


class UnfollowableGrammar(GrammarError):
    """Raised if a grammar allows no further token of this vocabulary: the request's fault."""

    reason: ClassVar = FinishReason.INVALID


# The characters that close a JSON string, list or object, in runs of up to three, and the separator that ends a number.
_CLOSERS: Final = tuple("".join(one) for length in (1, 2, 3) for one in itertools.product('"]}', repeat=length))
_NEXT: Final = ","
# The number of likely tokens to try when a model wants to end: a trial takes a few microseconds.
MOST_ENDINGS: Final = 64
# The same number when a trial also computes the next mask, which takes ten times as long.
MOST_CHANGES: Final = 16
# The patterns of a grammar whose texts may end a string.
_MOST_PATTERNS: Final = 6
# A closer that may follow itself this often is text of a string: no lists or objects are that deep.
_MOST_REPEATED: Final = 256


class Closing(NamedTuple):
    """Ids of the tokens that close a JSON value, of the ones among them that begin with a quote, and of separators.

    ``escape`` is the backslash, if it is a token. ``texts`` are the tokens of texts that the patterns of a grammar
    match, the shortest first.
    """

    closers: tuple[int, ...] = ()
    quotes: frozenset[int] = frozenset()
    following: tuple[int, ...] = ()
    escape: int | None = None
    texts: tuple[tuple[int, ...], ...] = ()


class Matcher:
    """A request's state in its grammar, a function of the grammar and the request's output.

    ``compiled`` is the library's matcher in its initial state; it is never changed. ``closing`` are tokens that move a
    JSON output towards its end. ``guard`` keeps the items of lists distinct.
    """

    def __init__(
        self,
        compiled: Any,
        vocab_size: int,
        closing: Closing = Closing(),  # noqa: B008 - immutable
        guard: Guard | None = None,
    ) -> None:
        self._compiled = compiled
        self._guard = guard
        self._vocab_size = vocab_size
        self._closing = closing
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._matcher = self._compiled.deep_copy()
        self._items = None if self._guard is None else self._guard.begin()
        # The output that the matcher has consumed so far.
        self._taken: NDArray[np.int32] = np.empty(0, np.int32)

    def allowed(self, said: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Return the mask of the tokens that may follow the output ``said``; cheap if it extends the output of the last
        call.

        Only end tokens may follow a complete text. Raises GrammarError for an output that the grammar does not allow,
        and UnfollowableGrammar if no token may follow or the library hits a limit.
        """
        try:
            return self._allowed(said)
        except (GrammarError, KeyboardInterrupt, SystemExit):
            raise
        except BaseException as exc:  # a panic of the library is not an Exception, and makes its matcher unusable
            self._begin_anew()
            raise UnfollowableGrammar(
                f"the grammar cannot be followed after {len(said)} tokens of output: {type(exc).__name__}: {exc}; "
                "correct or simplify it"
            ) from exc

    def _allowed(self, said: NDArray[np.int32]) -> NDArray[np.bool_]:
        matcher = self._matcher
        common = _common(self._taken, said)
        if common < len(self._taken):  # The last call had wrong guesses.
            matcher.rollback(len(self._taken) - common)
            if self._items is not None:
                self._items.roll_back(len(self._taken) - common)
        new = said[common:].tolist()
        distinct = new if self._items is None else new[: self._items.take(new)]
        taken = common + (matcher.try_consume_tokens(distinct) if distinct else 0)
        if self._items is not None:
            self._items.roll_back(common + len(distinct) - taken)
        self._taken = said[:taken].copy()
        if not matcher.is_error() and taken < len(said):
            raise GrammarError(f"the grammar does not allow token {said[taken]} after {taken} tokens of output")
        mask = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            why = why_stuck(matcher)
            # The library's matcher never clears an error, which a wrong guess may have caused.
            self._begin_anew()
            raise UnfollowableGrammar(
                f"the grammar cannot be followed after {len(said)} tokens of output: {why}; correct or simplify it"
            )
        bits = np.frombuffer(mask, np.uint8)
        allowed = np.unpackbits(bits, bitorder="little", count=self._vocab_size).view(np.bool_)
        return allowed if self._items is None else self._items.narrow(matcher, allowed)

    def ending(self, allowed: NDArray[np.bool_], best: Sequence[int]) -> NDArray[np.bool_]:
        """Narrow the mask to tokens that lead to an end, for a model that wants to end here.

        Candidates are the ``best`` tokens and the tokens that close JSON. Prefers tokens after which the output may
        end, then tokens that close a value, then, in text of JSON that must still match a pattern, tokens after which
        it does, or the first of several, then, outside JSON, tokens that change the next mask; without any, returns
        ``allowed``, which must be the result of the last call of ``allowed``.
        """
        closers = [one for one in self._closing.closers if allowed[one] and not self._is_text(one, allowed)]
        following = [one for one in self._closing.following if allowed[one]]
        found = self._last_ones([*best, *closers])
        if not found and self._closing.closers:
            found = self._closing_ones(closers) or self._structural(following)
            found = found or self._matching(allowed, best) or self._leading()
        elif not found:
            found = self._changing(best[:MOST_CHANGES])
        if not found:
            return allowed
        narrowed = np.zeros_like(allowed)
        narrowed[found] = True
        return narrowed

    def _closing_ones(self, closers: Sequence[int]) -> list[int]:
        """Return the tokens that close a list or an object, else a string: inside a string only its end closes."""
        closing = self._changing(closers) or self._structural(closers)
        quotes = [one for one in closing if one in self._closing.quotes]
        brackets = [one for one in closing if one not in self._closing.quotes]
        # Beside the end of a string they may be its text.
        return (self._structural(brackets) if quotes else brackets) or quotes

    def _is_text(self, closer: int, allowed: NDArray[np.bool_]) -> bool:
        """Return whether a quote would be the text of a string, after a backslash: the string may go on."""
        escape = self._closing.escape
        is_in_string = escape is not None and closer in self._closing.quotes and bool(allowed[escape])
        return escape is not None and is_in_string and self._consumed([closer, escape]) == len([closer, escape])

    def _structural(self, tokens: Sequence[int]) -> list[int]:
        """Return the tokens that are no text of a string, in which they could be repeated."""
        return [one for one in tokens if self._consumed([one] * _MOST_REPEATED) < _MOST_REPEATED]

    def _matching(self, allowed: NDArray[np.bool_], best: Sequence[int]) -> list[int]:
        """Return tokens after which the open string may end.

        Tries the ``best`` and some of the others, which differ from position to position.
        """
        others = np.flatnonzero(allowed)
        some = np.roll(others, -len(self._taken))[:: max(1, len(others) // MOST_CHANGES)].tolist()
        return [one for one in [*best[:MOST_CHANGES], *some] if self._ends_string([one])]

    def _leading(self) -> list[int]:
        """Return the first token of the shortest text after which the open string may end."""
        return [one[0] for one in itertools.islice(filter(self._ends_string, self._closing.texts), 1)]

    def _ends_string(self, tokens: Sequence[int]) -> bool:
        """Return whether the open string may end after these tokens of text."""
        then = [*tokens, self._closing.closers[0]]
        # A backslash is in strings only.
        after = tokens[0] if self._closing.escape is None else self._closing.escape
        return self._consumed([*then, after]) == len(then)

    def _consumed(self, tokens: Sequence[int]) -> int:
        """Return how many of these tokens the library's matcher would take."""
        return int(self._matcher.deep_copy().try_consume_tokens(list(tokens)))

    def _last_ones(self, tokens: Sequence[int]) -> list[int]:
        """Return the allowed tokens after which the output may end."""
        return [one for one, matcher in self._after(tokens) if matcher.is_accepting()]

    def _changing(self, tokens: Sequence[int]) -> list[int]:
        """Return the allowed tokens that change the next mask."""
        before = self._matcher.deep_copy().compute_bitmask()
        return [one for one, matcher in self._after(tokens) if matcher.compute_bitmask() != before]

    def _after(self, tokens: Sequence[int]) -> Iterator[tuple[int, Any]]:
        """Yield a copy of the library's matcher after each of these tokens, until it hits a limit."""
        matcher = self._matcher.deep_copy()
        for token in dict.fromkeys(tokens):
            if not matcher.consume_token(token):
                return
            yield token, matcher
            if not matcher.rollback(1):
                return


def _common(one: NDArray[np.int32], other: NDArray[np.int32]) -> int:
    length = min(len(one), len(other))
    different = np.flatnonzero(one[:length] != other[:length])
    return int(different[0]) if different.size else length


class CompiledGrammars:
    """Compiled grammars by id; a thread may compile them. ``tokenizer`` returns the text of tokenizer.json."""

    def __init__(self, tokenizer: Callable[[], str], *, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
        self._read_tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._tokenizer: Any = None
        self._lock = Lock()
        self._wanted: set[int] = set()
        # The library's matcher, the tokens that close an output in JSON, and the guard of lists of distinct items.
        self._compiled: dict[int, tuple[Any, Closing, Guard | None]] = {}
        self._closing: Closing | None = None
        self._vocabulary: Vocabulary | None = None

    @property
    def ends(self) -> frozenset[int]:
        return frozenset(self._eos_token_ids)

    def want(self, grammar_id: int) -> None:
        """Announce an order to compile a grammar; ``forget`` discards the result of an unfinished one."""
        with self._lock:
            self._wanted.add(grammar_id)

    def compile(self, grammar_id: int, grammar: Grammar) -> GrammarError | None:
        """Compile a grammar; return the error, None on success."""
        matcher, error = self._matcher_of(grammar)
        guard = self._guard_of(grammar) if error is None else None
        is_json = grammar.kind is GrammarKind.JSON_SCHEMA and error is None
        closing = self._closing_tokens()._replace(texts=self._texts_of(grammar)) if is_json else Closing()
        with self._lock:
            if error is None and grammar_id in self._wanted:
                self._compiled[grammar_id] = matcher, closing, guard
            else:
                self._wanted.discard(grammar_id)
        return error

    def _matcher_of(self, grammar: Grammar) -> tuple[Any, GrammarError | None]:
        """Return the library's matcher of a grammar, or the error."""
        from llguidance import LLMatcher

        try:
            tokenizer = self._library_tokenizer()
        except BaseException as exc:  # noqa: BLE001 - a panic of the library is no Exception
            return None, GrammarError(f"no grammar can be compiled: {type(exc).__name__}: {exc}")
        try:
            matcher = LLMatcher(tokenizer, definition_of(grammar), log_level=QUIET)
        except BaseException as exc:  # noqa: BLE001 - a panic of the library is no Exception
            return None, UnfollowableGrammar(f"the grammar cannot be compiled: {type(exc).__name__}: {exc}")
        if matcher.is_error():
            why = " ".join(matcher.get_error().split())
            return None, UnfollowableGrammar(f"the grammar cannot be compiled: {why}; correct it")
        return matcher, None

    def _guard_of(self, grammar: Grammar) -> Guard | None:
        schema = rewritten_schema(grammar)
        if not needs_guard(schema):
            return None
        if self._vocabulary is None:
            tokenizer = self._library_tokenizer()
            self._vocabulary = Vocabulary([tokenizer.decode_bytes([token]) for token in range(self._vocab_size)])
        return Guard(schema, self._vocabulary)

    def begin(self, grammar_id: int) -> Matcher:
        """Return the initial matcher of a request. Raises GrammarError if the grammar is not compiled."""
        compiled = self._compiled.get(grammar_id)
        if compiled is None:
            raise GrammarError(
                f"grammar {grammar_id} must be compiled before it is used, but is not compiled or was forgotten"
            )
        return Matcher(compiled[0], self._vocab_size, compiled[1], compiled[2])

    def forget(self, grammar_id: int) -> None:
        """Drop a grammar; its running requests keep their matchers."""
        with self._lock:
            self._wanted.discard(grammar_id)
            self._compiled.pop(grammar_id, None)

    def clear(self) -> None:
        with self._lock:
            self._wanted.clear()
            self._compiled.clear()

    def _closing_tokens(self) -> Closing:
        if self._closing is None:
            tokenizer = self._library_tokenizer()
            closers = {text: tokenizer.greedy_tokenize(text) for text in _CLOSERS}
            of_one = {text: ids[0] for text, ids in closers.items() if len(ids) == 1}
            quotes = frozenset([one for text, one in of_one.items() if text.startswith('"')])
            following, escape = tokenizer.greedy_tokenize(_NEXT), tokenizer.greedy_tokenize("\\")
            self._closing = Closing(
                tuple(of_one.values()), quotes, tuple(following), escape[0] if len(escape) == 1 else None
            )
        return self._closing

    def _texts_of(self, grammar: Grammar) -> tuple[tuple[int, ...], ...]:
        """Return the tokens of short texts of a schema's patterns, of two of them in a row, and of their ends."""
        texts = [text for pattern in patterns_in(grammar)[:_MOST_PATTERNS] if (text := short_text(pattern))]
        whole = [*texts, *("".join(pair) for pair in itertools.permutations(texts, 2))]
        tokenizer = self._library_tokenizer()
        written = [tokenizer.greedy_tokenize(json.dumps(text, ensure_ascii=False)[1:-1]) for text in whole]
        ends = {tuple(tokens[at:]) for tokens in written for at in range(len(tokens))}
        return tuple(sorted(ends, key=lambda tokens: (len(tokens), tokens)))

    def _library_tokenizer(self) -> Any:
        """Return the library's tokenizer, created once: that takes 200 ms for 150,000 tokens."""
        if self._tokenizer is None:
            from llguidance import LLTokenizer

            ends = self._eos_token_ids
            self._tokenizer = LLTokenizer(self._read_tokenizer(), n_vocab=self._vocab_size, eos_token=ends)
        return self._tokenizer
