"""Redaction: prompts and outputs as fingerprints, which lead to the same decisions of the scheduler.

A token becomes a keyed hash of the whole text up to it, so that two texts share a prefix exactly as far as the
originals do. The key is drawn at the start and never leaves the process. Tokens that end a request stay unchanged.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Final

import msgspec

from engine.core.checkpoint import Checkpoint, TreeSnapshot
from engine.core.messages import (
    Completion,
    Event,
    Generate,
    Grammar,
    PromptLogprob,
    SamplingParams,
    TokenOutput,
    salt_key,
)
from engine.core.scheduler.ports import StepResult
from engine.core.scheduler.request import Request
from engine.core.scheduler.scheduler import Scheduler

_KEY_BYTES: Final = 32
_STATE_BYTES: Final = 16
# Fingerprints start above every vocabulary, so that none of them ends a request.
_FIRST_FINGERPRINT: Final = 1 << 32
_FINGERPRINT_BYTES: Final = 6
_NO_TEXT: Final = b""
_NO_LOGPROB: Final = PromptLogprob(logprob=0.0, rank=0)


class Redactor:
    """Follows the text of every live request of one recording."""

    def __init__(self, key: bytes | None = None) -> None:
        self._key = os.urandom(_KEY_BYTES) if key is None else key
        # The hash state after each live request's text, keyed by the request, because rids are reused.
        self._texts: dict[Request, bytes] = {}
        self._live: dict[str, Request] = {}
        self._emitting: dict[int, list[Request]] = {}

    def redact(self, events: Sequence[Event], result: StepResult | None, scheduler: Scheduler) -> tuple[Event, ...]:
        """Redact the events of a completed step; ``result`` is None if it killed the scheduler."""
        redacted = tuple([self._redact(event, scheduler) for event in events])
        if result is not None:
            self._follow(result, scheduler)
        return redacted

    def redact_checkpoint(self, checkpoint: Checkpoint) -> Checkpoint:
        """Redact the tree. It has no token that ended a request: the KV of such a token is never computed."""
        tree, runs = checkpoint.tree, []
        states = {tree.root: _NO_TEXT}
        for run in tree.runs:
            states[run.id], tokens = self._text(states[run.parent], run.tokens)
            version, salt = run.kv_key
            kv_key = (version, salt_key(self._redact_salt(salt)))
            runs.append(msgspec.structs.replace(run, tokens=tokens, kv_key=kv_key))
        redacted: TreeSnapshot = msgspec.structs.replace(tree, runs=tuple(runs))
        grammars = tuple([(number, self._redact_grammar(one), ready) for number, one, ready in checkpoint.grammars])
        return msgspec.structs.replace(checkpoint, tree=redacted, grammars=grammars)

    def _redact(self, event: Event, scheduler: Scheduler) -> Event:
        if isinstance(event, Generate):
            return self._redact_prompt(event, scheduler)
        if isinstance(event, Completion):
            return self._redact_tokens(event)
        return event

    def _redact_prompt(self, message: Generate, scheduler: Scheduler) -> Generate:
        state, ids = self._text(_NO_TEXT, message.prompt_ids)
        request = scheduler.find_request(message.rid)
        if request is not None and request not in self._texts:
            self._texts[request] = state
            self._live[message.rid] = request
        grammar = message.sampling.grammar
        sampling: SamplingParams = msgspec.structs.replace(
            message.sampling, stop=(), grammar=None if grammar is None else self._redact_grammar(grammar)
        )
        salt = self._redact_salt(salt_key(message.cache_salt))
        return msgspec.structs.replace(message, prompt_ids=ids, sampling=sampling, cache_salt=salt)

    def _redact_salt(self, key: int) -> str | None:
        """Return a replacement for the salt with this key."""
        if not key:
            return None
        return hashlib.blake2b(str(key).encode(), key=self._key, digest_size=_STATE_BYTES).hexdigest()

    def _redact_grammar(self, grammar: Grammar) -> Grammar:
        """Keep the kind of a grammar, and which grammars are equal: the scheduler reads nothing else."""
        digest = hashlib.blake2b(grammar.text.encode(), key=self._key, digest_size=_STATE_BYTES)
        return Grammar(grammar.kind, digest.hexdigest())

    def _redact_tokens(self, completion: Completion) -> Completion:
        requests = self._emitting.pop(completion.microbatch_id, [])
        tokens = [self._token(request, token) for request, token in zip(requests, completion.token_ids, strict=False)]
        tokens += [0] * (len(completion.token_ids) - len(tokens))
        # The scheduler knows the number of prompt logprobs that a client has, not their values.
        parts = tuple((_NO_LOGPROB,) * len(part) for part in completion.prompt_logprobs)
        return msgspec.structs.replace(completion, token_ids=tuple(tokens), logprobs=(), prompt_logprobs=parts)

    def _token(self, request: Request, token: int) -> int:
        """Return a fingerprint in place of a request's next token; the scheduler needs to recognize stop tokens."""
        if token in request.stop_ids:
            return token
        state = self._texts.get(request)
        if state is None:
            return 0  # The request has ended: its result is dropped.
        self._texts[request], fingerprint = self._next(state, token)
        return fingerprint

    def _follow(self, result: StepResult, scheduler: Scheduler) -> None:
        """Follow the requests of the new microbatch; drop the ones that have ended."""
        if result.microbatch is not None:
            requests = scheduler.books.in_flight[-1].requests
            segments = result.microbatch.segments
            emitting = [one for segment, one in zip(segments, requests, strict=True) if segment.emits]
            self._emitting[result.microbatch.id] = emitting
        for reply in result.replies:
            if isinstance(reply, TokenOutput) and reply.finish_reason is not None:
                ended = self._live.get(reply.rid)
                if ended is not None and ended.is_finished:
                    del self._live[reply.rid]
                    self._texts.pop(ended, None)

    def _text(self, state: bytes, tokens: Sequence[int]) -> tuple[bytes, tuple[int, ...]]:
        """Return the hash state after tokens that continue a text, and their fingerprints."""
        ids = []
        for token in tokens:
            state, fingerprint = self._next(state, token)
            ids.append(fingerprint)
        return state, tuple(ids)

    def _next(self, state: bytes, token: int) -> tuple[bytes, int]:
        data = state + token.to_bytes(8, "little", signed=True)
        digest = hashlib.blake2b(data, key=self._key, digest_size=_STATE_BYTES + _FINGERPRINT_BYTES).digest()
        return digest[:_STATE_BYTES], _FIRST_FINGERPRINT + int.from_bytes(digest[_STATE_BYTES:], "little")
