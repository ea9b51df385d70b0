"""The live tier's stand-in for a pipeline has all that the oracle of foreign schedulers asks of one."""

from __future__ import annotations

import inspect
import re

from scripted.sdk import oracle
from scripted.sdk.live.parts import LiveDevice


def test_the_oracle_can_ask_it() -> None:
    asked = set(re.findall(r"\bpipeline\.(\w+)", inspect.getsource(oracle.SdkOracle)))
    assert {"known_tokens", "lora_of", "shortened", "understood"} <= asked
    assert [name for name in sorted(asked) if not hasattr(LiveDevice(), name)] == []
