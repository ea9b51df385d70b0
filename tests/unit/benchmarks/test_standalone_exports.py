"""`python -m benchmarks.standalone_exports` takes the schedules from the page of defects.

Goal: what is counted is what the page shows. Method: a page of two sections, with commands and schedules in the text.
Origin: review: nobody could say how many of the exports run. Mutant: read the whole page.
"""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks import mutant_exports, standalone_exports
from benchmarks.mutant_exports import is_told_apart
from benchmarks.standalone_exports import count_mended, count_mutants, schedules_on
from scripted.core.edits import EditDoesNotFit
from scripted.core.mutant import read_mutants

ROOT = Path(__file__).parents[3]
PAGE_OF_MUTANTS = ROOT / "benchmarks/tables/exports.md"

PAGE = """
## vLLM

```console
$ scripted replay 'adapter=vllm block_size=2; 1 start a prompt=15'
```

With `policy=priority` the `abort` of `a` ends it: `policy=priority; 1 start a
prompt=5; 2 abort a`. Again: `policy=priority; 1 start a prompt=5; 2 abort a`.

## SGLang 0.5.23

```console
$ scripted replay 'adapter=sglang; 1 pause mode=in_place; 2 start a prompt=1'
```
"""


@pytest.mark.parametrize(
    ("adapter", "schedules"),
    [
        (
            "vllm",
            [
                "adapter=vllm block_size=2; 1 start a prompt=15",
                "adapter=vllm policy=priority; 1 start a prompt=5; 2 abort a",
            ],
        ),
        ("sglang", ["adapter=sglang; 1 pause mode=in_place; 2 start a prompt=1"]),
        ("transformers", []),
    ],
)
def test_the_schedules_of_a_section(adapter: str, schedules: list[str]) -> None:
    assert schedules_on(PAGE, adapter) == schedules


@pytest.mark.parametrize(("wrong", "status"), [("", 0), ("vllm-image-cut-in-two", 1)])
def test_what_another_release_has_mended_is_told(
    wrong: str, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only defects that the installed release has and the other one has not; one wrong file makes the status 1."""
    said = {"adapter=vllm encoder_cache_size=8": "NOT GREEN"} if wrong else {}
    monkeypatch.setattr(
        standalone_exports,
        "_red_then_green",
        lambda _standalone, text, _python, _other: next((why for at, why in said.items() if text.startswith(at)), None),
    )
    adapter = SimpleNamespace(name="vllm", version=lambda: "0.32.0", standalone=None)
    assert count_mended(adapter, "python", Path("versions/0.33.0")) == status
    rows = capsys.readouterr().out
    assert "| vllm-loras-of-two-batches | red, green with 0.33.0 |" in rows
    assert "vllm-image-never-encoded" not in rows
    assert ("| vllm-image-cut-in-two | NOT GREEN |" in rows) == bool(wrong)


@pytest.mark.parametrize(
    ("with_it", "without", "said"),
    [
        ((1, "E   AssertionError: x\n1 failed"), (0, "1 passed"), None),
        ((0, "1 passed"), (0, "1 passed"), "NOT RED"),
        ((1, "E   AssertionError: x\n1 failed"), (1, "E   KeyError: 'b'\n1 failed"), "NOT GREEN"),
    ],
)
def test_a_file_is_red_with_the_bug_and_green_without(
    with_it: tuple[int, str], without: tuple[int, str], said: str | None
) -> None:
    found = is_told_apart("", "AssertionError: ", lambda _: with_it, lambda _: without)
    assert found is None if said is None else str(found).startswith(said)


def test_a_mutant_of_another_release_has_no_file(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first one that did not fit ended the count."""

    def search(_adapter: object, name: str, _release: object) -> str | None:
        if name == "old":
            raise EditDoesNotFit("the mutant old does not fit")
        return None

    monkeypatch.setattr(mutant_exports, "_what_is_wrong", search)
    monkeypatch.setattr(mutant_exports, "other_tree", lambda *_: contextlib.nullcontext())
    adapter: Any = SimpleNamespace(name="x", packages=("pytest",), version=lambda: "1.2")
    said = list(mutant_exports.rows_of(adapter, ["old", "new"]))
    assert said == [("old", "no file: it does not fit 1.2"), ("new", None)]


def test_a_mutant_without_a_file_is_not_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """And each row takes the place of the mutant's row on the page, whose other rows stay."""
    page = tmp_path / "page.md"
    page.write_text(
        "## vLLM\n\n| `shown` | NOT RED |\n| `other` | x |\n\n## SGLang\n\n| `shown` | y |\n", encoding="utf-8"
    )
    ends = {"shown": None, "hidden": "no file: nothing is seen in a call"}
    monkeypatch.setattr(mutant_exports, "rows_of", lambda _adapter, names: [(one, ends[one]) for one in names])
    adapter = SimpleNamespace(name="vllm", mutant_names=tuple(ends))
    assert count_mutants(adapter, (), page) == 0
    assert "| 1 of 1 are red with the mutant and green without |" in capsys.readouterr().out
    assert page.read_text(encoding="utf-8") == (
        "## vLLM\n\n| `shown` | red, green without it |\n| `other` | x |\n"
        "| `hidden` | no file: nothing is seen in a call |\n\n## SGLang\n\n| `shown` | y |\n"
    )
    ends["hidden"] = "NOT GREEN: KeyError"
    assert count_mutants(adapter, ["hidden"]) == 1
    assert "shown" not in capsys.readouterr().out


@pytest.mark.parametrize(("section", "mutants"), [("vLLM", "scripted_vllm"), ("SGLang", "scripted_sglang")])
def test_the_page_has_rows_of_mutants(section: str, mutants: str) -> None:
    """Each row is of a mutant that there is, and no file passes with it or fails without it, but for the named one."""
    text = PAGE_OF_MUTANTS.read_text(encoding="utf-8").partition(f"## {section}\n")[2].partition("\n## ")[0]
    rows = dict(re.findall(r"^\| `(\S+)` \| (.*) \|$", text, re.MULTILINE))
    assert rows
    assert rows.keys() <= {one.name for one in read_mutants(ROOT / "adapters" / mutants / "mutants.toml")}
    assert [name for name, said in rows.items() if said.startswith("NOT ")] == []
