"""`python -m benchmarks.standalone_exports` takes the schedules from the page of defects.

Goal: what is counted is what the page shows. Method: a page of two sections, with commands and schedules in the text.
Origin: review: nobody could say how many of the exports run. Mutant: read the whole page.
"""

from __future__ import annotations

import pytest

from benchmarks.standalone_exports import schedules_on

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
