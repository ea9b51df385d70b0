"""The adapter of an engine that polls: a sleep of its thread ends with the next step.

``scripted explore --adapter examples/engines/polling.py --corpus``
"""

from types import SimpleNamespace

import polling_engine
from engine_machine import ThreadMachine, adapter_of

from scripted.sdk import Mutant


class PollingMachine(ThreadMachine):
    """The result of a batch appears in the handle that its launch returned."""

    def __init__(self, config):
        super().__init__(config, polling_engine)

    def make(self):
        self.handles = []
        engine = polling_engine.Engine(self.begin, self.tell, *self.config.sizes)
        engine.start()
        return engine

    def begin(self, batch):
        self.launch(batch)
        self.handles.append(SimpleNamespace(tokens=None))
        return self.handles[-1]

    def land(self, tokens):
        self.handles.pop().tokens = tokens


ADAPTER = adapter_of(
    "polling",
    PollingMachine,
    Mutant(
        name="a-result-for-who-is-gone",
        origin="written for this example",
        bug="a request that was aborted while it was computed takes its result, and ends again",
        signature="x not in list",
        test="",
        target="polling_engine:Engine.take_results",
        cut="if request.ended:",
        becomes="if False:",
    ),
)
