"""Continuous batching of transformers under the search: the defects of the installed version are found unaided."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import re
import warnings
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import pytest
from scripted_transformers.adapter import MUTANTS
from scripted_transformers.standalone import TransformersStandalone
from thinned import thinned
from transformers.cli.serving.utils import CBGenerateManager
from typer.testing import CliRunner

from scripted import api
from scripted.cli.main import app
from scripted.core.adapters import adapter_named
from scripted.core.defects import Defect, defects_of
from scripted.core.schedule import Schedule
from scripted.sdk.standalone import text_of
from scripted.search.execution import execute
from tests.defect_rows import rows_of, unlike

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "benchmarks/tables/defects.md").read_text(encoding="utf-8")
LINES = re.findall(r"^\$ scripted replay '(adapter=transformers.*)'$", PAGE, re.MULTILINE)
WAITS, RAISES = "something waits forever: a (preempted)", "KeyError: 'a#1'"
HELD_UP = "a request waits although all that are open fit together: c"
# The ways in which a name that returns early goes wrong, in the order of the table's schedules.
REUSED = (
    "the scheduler has dropped a",
    "KeyError: 'a'",
    "a is told tokens, but nothing of it was ever computed",
    "the token that the batch before chooses for an earlier request a",
    "the token that the batch before chooses for an earlier request a",
    "KeyError: 'c'",
)
SCHEDULES = [
    schedule
    for defect in defects_of("transformers", ROOT / "none")
    if defect.id == "transformers-reused-ids"
    for schedule in defect.schedules
]


@pytest.mark.parametrize(
    ("line", "words"),
    [*zip(LINES, (WAITS, RAISES, HELD_UP, REUSED[0]), strict=True), *zip(SCHEDULES[1:], REUSED[1:], strict=True)],
    ids=(
        "waits",
        "raises",
        "held up",
        "cancelled",
        "queued twice",
        "answered twice",
        "carried over",
        "carried over an end",
        "queued twice ahead",
    ),
)
def test_the_page_is_right_about_a_defect(line: str, words: str) -> None:
    failure = execute(Schedule.parse(line)).failure
    assert failure is not None
    assert words in str(failure)


@pytest.mark.parametrize("defect", rows_of("transformers", version("transformers")), ids=lambda defect: defect.id)
def test_a_defect_is_there_and_its_fix_mends_it(defect: Defect) -> None:
    assert unlike(defect, "transformers") == []


class StopHere(Exception):
    """The request has its id."""


def test_the_server_gives_each_request_an_id_of_its_own_with_the_fix() -> None:
    """The adapter calls the scheduler itself, so that this part of the fix is run here alone."""
    (reused,) = [one for one in rows_of("transformers", version("transformers")) if one.id == "transformers-reused-ids"]
    manager, asked = CBGenerateManager(), []

    def add_request(_: object, request_id: str, **__: object) -> None:
        asked.append(request_id)
        raise StopHere

    manager._cb = SimpleNamespace(
        add_request=add_request,
        register_result_handler=lambda *_: None,
        background_thread_status=SimpleNamespace(fatal_error=None),
    )

    async def generate(start: Callable[..., object]) -> None:
        config = SimpleNamespace(max_new_tokens=1, eos_token_id=None)
        answer = start(None, None, {"input_ids": [1]}, config, request_id="a")
        if inspect.isawaitable(answer):
            await answer

    def names() -> list[str]:
        asked.clear()
        for start in (manager.generate_streaming, manager.generate_non_streaming) * 2:
            with pytest.raises(StopHere):
                asyncio.run(generate(start))
        return asked

    assert names() == ["a"] * 4
    with reused.fixed():
        assert len(set(names())) == 4


# The mutants that one promise alone finds, each with the check that it takes.
ALONE = {
    "a-cancel-takes-the-next-one-too": "check_told",
    "asking-for-room-takes-it": "check_queries",
    "a-block-is-complete-one-token-early": "check_prefixes",
}


@pytest.mark.parametrize("name", ALONE)
def test_a_promise_alone_finds(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client aborts the lost request, nobody takes the blocks twice, and nothing hits the block."""
    mutant = next(mutant for mutant in MUTANTS if mutant.name == name)
    schedule = Schedule.parse(mutant.schedule, of="transformers")
    assert execute(schedule).failure is None
    with mutant.switched_on():
        failure = execute(schedule).failure
        assert failure is not None
        assert mutant.signature in failure.text
        monkeypatch.setattr(f"scripted.core.run.{ALONE[name]}", lambda *_: None)
        assert execute(schedule).failure is None, "another promise is broken as well"


def test_a_second_turn_that_reads_the_last_output_is_found() -> None:
    mutant = next(mutant for mutant in MUTANTS if mutant.name not in ALONE)
    schedule = Schedule.parse(mutant.schedule, of="transformers")
    assert execute(schedule).failure is None
    with mutant.switched_on():
        failure = execute(schedule).failure
    assert failure is not None
    assert mutant.signature in failure.text


@pytest.mark.parametrize(
    ("mutated", "is_found"), [("12 abort b", True), ("40 abort b", False)], ids=["in the window", "after it"]
)
def test_the_hang_has_a_window(mutated: str, is_found: bool) -> None:
    """The request that ends by itself takes the block of new requests back."""
    assert (execute(Schedule.parse(LINES[0].replace("12 abort b", mutated))).failure is not None) == is_found


@pytest.mark.parametrize(
    ("old", "new"),
    [("prompt=68", "prompt=64"), ("prompt=32", "prompt=28"), ("_tokens=32;", "_tokens=32 allow_block_sharing=False;")],
    ids=["it fits beside the cached blocks", "a smaller chunk fits", "nothing is cached"],
)
def test_only_cached_blocks_hold_up_a_prompt(old: str, new: str) -> None:
    assert old in LINES[2]
    assert execute(Schedule.parse(LINES[2].replace(old, new))).failure is None


def test_every_shape_of_a_defect_fails_with_its_words() -> None:
    words = {"waits-after-cancel": "something waits forever", "hold-up-a-prompt": "all that are open fit together"}
    for end, said in words.items():
        defect = next(defect for defect in defects_of("transformers", ROOT / "none") if defect.id.endswith(end))
        assert len(defect.schedules) > 1
        for schedule in defect.schedules:
            failure = execute(Schedule.parse(schedule)).failure
            assert failure is not None, schedule
            assert said in failure.text


@pytest.mark.parametrize(
    ("target", "words"),
    thinned([("full", "waits forever"), ("transformers-growing-async", "mark_complete_blocks")], one_in=2),
)
def test_the_sweep_of_a_workload_finds_it(target: str, words: str) -> None:
    """B15: without a hint."""
    report = api.explore(target, adapter="transformers")
    assert any(words in str(finding.failure) for finding in report.findings.values())


def test_its_workloads_alone_are_right() -> None:
    """No false alarm without an added event, with tokens compared with those of each request alone."""
    adapter = adapter_named("transformers")
    for name in adapter.workloads:
        assert execute(Schedule.parse(adapter.workloads[name], of="transformers")).failure is None, name


@pytest.mark.parametrize(
    "events", ["1 abort a; 1 start a prompt=1 new=1", "1 start a prompt=1 new=1; 4 start a prompt=1 new=1"]
)
def test_a_name_that_comes_back_is_another_request(events: str) -> None:
    """With ids of their own nothing goes wrong; with the client's names it does."""
    own, reused = (
        f"adapter=transformers use_async_batching=True{more}; {events}" for more in ("", " unique_ids=False")
    )
    assert execute(Schedule.parse(own)).failure is None
    assert execute(Schedule.parse(reused)).failure is not None


def test_an_example_shows_it_with_a_real_model(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Here, where torch is imported already."""
    monkeypatch.syspath_prepend(ROOT / "examples/transformers")
    example = importlib.import_module("waits_after_a_cancel")
    monkeypatch.setattr(example, "TIMEOUT_S", 1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert example.main() == 1
    free = re.search(
        r"second still waits after 1 s, with (\d+)% of all blocks free and nothing running", capsys.readouterr().out
    )
    # 50, or less if the cancel came some steps later.
    assert free is not None
    assert int(free[1]) > 40


@pytest.mark.nightly
def test_a_defect_is_written_with_the_classes_of_transformers_alone(tmp_path: Path) -> None:
    """B15: the file is run where nothing of this project can be imported, and fails as the schedule does."""
    file = tmp_path / "test_race.py"
    done = CliRunner().invoke(app, ["replay", LINES[1], "--to-script", str(file), "--standalone"])
    assert "where nothing else is imported" in done.output
    text = file.read_text(encoding="utf-8")
    assert re.search("^(from|import) (scripted|engine)", text, re.MULTILINE) is None
    assert text.rstrip().endswith("# The last call raises KeyError.")


def test_the_end_of_a_wait_is_no_more_than_empty_batches() -> None:
    text, expected = text_of(TransformersStandalone(), Schedule.parse(LINES[0]), "waits")
    assert expected == "AssertionError: "
    assert text is not None
    assert "assert any(map(launches, plans))" in text
