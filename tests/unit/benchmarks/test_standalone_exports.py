"""`python -m benchmarks.standalone_exports` takes the schedules from the page of defects.

Goal: what is counted is what the page shows. Method: a page of two sections, with commands and schedules in the text.
Origin: review: nobody could say how many of the exports run. Mutant: read the whole page.
"""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from benchmarks import standalone_exports
from benchmarks.standalone_exports import count_mended, schedules_on

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
