"""Samples tokens from logits on the last stage: greedy, temperature, filters, penalties, biases, grammars, logprobs.

The random number of a token depends only on (seed, position), so batching, chunking and retraction never change a
request's output. Owns each row's sampling spec and its grammar state; never keeps tokens.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from engine.core.errors import IntegrityError
from engine.core.messages import RequestError, TokenLogprob
from engine.core.plan import SamplingSpec, Segment
from engine.grammar.compiled import MOST_ENDINGS, CompiledGrammars, GrammarError, Matcher
from engine.model.sampler_output import Choice, Sampled
from engine.model.transfer import sent

# Maps a segment to the ids of its request's tokens so far, by position, including the last one computed.
History = Callable[[Segment], NDArray[np.int32]]

# Below this a division in 32-bit floats gives infinities, whose difference is NaN. A lower temperature is greedy
# anyway.
MIN_TEMPERATURE, MAX_TEMPERATURE = 1e-6, 1e6
MIN_REPETITION_PENALTY = 1e-6

_log = logging.getLogger(__name__)

_MASK = 2**64 - 1
_GREEDY = SamplingSpec(seed=0)


def uniform(seed: int, position: int) -> float:
    """Hash ``(seed, position)`` to a number in [0, 1), the same on every machine: the SplitMix64 finalizer, applied
    twice.
    """
    return (_mix(_mix(seed) ^ position) >> 12) * 2.0**-52


class Sampler:
    """Samples for the rows of one engine. ``never`` holds ids that no request may ever sample.

    After a sample, ``errors`` has the requests whose grammar cannot be followed or whose token could not be chosen.
    ``dead_ends`` are the places after a draft at which that happened: their tokens are void, and the draft must not be
    accepted.
    """

    def __init__(
        self, *, never: Sequence[int], vocab_size: int, device: torch.device, grammars: CompiledGrammars | None = None
    ) -> None:
        self._specs: dict[int, SamplingSpec] = {}
        self._grammars = grammars
        self._ends = frozenset[int]() if grammars is None else grammars.ends
        self._matchers: dict[int, Matcher] = {}
        self.errors: tuple[RequestError, ...] = ()
        self.dead_ends: tuple[int, ...] = ()
        self._never = torch.zeros(vocab_size, device=device)
        self._never[[token for token in never if token < vocab_size]] = float("-inf")
        self._any_never = bool(never)

    def adopt(self, segment: Segment) -> None:
        """Note the sampling spec of a row's new request. Its history determines its grammar state."""
        if segment.sampling is not None:
            self._specs[segment.row] = segment.sampling
            self._matchers.pop(segment.row, None)

    def spec_of(self, segment: Segment) -> SamplingSpec:
        return self._specs.get(segment.row, _GREEDY)

    def forget(self) -> None:
        """Drop every row's spec; only while no request owns a row."""
        self._specs.clear()
        self._matchers.clear()
        self.errors, self.dead_ends = (), ()

    def reads_history(self, segment: Segment) -> bool:
        """Return whether a segment's token depends on its request's earlier tokens. Works before ``adopt`` too."""
        spec = segment.sampling or self.spec_of(segment)
        return bool(spec.grammar_id) or spec.has_penalty

    def sample(self, logits: torch.Tensor, segments: Sequence[Segment], history: History) -> Sampled:
        """Sample a token for each of ``segments`` from ``logits`` [segments, vocabulary], and its logprobs on request.

        Logprobs are of the model's own distribution over the tokens that the grammar allows, before biases, penalties,
        temperature and filters. An exception for one segment ends only its request; raises if every segment fails.
        """
        try:
            choice = self.choose(logits, segments, history)
            return choice.to_numbers(choice.tensors)
        except IntegrityError:
            raise
        except Exception as exc:  # noqa: BLE001 - sampling one by one finds the failing segment
            return self._sample_each(logits, segments, history, exc)

    def _sample_each(
        self, logits: torch.Tensor, segments: Sequence[Segment], history: History, failure: Exception
    ) -> Sampled:
        """Sample the segments one by one after sampling them together has failed."""
        ids: list[int] = []
        logprobs: list[TokenLogprob | None] = []
        errors: list[RequestError] = []
        dead_ends: list[int] = []
        raised, before = 0, None
        for place, segment in enumerate(segments):
            is_draft, before = segment.row == before, segment.row
            own: tuple[RequestError, ...] = ()
            try:
                choice = self.choose(logits[place : place + 1], [segment], history)
                (token,), said = choice.to_numbers(choice.tensors)
                own = self.errors
            except IntegrityError:
                raise
            except Exception as exc:  # noqa: BLE001 - ends this segment's request
                _log.warning("no token can be chosen for %s", segment.rid, exc_info=exc)
                why = f"no token can be chosen after {_position(segment)} tokens: {type(exc).__name__}: {exc}"
                token, said, own = 0, (), (RequestError(segment.rid, why),)
                raised += 1
            ids.append(token)
            logprobs.append(said[0] if said else None)
            if own and is_draft:
                dead_ends.append(place)
            else:
                errors += own
        if raised == len(segments):
            raise failure
        self.errors, self.dead_ends = tuple(errors), tuple(dead_ends)
        return tuple(ids), tuple(logprobs) if any(logprobs) else ()

    def choose(self, logits: torch.Tensor, segments: Sequence[Segment], history: History) -> Choice:
        """Sample as ``sample`` does, but leave the choice on the device. Waits only if a segment ``reads_history``."""
        self.errors, self.dead_ends = (), ()
        if not segments:
            return Choice(torch.empty(0, dtype=torch.int64), logits, ())
        raw = logits.float()
        specs = list(map(self.spec_of, segments))
        masked = [place for place, spec in enumerate(specs) if spec.grammar_id]
        if masked:
            raw = self._masked(raw, masked, specs, segments, history)
        if all(map(_is_plain, specs)):
            return Choice(_greedy(self._without_never(raw, masked) if self._any_never else raw), raw, specs)
        scores = self._without_never(raw, masked) if self._any_never else raw.clone()
        _add_biases(scores, specs)
        _suppress(scores, specs, segments)
        for row, (segment, spec) in enumerate(zip(segments, specs, strict=True)):
            if spec.has_penalty:
                _penalize(scores[row], spec, history(segment))
        return Choice(_draw(torch.argmax(scores, dim=-1), scores, specs, segments), raw, specs)

    def _without_never(self, raw: torch.Tensor, masked: Sequence[int]) -> torch.Tensor:
        """Forbid the ids that no request may sample, unless a row's grammar allows nothing else, such as its end."""
        scores = raw + self._never
        if masked:
            places = list(masked)
            nothing_left = scores[places].isneginf().all(dim=-1, keepdim=True)
            scores[places] = torch.where(nothing_left, raw[places], scores[places])
        return scores

    def _masked(
        self,
        raw: torch.Tensor,
        places: Sequence[int],
        specs: Sequence[SamplingSpec],
        segments: Sequence[Segment],
        history: History,
    ) -> torch.Tensor:
        """Apply the grammars' masks at these places; no mask if a grammar cannot be followed.

        A row with drafts has several consecutive places. Tokens after a forbidden draft are never used. If the model's
        own choice is an end token that the grammar forbids, only tokens that lead to an end remain.
        """
        allowed = np.ones((len(places), raw.shape[-1]), np.bool_)
        errors: list[RequestError] = []
        dead_ends: list[int] = []
        before = None
        own = raw[list(places)].argmax(dim=-1).tolist()
        for line, place, choice in zip(allowed, places, own, strict=True):
            segment, spec = segments[place], specs[place]
            is_draft, before = segment.row == before, segment.row
            try:
                matcher = self._matcher_of(segment.row, spec)
                line[:] = matcher.allowed(history(segment)[spec.prompt_tokens :])
                if choice in self._ends and not line[choice] and not _must_go_on(spec, segment):
                    line[:] = matcher.ending(line, _best(raw[place], line))
            except GrammarError as exc:
                if is_draft:
                    dead_ends.append(place)
                else:
                    errors.append(RequestError(segment.rid, str(exc), exc.reason))
        self.errors, self.dead_ends = tuple(errors), tuple(dead_ends)
        forbidden = torch.from_numpy(~allowed).to(raw.device)
        masked = raw.clone()
        masked[list(places)] = raw[list(places)].masked_fill(forbidden, float("-inf"))
        return masked

    def _matcher_of(self, row: int, spec: SamplingSpec) -> Matcher:
        """Return a row's matcher; a new request gets a new matcher, which catches up with the request's history."""
        matcher = self._matchers.get(row)
        if matcher is None:
            assert self._grammars is not None, f"grammar {spec.grammar_id} is used on a stage that compiles none"
            matcher = self._matchers[row] = self._grammars.begin(spec.grammar_id)
        return matcher


def _must_go_on(spec: SamplingSpec, segment: Segment) -> bool:
    """Return whether a request is below its minimum output."""
    return bool(spec.suppressed_ids) and _position(segment) < spec.suppressed_until


def _best(logits: torch.Tensor, allowed: NDArray[np.bool_]) -> list[int]:
    """Return the allowed tokens with the largest logits, best first."""
    ids = np.flatnonzero(allowed)
    values = logits.cpu().numpy()[ids]
    order = np.argsort(-values, kind="stable")[:MOST_ENDINGS]
    best: list[int] = ids[order].tolist()
    return best


def _is_plain(spec: SamplingSpec) -> bool:
    """Return whether the choice is the model's largest logit at every position."""
    return spec.temperature <= 0 and not spec.suppressed_ids and not spec.logit_bias and not spec.has_penalty


def _greedy(scores: torch.Tensor) -> torch.Tensor:
    """Return the first id with the largest score of each row. On a CPU uses numpy: 12 us for 32 rows of 4,096, torch
    took 134.
    """
    if scores.device.type == "cpu":
        return torch.from_numpy(scores.numpy().argmax(axis=-1))
    return torch.argmax(scores, dim=-1)


def _mix(state: int) -> int:
    state = (state + 0x9E3779B97F4A7C15) & _MASK
    state = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    state = ((state ^ (state >> 27)) * 0x94D049BB133111EB) & _MASK
    return state ^ (state >> 31)


def _position(segment: Segment) -> int:
    """Return the absolute position of the token that a segment chooses."""
    return segment.start + len(segment.token_ids)


def _add_biases(scores: torch.Tensor, specs: Sequence[SamplingSpec]) -> None:
    biases = [(row, token, bias) for row, spec in enumerate(specs) for token, bias in spec.logit_bias]
    if biases:
        lines, tokens, values = zip(*biases, strict=True)
        places = np.array([lines, tokens], np.int64)
        (rows, ids), added = sent([places, np.array(values, np.float64)], scores.device)
        scores[rows, ids] += added.to(scores.dtype)


def _suppress(scores: torch.Tensor, specs: Sequence[SamplingSpec], segments: Sequence[Segment]) -> None:
    """Forbid the suppressed end tokens, unless a row's completed grammar allows nothing else."""
    suppressed = [
        row
        for row, (spec, segment) in enumerate(zip(specs, segments, strict=True))
        if spec.suppressed_ids and _position(segment) < spec.suppressed_until
    ]
    if not suppressed:
        return
    places = np.array([(row, token) for row in suppressed for token in specs[row].suppressed_ids], np.int64)
    (rows, ids), *_ = sent([places.T.copy()], scores.device)
    guided = [row for row in suppressed if specs[row].grammar_id]
    kept = [scores[row].clone() for row in guided]
    scores[rows, ids] = float("-inf")
    for row, line in zip(guided, kept, strict=True):
        scores[row].copy_(torch.where(scores[row].isneginf().all(), line, scores[row]))


def _penalize(scores: torch.Tensor, spec: SamplingSpec, tokens: NDArray[np.int32]) -> None:
    """Apply penalties: repetition counts prompt and output, frequency and presence only the output, as usual."""
    seen = torch.from_numpy(np.unique(tokens).astype(np.int64)).to(scores.device)
    values, repetition = scores[seen], max(spec.repetition_penalty, MIN_REPETITION_PENALTY)
    scores[seen] = torch.where(values > 0, values / repetition, values * repetition)
    said, counts = np.unique(tokens[spec.prompt_tokens :], return_counts=True)
    penalty = spec.presence_penalty + spec.frequency_penalty * torch.from_numpy(counts.astype(np.float32))
    scores[torch.from_numpy(said.astype(np.int64)).to(scores.device)] -= penalty.to(scores.device)


def _draw(
    best: torch.Tensor, scores: torch.Tensor, specs: list[SamplingSpec], segments: Sequence[Segment]
) -> torch.Tensor:
    """Draw the ids of rows with a temperature. Only rows with filters pay for sorting."""
    random = [row for row, spec in enumerate(specs) if spec.temperature > 0]
    filtered = [row for row in random if _has_filter(specs[row])]
    plain = [row for row in random if not _has_filter(specs[row])]
    for rows, draw in ((plain, _invert), (filtered, _draw_filtered)):
        if rows:
            own = [specs[row] for row in rows]
            numbers = [uniform(specs[row].seed, _position(segments[row])) for row in rows]
            columns = [numbers, list(map(_temperature, own))]
            if rows is filtered:
                columns += _filters(own, scores)
            places, values = sent([np.array(rows, np.int64), np.array(columns, np.float64)], scores.device)
            drawn, temperatures, *limits = values[:, :, None].unbind()
            chosen = scores if len(rows) == len(specs) else scores.index_select(0, places)
            # Subtracting the maximum first keeps a tiny temperature from dividing to infinity.
            scaled = (chosen - chosen.amax(dim=-1, keepdim=True)) / temperatures.float()
            best.index_copy_(0, places, draw(torch.softmax(scaled, dim=-1), drawn, *limits))
    return best


def _temperature(spec: SamplingSpec) -> float:
    return min(max(spec.temperature, MIN_TEMPERATURE), MAX_TEMPERATURE)


def _has_filter(spec: SamplingSpec) -> bool:
    return spec.top_k > 0 or spec.top_p < 1.0 or spec.min_p > 0.0


def _filters(specs: Sequence[SamplingSpec], scores: torch.Tensor) -> list[list[float]]:
    """Collect each row's top_k, top_p and min_p. top_p=1 keeps everything: rounding must not reach it early."""
    return [
        [spec.top_k if spec.top_k > 0 else scores.shape[-1] for spec in specs],
        [spec.top_p if spec.top_p < 1.0 else float("inf") for spec in specs],
        [spec.min_p for spec in specs],
    ]


def _draw_filtered(
    probabilities: torch.Tensor, numbers: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor
) -> torch.Tensor:
    """Sample after top-k, then top-p of the rest, then min-p relative to the best."""
    ordered, ids = torch.sort(probabilities, dim=-1, descending=True, stable=True)
    places = torch.arange(ordered.shape[-1], device=ordered.device)
    ordered = ordered.masked_fill(places >= top_k.float(), 0.0)
    ordered = ordered / ordered.sum(dim=-1, keepdim=True)
    before = torch.cumsum(ordered.double(), dim=-1) - ordered
    dropped = (before >= top_p.float()) | (ordered < min_p.float() * ordered[:, :1])
    dropped[:, 0] = False
    chosen = _invert(ordered.masked_fill(dropped, 0.0), numbers)
    return ids.gather(-1, chosen[:, None])[:, 0]


def _invert(weights: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """Return the index at which the cumulative ``weights`` [rows, n] exceed a share of the total; never of a zero
    weight.

    A row with NaN weights gets the last index: a larger one would not be a token and would fail the whole batch.
    """
    running = torch.cumsum(weights.double(), dim=-1)
    places = torch.searchsorted(running, numbers * running[:, -1:], right=True)
    return places[:, 0].clamp(max=weights.shape[-1] - 1)
