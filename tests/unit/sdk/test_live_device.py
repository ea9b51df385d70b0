"""The live tier's stand-in for a pipeline has all that the oracle of foreign schedulers asks of one."""

from __future__ import annotations

import inspect
import re

from scripted.sdk import oracle
from scripted.sdk.live.stand_ins import LiveDevice
from scripted.sdk.pipeline import SimulatedRunner


def test_the_oracle_can_ask_it() -> None:
    asked = set(re.findall(r"\bpipeline\.(\w+)", inspect.getsource(oracle.SdkOracle)))
    assert {"known_tokens", "lora_of", "shortened", "understood"} <= asked
    assert [name for name in sorted(asked) if not hasattr(LiveDevice(), name)] == []


def test_it_is_told_what_the_simulated_runner_is_told() -> None:
    own = [name for name, method in vars(LiveDevice).items() if inspect.isfunction(method) and name[0] != "_"]
    told = {name: list(inspect.signature(getattr(SimulatedRunner, name)).parameters) for name in own}
    assert {name: list(inspect.signature(getattr(LiveDevice, name)).parameters) for name in own} == told
