"""A server that is idle again is as small as it was: what a front end or a scheduler process keeps is named."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path

import pytest
from scripted_lockstep.tiers.server import growth
from scripted_lockstep.tiers.server.role_runner import EngineRole
from scripted_lockstep.tiers.server.runner import EngineServer
from thinned import thinned

from engine import EngineConfig
from engine.server.launch.preload import PreloadedParent
from scripted import ScriptFailed

CONFIG = EngineConfig(chunked_prefill_size=64)
STAGED = EngineConfig(pp_size=2, chunked_prefill_size=64, kv_sanitizer=True)
# Run by every process of the server. It is told what is kept: by the front end its answered calls or a descriptor; by
# a stage's process, which with one stage is the scheduler's, every spec; by the scheduler's process what it told the
# stages to do.
KEEPERS = """
import os
from engine.frontend.http import engine_client
from engine.frontend.sessions import sessions
from engine.model import sampling
from engine.pipeline import staged

class Kept(dict):
    def pop(self, key, default=None):
        return self.get(key, default)

start_client = engine_client.EngineClient.__init__
start_call = sessions.Sessions.start
adopt = sampling.Sampler.adopt
note = staged.StagedPipeline._note_completion

def start_and_keep(client, *arguments):
    start_client(client, *arguments)
    if KEPT == "answered calls":
        client._calls = Kept()

def start_and_open(held, message, hand_over):
    if KEPT == "a descriptor":
        os.dup(0)
    return start_call(held, message, hand_over)

def adopt_and_keep(sampler, segment):
    adopt(sampler, segment)
    if KEPT == "every spec":
        sampler.__dict__.setdefault("_seen", {})[len(sampler.__dict__.get("_seen", ()))] = segment.sampling

def note_and_keep(pipeline, completion):
    note(pipeline, completion)
    if KEPT == "every result":
        pipeline._awaited[min(0, *pipeline._awaited, 0) - 1] = completion.microbatch_id

engine_client.EngineClient.__init__ = start_and_keep
sessions.Sessions.start = start_and_open
sampling.Sampler.adopt = adopt_and_keep
staged.StagedPipeline._note_completion = note_and_keep
"""


# -- scripts, which run in the scheduler process --


def does_everything(t):
    flush = t.flush_cache()
    yield
    assert flush.status == 200
    left = t.start_req(prompt_len=20, max_new_tokens=30, rid="left")
    done = t.start_req(prompt_len=20, max_new_tokens=2)
    yield
    t.disconnect(left)
    yield from t.run_until_finished(done)


def keeps_a_file(t):
    os.dup(0)
    yield


# -- tests --


@pytest.mark.parametrize("config", [CONFIG, STAGED], ids=["one stage", "two stages"])
def test_a_server_that_keeps_nothing_passes_again_and_again(config: EngineConfig, parent: PreloadedParent) -> None:
    check_that_it_passes(config, parent)


def test_it_passes_where_the_kernel_has_no_tables(monkeypatch: pytest.MonkeyPatch, parent: PreloadedParent) -> None:
    monkeypatch.setattr(growth, "_TABLES", (Path("/no/such/table"),))
    check_that_it_passes(CONFIG, parent)


def check_that_it_passes(config: EngineConfig, parent: PreloadedParent) -> None:
    with EngineServer.start(config, parent=parent) as server:
        for _ in range(3):
            server.run(does_everything)
        assert server.usable


@pytest.mark.usefixtures("settles_soon")
def test_a_front_end_that_did_not_run_for_long_has_not_grown(parent: PreloadedParent) -> None:
    with EngineServer.start(CONFIG, parent=parent) as server:
        server.run(does_everything)
        assert server.serving is not None
        front_end = server.serving.pids["frontend"]
        checked = growth.ServerGrowth(server.serving)
        os.kill(front_end, signal.SIGSTOP)
        runs_on = threading.Timer(2 * growth.SETTLE_TIMEOUT_S, os.kill, (front_end, signal.SIGCONT))
        runs_on.start()
        checked.check()
        runs_on.join()


@pytest.mark.usefixtures("settles_soon")
def test_a_scheduler_process_that_keeps_a_descriptor_is_named(parent: PreloadedParent) -> None:
    with EngineServer.start(CONFIG, parent=parent) as server:
        with pytest.raises(ScriptFailed, match=r"it has grown: scheduler has \d+ open descriptors"):
            server.run(keeps_a_file)
        assert not server.usable


@pytest.mark.usefixtures("settles_soon")
@pytest.mark.parametrize(
    ("config", "what", "found"),
    thinned(
        [
            (CONFIG, "answered calls", "it has grown: the front end has 1 open calls"),
            (CONFIG, "a descriptor", r"it has grown: frontend has \d+ open descriptors"),
            (CONFIG, "every spec", r"stage 0\._runner\._sampler\._seen has \d+ entries, before the first script"),
            (STAGED, "every spec", r"stage 1\._runner\._sampler\._seen has \d+ entries, before the first script"),
            (STAGED, "every result", r"pipeline\._awaited has \d+ entries, before the first script"),
        ],
        one_in=2,
    ),
)
def test_a_process_that_keeps_something_is_named(
    config: EngineConfig,
    what: str,
    found: str,
    parent: PreloadedParent,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "spoil.py").write_text(f"KEPT = {what!r}\n{KEEPERS}")
    monkeypatch.chdir(tmp_path)
    with EngineServer.start(config, parent=parent) as server:
        with pytest.raises(ScriptFailed, match=found):
            server.run(does_everything)
        assert not server.usable


@pytest.mark.usefixtures("settles_soon")
def test_an_engine_with_a_role_that_keeps_a_descriptor_is_named(
    parent: PreloadedParent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "spoil.py").write_text(f"KEPT = 'a descriptor'\n{KEEPERS}")
    monkeypatch.chdir(tmp_path)
    with EngineRole(EngineConfig(role="decode"), mutant=None, parent=parent) as server:
        server.run(does_everything)
        with pytest.raises(ScriptFailed, match=r"engine d0: .* it has grown: frontend has \d+ open descriptors"):
            server.run(does_everything)
        assert not server.usable
