"""The texts of the simulated model's tokens, and what a client must be told of an output: computed from all of its
tokens at once, without a session.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

from engine.core.messages import Generate, PromptLogprob, SamplingParams, TokenLogprob
from engine.frontend.text.answer import Decoder
from engine.frontend.text.reasoning import END
from scripted_lockstep.sessions.settings import SessionSettings

# The letter of a stop token. No other token has it, so a stop string is found only at this token.
STOP_LETTER: Final = ord("z")
_LETTERS: Final = b"xyabc "
_BYTES: Final = 256
# A token whose text ends the reasoning and continues after it, with spaces that belong to neither.
END_OF_REASONING: Final = 300
# Three tokens whose texts are one call of a tool; a limit or a stop may cut the output between them. After the first
# the arguments cannot be completed, after the second only a closer is missing.
_CALL: Final = (301, 302, 303)
# A token whose text is shown only on request.
SPECIAL: Final = 256
_SPECIAL_TEXT: Final = b"<s>"
TOOL: Final = "add"
CALL_ID: Final = "given1234"
_CALL_TEXTS: Final[Mapping[str, tuple[str, str, str]]] = {
    "hermes": ('<tool_call>{"name": "add", "arguments": {"n": ', "17", "}}</tool_call>"),
    "mistral": (f'[TOOL_CALLS]{TOOL}[CALL_ID]{CALL_ID}[ARGS]{{"n": ', "17", "}"),
}
# The last token of a call continues with text.
_AFTER_CALL: Final = "\n w"
_BEGUN: Final = '{"n": '
_COMPLETE: Final = '{"n": 17}'
REPLACEMENT: Final = "\ufffd"


class TextDecoder:
    """Decodes one byte per token; one more token ends the reasoning, and three write a call of ``family``."""

    def __init__(self, family: str = "hermes") -> None:
        first, number, end = _CALL_TEXTS.get(family, _CALL_TEXTS["hermes"])
        calls = zip(_CALL, (first, number, end + _AFTER_CALL), strict=True)
        self._texts = {
            SPECIAL: _SPECIAL_TEXT,
            END_OF_REASONING: f"a \n{END}\n b".encode(),
            **{token: text.encode() for token, text in calls},
        }

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [one for one in ids if one != SPECIAL] if skip_special_tokens else ids
        return b"".join([self._texts.get(one, bytes([one % _BYTES])) for one in shown]).decode(errors="replace")

    def id_to_token(self, id: int) -> str | None:  # noqa: A002 - the tokenizer's own name
        del id
        return None


DECODERS: Final = {"none": TextDecoder(), **{family: TextDecoder(family) for family in _CALL_TEXTS}}


def byte_tokens(tokens: Sequence[int], stops: Sequence[int], settings: SessionSettings) -> list[int]:
    """Turn the tokens of the simulated model into tokens of text, mostly one byte each.

    A stop token becomes the end of a stop string, one token ends the reasoning, if there is any, and with tools some
    tokens become calls. Without ``stops`` some characters take three bytes.
    """
    emitted: list[int] = []
    rest: list[int] = []
    has_reasoned = not settings.reasoning
    for token in tokens:
        if token in stops:
            # It also ends a call between two of its tokens.
            rest = []
            emitted.append(STOP_LETTER)
        elif rest:
            emitted.append(rest.pop(0))
        elif not has_reasoned and token % 3 == 0:
            has_reasoned = True
            emitted.append(END_OF_REASONING)
        elif settings.has_tools and token % 3 == 0:
            first, *rest = _CALL
            emitted.append(first)
        elif settings.special and token % 5 == 0:
            emitted.append(SPECIAL)
        elif not stops and token % 4 == 0:
            first, *rest = "\u20ac".encode()
            emitted.append(first)
        else:
            emitted.append(_LETTERS[token % len(_LETTERS)])
    return emitted


def logprob_of(token: int, place: int) -> TokenLogprob:
    """Return the logprob of a token, and its two most likely ones: itself and the next token."""
    own = -float(token) - place / 1024
    return TokenLogprob(logprob=own, top=((token, own), (token + 1, own - 1)))


def prompt_logprobs_of(message: Generate) -> tuple[PromptLogprob, ...]:
    """Return the logprobs of a prompt's tokens after the first requested one, different for each request.

    At each place the next token is the most likely one, and the prompt's own the second.
    """
    last = message.rid.rpartition("-")[2]
    own = int(last) / 64 if last.isdecimal() else 0.0
    scores = []
    for place, token in _scored(message):
        logprob = -float(token) - place / 1024 - own
        top = ((token + 1, logprob + 1), (token, logprob))
        scores.append(PromptLogprob(logprob, 2, top[: message.prompt_top_logprobs_num]))
    return tuple(scores)


def _scored(message: Generate) -> list[tuple[int, int]]:
    start = message.prompt_logprobs_from
    return list(enumerate(message.prompt_ids))[start + 1 :] if start >= 0 else []


class OutputParts(NamedTuple):
    """The parts of a text: its calls have a name, arguments and the id that the model gave, if any.

    ``cut`` says of each call whether its arguments are not complete. ``kinds`` has the first letter of each part.
    """

    reasoning: str
    content: str
    calls: list[tuple[str, str, str]]
    cut: list[bool]
    kinds: str

    @property
    def is_cut(self) -> bool:
        return any(self.cut)


def output_parts(text: str, settings: SessionSettings, *, is_models_end: bool) -> OutputParts:
    """Return the parts of a whole output. The model's own end completes a call that lacks only its closers."""
    reasoning = ""
    if settings.reasoning:
        reasoning, _, text = text.partition(END)
        reasoning, text = reasoning.strip(), text.lstrip()
    begun = "R" if reasoning else ""
    if not settings.has_tools:
        return OutputParts(reasoning, text, [], [], begun + "T" * bool(text))
    begin, number, end = _CALL_TEXTS[settings.tools]
    before, *parts = text.split(begin)
    if not parts:
        return OutputParts(reasoning, before, [], [], begun + "T" * bool(before))
    calls, said, cut = list[tuple[str, str, str]](), before, list[bool]()
    kinds = begun + "T" * bool(before.strip())
    for part in parts:
        is_shown = settings.parallel or not calls
        is_whole = part.startswith(number + end)
        after = part.removeprefix(number + end) if is_whole else ""
        said += after
        if is_shown:
            is_cut = not (is_whole or (is_models_end and part == number))
            cut.append(is_cut)
            calls.append((TOOL, _BEGUN + part if is_cut else _COMPLETE, CALL_ID if settings.tools == "mistral" else ""))
            kinds += "C"
        kinds += "T" * (bool(after.strip()) and kinds[-1] != "T")
    # Spaces before the first text after a call, and at the end, belong to no text.
    return OutputParts(reasoning, said.rstrip() if before.strip() else said.strip(), calls, cut, kinds)


def reasoning_tokens(ids: Sequence[int]) -> int:
    return ids.index(END_OF_REASONING) + 1 if END_OF_REASONING in ids else len(ids)


def stop_position(tokens: Sequence[int], sampling: SamplingParams, decoder: Decoder) -> tuple[int | None, int, str]:
    """Return the number of tokens up to the end of a stop string, the characters before it, and the string.

    None for the number if there is none.
    """
    scanned_from = 0
    for count in range(1, len(tokens) + 1):
        text = decoder.decode(tokens[:count])
        if count < sampling.min_new_tokens:
            # The text of a character is scanned with its last byte.
            scanned_from = len(text.rstrip(REPLACEMENT))
            continue
        ends = [(at + len(stop), at, stop) for stop in sampling.stop if (at := text.find(stop, scanned_from)) >= 0]
        if ends:
            _, at, stop = min(ends)
            return count, at, stop
    return None, 0, ""
