"""Actions of one kind of machine: which configurations have their target."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from scripted.sdk.signals import SignalAction


class Settings(msgspec.Struct, frozen=True):
    connector: str = "none"

    @property
    def has_connector(self) -> bool:
        return self.connector != "none"


class Hold(SignalAction, frozen=True, kw_only=True, tag="hold-what-is-outside"):
    needs: ClassVar = "has_connector"


def test_what_an_action_needs_may_be_a_property_of_the_settings() -> None:
    """vLLM's adapter asks ``has_connector`` and ``has_transfers``, which are no fields."""
    assert not Hold.is_known(Settings())
    assert Hold.is_known(Settings(connector="async"))
