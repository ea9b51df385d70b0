"""The settings of the sessions' adapter: the fields of a client's request, and how client and scheduler behave."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

MOST_DELAY: Final = 3
# A scheduler that refuses early has room for this many requests.
MOST_SENT: Final = 4


class SessionSettings(msgspec.Struct, frozen=True):
    """The fields of a client's request, and how it behaves.

    Every reply has ``n`` choices for each of its ``prompts``; a reply of blocks has one, and another reply beside it. A
    client reads in each ``lag``-th step with an event, and in all steps without one. A client that ``leaves`` hangs up
    instead of having an operator abort its request; a ``hasty`` one calls it off in the step after it sent it, and
    sends it again. A request that is called off is sent again ``retries`` times under the same rid, and called off
    again but for the last time. With ``times_out`` some requests run out of time instead. The front end's messages
    reach the scheduler ``delay`` steps later. A scheduler that ``refuses`` early has no room for a reply while it has
    ``MOST_SENT`` requests, and says so before it answers earlier messages; in turn it refuses what arrives in every
    other step. ``turn_tokens`` and ``turn_outputs`` bound the tokens sent and the outputs read in a step. With
    ``stops`` all choices but the first have stop strings that their outputs often contain, which ``shows_stop`` leaves
    in the text; with ``least`` these count from the token on that completes the first one. ``stop_tokens`` lets the
    scheduler end a request at a stop token. ``usage`` selects the token counts of a stream: none, at its end, or also
    in each event. ``tools`` is the family that writes the calls, if any; without ``parallel`` only the first call is
    shown. With ``scores`` a native reply, or a whole completion or chat, has logprobs of its prompt; ``tops`` is the
    number of most likely tokens beside them. ``turn_values`` bounds the prompt logprobs that are read in a step. With
    ``special`` some tokens are special ones, whose text only a client that ``shows_special`` is shown.
    """

    protocol: Literal["completions", "chat", "messages", "responses", "native"] = "completions"
    stream: bool = True
    n: int = 2
    prompts: int = 1
    echo: bool = False
    logprobs: bool = True
    scores: bool = False
    tops: int = 0
    special: bool = False
    shows_special: bool = False
    usage: Literal["end", "each", "none"] = "end"
    reasoning: bool = False
    tools: Literal["none", "hermes", "mistral"] = "none"
    parallel: bool = True
    stops: bool = True
    shows_stop: bool = False
    stop_tokens: bool = False
    least: bool = False
    leaves: bool = False
    hasty: bool = False
    retries: int = 0
    times_out: bool = False
    refuses: Literal["never", "early", "in_turn"] = "never"
    delay: int = 0
    lag: int = 1
    turn_tokens: int = 3
    turn_outputs: int = 2
    turn_values: int = 1000
    depth: int = 2

    def __post_init__(self) -> None:
        if min(self.n, self.prompts, self.lag, self.turn_tokens, self.turn_outputs, self.turn_values, self.depth) < 1:
            raise ValueError(f"every number of {self} is at least 1")
        if min(self.retries, self.delay) < 0 or self.delay > MOST_DELAY:
            raise ValueError(f"a client retries 0 times or more, and a message takes 0 to {MOST_DELAY} steps: {self}")
        if self.protocol != "completions" and (self.prompts > 1 or self.echo):
            raise ValueError("only a completion has several prompts and echoes them")
        if self.protocol in ("completions", "native") and self.has_parts:
            raise ValueError("only a chat tells reasoning and calls apart")
        if not 0 <= self.tops <= 2:
            raise ValueError(f"the model tells two most likely tokens at most: {self}")
        if self.times_out and self.leaves:
            raise ValueError("an abort is either the client's or the clock's")
        if self.hasty and (not self.delay or self.refuses == "early"):
            raise ValueError("a hasty client calls off what no scheduler has seen")

    @property
    def is_chat(self) -> bool:
        return self.protocol == "chat"

    @property
    def is_native(self) -> bool:
        return self.protocol == "native"

    @property
    def has_blocks(self) -> bool:
        return self.protocol in ("messages", "responses")

    @property
    def choices(self) -> int:
        """Return the number of choices for each prompt."""
        return 1 if self.has_blocks else self.n

    @property
    def has_parts(self) -> bool:
        """True if an output is more than plain text."""
        return self.reasoning or self.has_tools

    @property
    def has_tools(self) -> bool:
        return self.tools != "none"
