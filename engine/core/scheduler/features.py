"""The features of a scheduler, in the order in which their hooks are called.

A new feature is a file with its class, and its line here.
"""

from __future__ import annotations

from typing import NamedTuple

from engine.core.scheduler.core import Core
from engine.core.scheduler.drafts import Drafts
from engine.core.scheduler.flush_and_update import FlushAndUpdate
from engine.core.scheduler.gap_bound import GapBound
from engine.core.scheduler.grammars import Grammars
from engine.core.scheduler.host_copies import HostCopies
from engine.core.scheduler.loras import Loras
from engine.core.scheduler.profiles import Profiles
from engine.core.scheduler.prompt_logprobs import PromptLogprobs
from engine.core.scheduler.sleeping import Sleeping
from engine.core.scheduler.time_limits import TimeLimits
from engine.core.scheduler.transfers import Transfers
from engine.core.scheduler.window_layers import WindowLayers


class Features(NamedTuple):
    """One feature of each class, on or off.

    The order is part of the behaviour: requests time out before transfers do, host pages are counted before the pages
    of a transfer are taken, a weight update is launched before a profile, a sleep and a change of LoRAs.
    """

    time_limits: TimeLimits
    window_layers: WindowLayers
    host_copies: HostCopies
    transfers: Transfers
    flush_and_update: FlushAndUpdate
    profiles: Profiles
    sleeping: Sleeping
    loras: Loras
    grammars: Grammars
    drafts: Drafts
    prompt_logprobs: PromptLogprobs
    gap_bound: GapBound

    @classmethod
    def of(cls, core: Core) -> Features:
        """Return the features of a new scheduler."""
        return cls(
            TimeLimits(core),
            WindowLayers(core),
            HostCopies(core),
            Transfers(core),
            FlushAndUpdate(core),
            Profiles(core),
            Sleeping(core),
            Loras(core),
            Grammars(core),
            Drafts(core),
            PromptLogprobs(core),
            GapBound(core),
        )
