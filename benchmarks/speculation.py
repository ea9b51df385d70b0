"""The speed-up by prompt lookup, on texts where it helps and on texts where it does not.

Scheduler and all layers run in one process, greedily. The forwards are the model's, but the tokens come from a given
text, so that a checkpoint of random weights copies as a trained one would. Runs with and without lookup take turns;
time is CPU time. Run: ``python -m benchmarks.speculation``.
"""

from __future__ import annotations

import argparse
import importlib.util
import random
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.checkpoints import checkpoint, vocabulary_of
from benchmarks.measurement import in_turn
from benchmarks.one_process import Engine
from engine.core.config import EngineConfig
from engine.core.messages import Completion
from engine.core.plan import ForwardMode, Microbatch, Segment
from engine.model.verification import verify
from lockstep.interruption import interruptible

SHAPE = "S"
VOCABULARY = vocabulary_of(SHAPE)
PAGE_TOKENS = 32
PROMPT_TOKENS = 256
OUTPUT_TOKENS = 128
BATCHES = (1, 8)
# An answer that copies passages of this length, with new words between them.
PASSAGE_TOKENS = 24
OWN_TOKENS = 4
# A text has few frequent words: pairs recur, but with different successors.
ZIPF_EXPONENT = 1.1

Text = Callable[[random.Random], list[int]]


def copying(chance: random.Random) -> list[int]:
    """Return a prompt and an answer made of its passages, like a summary or an edited file."""
    prompt = [chance.randrange(VOCABULARY - 1) for _ in range(PROMPT_TOKENS)]
    answer: list[int] = []
    while len(answer) < OUTPUT_TOKENS:
        start = chance.randrange(PROMPT_TOKENS - PASSAGE_TOKENS)
        answer += prompt[start : start + PASSAGE_TOKENS]
        answer += [chance.randrange(VOCABULARY - 1) for _ in range(OWN_TOKENS)]
    return prompt + answer[:OUTPUT_TOKENS]


def fresh(chance: random.Random) -> list[int]:
    """Return frequent and rare words: lookups find pairs of them, and guess wrong successors."""
    words = range(VOCABULARY - 1)
    weights = [1 / (rank + 1) ** ZIPF_EXPONENT for rank in words]
    return chance.choices(words, weights, k=PROMPT_TOKENS + OUTPUT_TOKENS)


TEXTS: dict[str, Text] = {"copies its prompt": copying, "nothing recurs": fresh}


class Bench:
    """One engine that emits given texts."""

    def __init__(self, folder: Path, *, openvino: bool, guesses: bool) -> None:
        config = EngineConfig(
            model=str(folder),
            device="cpu",
            backend="openvino" if openvino else "torch",
            page_size=PAGE_TOKENS,
            max_total_tokens=(max(BATCHES) + 1) * (PROMPT_TOKENS + OUTPUT_TOKENS + PAGE_TOKENS),
            chunked_prefill_size=-1,
            speculative_algorithm="ngram" if guesses else "off",
        )
        self._engine = Engine(config)
        self._forward = self._engine.runner.forward
        self._engine.runner.forward = self._follow_texts  # type: ignore[method-assign]
        self._texts: list[list[int]] = []

    @property
    def held(self) -> float:
        """Return the share of its guesses that held."""
        stats = self._engine.scheduler.stats()
        return stats.accepted_tokens / max(1, stats.drafted_tokens)

    def run(self, texts: list[list[int]]) -> float:
        """Return the CPU seconds for emitting each text, without its prompt's."""
        self._texts = texts
        steps = self._engine.run([text[:PROMPT_TOKENS] for text in texts], OUTPUT_TOKENS).steps
        return sum(step.cpu_s for step in steps if step.mode is ForwardMode.DECODE)

    def _follow_texts(self, microbatch: Microbatch, hidden: torch.Tensor | None = None) -> Completion:
        """Replace the tokens of the model's forward with the texts'."""
        output = self._forward(microbatch, hidden)
        assert isinstance(output, Completion), "the only stage returned hidden states"
        assert output.error is None, output.error
        texts = [(one, self._texts[int(one.rid.partition(".")[2])]) for one in microbatch.segments if one.emits]
        return verify(microbatch, [token for one, text in texts for token in _follows(one, text)], ())


def _follows(segment: Segment, text: list[int]) -> Iterator[int]:
    """Yield the text's token after each token that samples one."""
    end = segment.start + len(segment.token_ids)
    yield from text[end - segment.drafts : end + 1]


def main() -> None:
    """Print for each text and batch the tokens per CPU second, and the median ratio of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="runs of each engine and case, alternating")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(width=120)
    backends = ["torch", *(["openvino"] if importlib.util.find_spec("openvino") is not None else [])]
    columns = ("backend", "the answer", "batch", "tokens/CPU s without", "with guesses", "is x", "guesses that held")
    table = Table(*columns, title=f"bf16, one torch thread, {torch.backends.cpu.get_cpu_capability()}")
    with checkpoint("bfloat16", SHAPE) as folder:
        for backend in backends:
            for name, make in TEXTS.items():
                off, on = (Bench(folder, openvino=backend == "openvino", guesses=one) for one in (False, True))
                for batch in BATCHES:
                    table.add_row(backend, name, str(batch), *_compared(off, on, make, batch, arguments.rounds))
    console.print(table)


def _compared(off: Bench, on: Bench, make: Text, batch: int, rounds: int) -> list[str]:
    chance = random.Random(batch)  # noqa: S311 - texts, not secrets
    pairs = []
    for number in range(rounds + 1):
        texts = [make(chance) for _ in range(batch)]
        spent = {bench: bench.run(texts) for bench in in_turn((on, off), number)}
        pairs.append((spent[off], spent[on]))
    pairs = pairs[1:]  # The first round compiles.
    tokens = batch * OUTPUT_TOKENS
    rates = [tokens / statistics.median(column) for column in zip(*pairs, strict=True)]
    ratio = statistics.median([without / with_guesses for without, with_guesses in pairs])
    return [*[f"{rate:.0f}" for rate in rates], f"{ratio:.2f}", f"{on.held:.0%}"]


if __name__ == "__main__":
    with interruptible("benchmarks.speculation"):
        main()
