"""The names of the public contract: what test files import, and what runs scripts by hand."""

from __future__ import annotations

import importlib

import pytest
from every_case import every_case

import scripted

# Never renamed without a word in the changelog: files that nobody here wrote import them.
CONTRACT = (
    "HookReady",
    "RequestRefused",
    "RunScript",
    "ScriptDefinitionError",
    "ScriptFailed",
    "ScriptFailedReply",
    "ScriptSucceeded",
    "ScriptTimeout",
    "ScriptedServer",
    "ScriptedSim",
    "ServerDied",
    "ServerDirty",
    "Shutdown",
    "scripted",
)


@every_case("name", CONTRACT)
def test_a_name_of_the_contract_can_be_imported(name: str) -> None:
    assert name in scripted.__all__
    value = getattr(scripted, name)
    assert getattr(importlib.import_module(value.__module__), value.__name__) is value


def test_every_public_name_is_there() -> None:
    assert [name for name in scripted.__all__ if getattr(scripted, name, None) is None] == []


def test_other_names_are_refused() -> None:
    with pytest.raises(AttributeError, match="module 'scripted' has no attribute 'scriptd'"):
        _ = scripted.scriptd
