"""A server that is idle again is as small as it was: what a front end or a scheduler process keeps is named."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import EngineConfig
from engine.launch.preload import PreloadedParent
from scripted import ScriptedServer, ScriptFailed

CONFIG = EngineConfig(chunked_prefill_size=64)
STAGED = EngineConfig(pp_size=2, chunked_prefill_size=64, kv_sanitizer=True)
# Run by every interpreter that starts with this folder on its path: the front end's is one of them.
KEEPS_ANSWERED_CALLS = """
from engine.frontend import engine_client

class Kept(dict):
    def pop(self, key, default=None):
        return self.get(key, default)

start = engine_client.EngineClient.__init__

def start_and_keep(client, private_dir):
    start(client, private_dir)
    client._calls = Kept()

engine_client.EngineClient.__init__ = start_and_keep
"""
KEEPS_A_DESCRIPTOR = """
import os
from engine.frontend import engine_client

start = engine_client.EngineClient.start

def start_and_open(client, message):
    os.dup(0)
    return start(client, message)

engine_client.EngineClient.start = start_and_open
"""
# A stage's process, which with one stage is the scheduler's.
KEEPS_EVERY_SPEC = """
from engine.model import sampling

adopt = sampling.Sampler.adopt

def adopt_and_keep(sampler, segment):
    adopt(sampler, segment)
    sampler.__dict__.setdefault("_seen", {})[len(sampler.__dict__.get("_seen", ()))] = segment.sampling

sampling.Sampler.adopt = adopt_and_keep
"""
# The scheduler's process, which keeps what it told the stages to do.
KEEPS_EVERY_RESULT = """
from engine.pipeline import staged

note = staged.StagedPipeline._note_completion

def note_and_keep(pipeline, completion):
    note(pipeline, completion)
    pipeline._awaited[min(0, *pipeline._awaited, 0) - 1] = completion.microbatch_id

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
def test_a_server_that_keeps_nothing_passes_again_and_again(config: EngineConfig) -> None:
    with ScriptedServer.start(config) as server:
        for _ in range(3):
            server.run(does_everything)
        assert server.usable


def test_a_scheduler_process_that_keeps_a_descriptor_is_named() -> None:
    with ScriptedServer.start(CONFIG) as server:
        with pytest.raises(ScriptFailed, match=r"it has grown: scheduler has \d+ open descriptors"):
            server.run(keeps_a_file)
        assert not server.usable


@pytest.mark.parametrize(
    ("bug", "found"),
    [
        (KEEPS_ANSWERED_CALLS, "it has grown: the front end has 1 open calls"),
        (KEEPS_A_DESCRIPTOR, r"it has grown: frontend has \d+ open descriptors"),
    ],
)
def test_a_front_end_that_keeps_something_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bug: str, found: str
) -> None:
    check_that_it_is_named(tmp_path, monkeypatch, CONFIG, bug, found)


@pytest.mark.parametrize(
    ("config", "bug", "found"),
    [
        (CONFIG, KEEPS_EVERY_SPEC, r"stage 0\._runner\._sampler\._seen has \d+ entries, before the first script"),
        (STAGED, KEEPS_EVERY_SPEC, r"stage 1\._runner\._sampler\._seen has \d+ entries, before the first script"),
        (STAGED, KEEPS_EVERY_RESULT, r"pipeline\._awaited has \d+ entries, before the first script"),
    ],
)
def test_a_stage_that_keeps_something_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, bug: str, found: str
) -> None:
    check_that_it_is_named(tmp_path, monkeypatch, config, bug, found)


def check_that_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: EngineConfig, bug: str, found: str
) -> None:
    (tmp_path / "sitecustomize.py").write_text(bug)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    with PreloadedParent.start() as parent, ScriptedServer.start(config, parent=parent) as server:
        with pytest.raises(ScriptFailed, match=found):
            server.run(does_everything)
        assert not server.usable
