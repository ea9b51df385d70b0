"""What the relay of placed stages is told to do to a stage's link, each by the verb of ``t`` that does it."""

from __future__ import annotations

from typing import ClassVar

import msgspec


class SlowLink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From now on every byte from and to this stage takes ``delay_s`` longer."""

    verb: ClassVar[str] = "slow_link"
    stage: int
    delay_s: float


class CutLink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """From now on no byte gets from or to this stage; its connections stay open, and new ones lead nowhere."""

    verb: ClassVar[str] = "cut_link"
    stage: int


class HealLink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Bytes get through at once again, those that were held back first. A dropped link stays dropped."""

    verb: ClassVar[str] = "heal_link"
    stage: int


class DropLink(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The connections from and to this stage are reset, and new ones too."""

    verb: ClassVar[str] = "lose_node"
    stage: int


LinkOrder = SlowLink | CutLink | HealLink | DropLink
