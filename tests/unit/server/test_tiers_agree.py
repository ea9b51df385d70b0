"""The two tiers agree: every number that a script can read is the same with a simulated model and with a real one.

What a model says is its own. So the outputs here are forced, by a bias or by a grammar of one text, or the draft model
is the model itself: then what is guessed right follows from the scheduler alone.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from itertools import zip_longest
from pathlib import Path
from typing import Any

import msgspec
import pytest
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptedSim

SEEDS = range(2)
ITSELF = {"speculative_algorithm": "draft_model", "speculative_draft_model": "embedded"}
LOOK_UP = {"speculative_algorithm": "ngram", "speculative_ngram_min": 1, "speculative_num_draft_tokens": 3}
CONFIGS = {
    "draft-model-and-pages-of-one": EngineConfig(**ITSELF, page_size=1, max_total_tokens=160),
    "draft-model-on-two-stages": EngineConfig(**ITSELF, page_size=4, pp_size=2, chunked_prefill_size=16),
    "look-up": EngineConfig(**LOOK_UP, page_size=2, max_total_tokens=160, mixed_chunk=True, chunked_prefill_size=8),
    "ahead-with-a-second-tier": EngineConfig(
        async_scheduling=True, page_size=4, max_total_tokens=128, host_kv_tokens=128, chunked_prefill_size=16
    ),
}
# Digests of tokens; how often the harness too asked a stage for its view, and the entries of a real one's containers.
NOT_COMPARED = {"digest", "slots_digest", "seq", "sizes"}


def _disconnect(t: Any, chance: random.Random, handles: list[Any]) -> None:
    connected = [one for one in handles if not one.client.closed and not one.finished]
    if connected:
        t.disconnect(chance.choice(connected))


_ACTS: dict[str, Callable[[Any, random.Random, list[Any]], object]] = {
    "abort": lambda t, chance, handles: t.abort(chance.choice(handles)),
    "disconnect": _disconnect,
    "pause": lambda t, chance, _: t.pause_generation(chance.choice(["in_place", "retract"])),
    "flush": lambda t, chance, _: t.flush_cache(timeout_s=chance.choice([None, 2.0])),
    "evict": lambda t, *_: t.evict(),
    "advance": lambda t, *_: t.clock.advance(1.0),
    "fail": lambda t, chance, _: t.fail_next_step(chance.randrange(t.scheduler.limits.pp_size)),
}


def scenario(t: Any, seed: int, file: str) -> Any:
    """A few requests of chance, with aborts, pauses and held results between steps; each step's numbers are noted."""
    chance, handles, lines = random.Random(seed), list[Any](), list[str]()
    for number in range(chance.randint(25, 45)):
        _do_something(t, chance, number, handles)
        yield
        lines.append(json.dumps(numbers_of(t, handles)))
    t.continue_generation()
    t.release_results()
    yield from t.run_until_all_finished(handles)
    yield from t.run_until_idle()
    lines.append(json.dumps(numbers_of(t, handles)))
    Path(file).write_text("\n".join(lines))


def _do_something(t: Any, chance: random.Random, number: int, handles: list[Any]) -> None:
    what = chance.choices([*_ACTS, "start", "hold", "go on", "nothing"], [*[1] * len(_ACTS), 14, 2, 5, 9])[0]
    if number == 0 or (what == "start" and len(handles) < 9):
        tokens = chance.randint(2, 24)
        seeds = {"prompt_len": chance.randint(1, 50), "prompt_seed": chance.randrange(3)}
        forced: dict[str, Any] = {
            "logit_bias": {65 + chance.randrange(9): 100.0},
            "temperature": chance.choice([0, 1.0]),
        }
        if chance.random() < 0.4:
            # A draft model guesses what the bias says, and the grammar says something else.
            forced = {"regex": "".join(chance.choices("ab", k=tokens)), "logit_bias": {ord("a"): 100.0}}
        elif chance.random() < 0.4 and not t.scheduler.limits.ngram_max:
            # Each model says something else here, which must not be a prefix of what another one is forced to say.
            seeds["prompt_seed"], forced = 100 + number, {"ignore_eos": True}
        handles.append(t.start_req(rid=f"r{len(handles)}", max_new_tokens=tokens, **seeds, **forced))
    elif what in _ACTS:
        _ACTS[what](t, chance, handles)
    elif what == "hold":
        t.hold_results()
    elif what == "go on":
        t.continue_generation()
        t.release_results()


def _plain(seen: Any) -> Any:
    return msgspec.to_builtins(seen, enc_hook=str)


def numbers_of(t: Any, handles: list[Any]) -> dict[str, Any]:
    stages = [_plain(t.stage(number)) for number in range(t.scheduler.limits.pp_size)]
    if any(stage["failed"] for stage in stages):
        for stage in stages:
            del stage["slots_written"]  # a real stage has written some when the failure meets the next one
    read = {"state": _plain(t.state), "stats": _plain(t.engine_stats()), "stages": stages}
    for one in [read["state"], *stages]:
        for name in NOT_COMPARED:
            one.pop(name, None)
    read["hits"], read["locks"] = list(t.get_all_node_hit_counts().values()), list(t.get_all_node_lock_refs().values())
    read["handles"] = [
        [
            one.rid, one.status, one.finish_reason, one.cached_tokens_device, one.cached_tokens_host, one.chunks_done,
            one.chunked_parks, one.kv_pages, one.lock_refs, one.retractions, one.remaining_prompt_tokens,
            len(one.output_ids), one.client.status, len(one.client.token_ids), one.client.closed,
        ]
        for one in handles
    ]  # fmt: skip
    return read


def differences(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield the differences of two values, by their paths."""
    if isinstance(one, dict) and isinstance(other, dict):
        one, other = [[*pair] for pair in one.items()], [[*pair] for pair in other.items()]
    if isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (mine, yours) in enumerate(zip(one, other, strict=True)):
            yield from differences(mine, yours, f"{path}/{number}")
    elif one != other:
        yield f"{path}: {one} {other}"


@pytest.mark.parametrize("name", thinned(CONFIGS, one_in=4))
def test_every_number_is_the_same_in_both_tiers(name: str, parent: PreloadedParent, tmp_path: Path) -> None:
    drafted = accepted = 0
    with EngineServer.start(CONFIGS[name], parent=parent) as server, ScriptedSim.start(CONFIGS[name]) as simulated:
        for seed in SEEDS:
            told = []
            for engine, file in ((simulated, tmp_path / "simulated"), (server, tmp_path / "server")):
                engine.run(scenario, seed, str(file))
                told.append([json.loads(line) for line in file.read_text().splitlines()])
            one, other = told
            for step, (numbers, found) in enumerate(zip_longest(one, other)):
                different = "\n".join(differences(numbers, found))
                assert not different, f"seed {seed}, step {step}: simulated, and in the server:\n{different}"
            drafted += one[-1]["stats"]["drafted_tokens"]
            accepted += one[-1]["stats"]["accepted_tokens"]
    speculates = CONFIGS[name].speculative_algorithm != "off"
    assert (drafted > accepted > 0) if speculates else drafted == 0
