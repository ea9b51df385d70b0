"""A server's announcement at its start: the model, its limits and its URL, and a bar only on a terminal."""

from __future__ import annotations

import json
import time

import pytest

from engine.core.limits import EMBEDDED_FACTS, Limits
from engine.process.control import Gathering, Loading, Serving
from engine.process.links.endpoint import Endpoint
from engine.process.settings import ServerSettings
from engine.server.launch.announcement import Announce, Phases, StartView

SERVING = Serving(base_url="http://127.0.0.1:7", pids={})


def started(announce: Announce | None = None, **settings: object) -> StartView:
    """A view of a start with two stages on two devices that have loaded half of their weights."""
    chosen = ServerSettings(pp_size=2, **settings)
    phases = Phases(shown=True)
    phases.begin("imports")
    phases.begin("loading")
    limits = Limits.of(chosen, EMBEDDED_FACTS)
    view = StartView(chosen, EMBEDDED_FACTS, limits, time.monotonic(), phases, announce)
    with view.loading():
        for stage in range(2):
            what = {"device": f"cuda:{stage}", "dtype": "bfloat16"}
            view.loaded(f"stage-{stage}", Loading(done=11, total=22, **what))
            view.loaded(f"stage-{stage}", Loading(done=0, total=0, doing="converting", **what))
    return view


def test_lines_say_what_is_served(capsys: pytest.CaptureFixture[str]) -> None:
    """Operators see and do what the routes promise (C06).

    A setting has one definition, and its error names field, value, rule and remedy (C09).
    """
    started(max_total_tokens=4096, context_length=100, served_model_name="m", api_key="k").serving(SERVING)
    out, err = capsys.readouterr()
    first, *rows = out.splitlines()
    assert first.startswith("Serving embedded with 2 stages on http://127.0.0.1:7 (ready in 0.0 s)")
    assert [row.rsplit(None, 1)[-1] for row in rows if "device" not in row] == [
        "m",
        "bfloat16",
        "2",
        "4096",
        "16",
        "100",
        "64",
        "s)",
        "needed",
    ]
    assert any(
        row.split(None, 1) == ["start", "imports 0.0 s, loading 0.0 s (reading 0.0 s, converting 0.0 s)"]
        for row in rows
    )
    assert any(row.split(None, 1) == ["device", "cuda:0, cuda:1"] for row in rows)
    assert err == ""


def test_a_role_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    started(role="decode", prefill_engines="http://a:1,http://b:2").serving(SERVING)
    assert "  role             decode, asks http://a:1 http://b:2\n" in capsys.readouterr().out


def test_json_is_one_line(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """C06: also on a terminal nothing but JSON is written."""
    monkeypatch.setenv("FORCE_COLOR", "1")
    started(log_format="json").serving(SERVING)
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    said = json.loads(line)
    assert (said["base_url"], said["kv_tokens"], said["dtype"], said["stages"]) == (
        SERVING.base_url,
        16384,
        "bfloat16",
        2,
    )
    assert said["message"].startswith("Serving embedded")
    assert err == ""


def test_a_terminal_is_told_of_each_phase(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    for shown, told in ((True, "starting: imports\n"), (False, "")):
        Phases(shown=shown).begin("imports")
        assert capsys.readouterr().err == told


def test_bars_move_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    started()
    out, err = capsys.readouterr()
    assert out == ""
    for said in ("stage-0: reading", "stage-1: reading", "stage-1: converting", "11/22"):
        assert said in err


def test_a_harness_is_called(capsys: pytest.CaptureFixture[str]) -> None:
    told: list[Serving] = []
    started(told.append).serving(SERVING)
    assert told == [SERVING]
    assert capsys.readouterr() == ("", "")


def test_what_to_run_on_other_machines_is_ready_to_paste(capsys: pytest.CaptureFixture[str]) -> None:
    """The path of the secret, never the secret; numbers are those that the machines agreed on."""
    gathering = Gathering(join=Endpoint("10.0.0.1", 7), secret_file="/tmp/engine-x/secret", stages=2)
    command = "engine stage --join 10.0.0.1:7 --secret-file /tmp/engine-x/secret"
    view = started()
    view.gathering(gathering)
    first, second = capsys.readouterr().out.splitlines()
    assert first == "Waiting for 2 stages; start each on its machine, with a copy of the secret file:"
    assert second.strip() == command
    view.resolved(Limits.of(ServerSettings(pp_size=2, max_total_tokens=512), EMBEDDED_FACTS))
    view.serving(SERVING)
    assert "  kv tokens        512\n" in capsys.readouterr().out
    started(log_format="json").gathering(gathering)
    assert json.loads(capsys.readouterr().out)["command"] == command
    told: list[object] = []
    started(told.append).gathering(gathering)
    assert told == [gathering]
