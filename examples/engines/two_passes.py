"""The adapter of an engine with two forward passes a step: each pass is a batch.

``scripted explore --adapter examples/engines/two_passes.py --corpus``
"""

import two_passes_engine
from engine_machine import ThreadMachine, adapter_of

from scripted.sdk import Mutant


class TwoPassesMachine(ThreadMachine):
    """A step of the engine takes two steps of the machine where it has both passes."""

    def __init__(self, config):
        super().__init__(config, two_passes_engine)

    def make(self):
        engine = two_passes_engine.Engine(self.forward, self.tell, *self.config.sizes)
        engine.start()
        return engine


ADAPTER = adapter_of(
    "two-passes",
    TwoPassesMachine,
    Mutant(
        name="both-passes-are-planned-at-once",
        origin="written for this example",
        bug="the second pass is planned before the first one, so it computes who was aborted between them",
        signature="is launched, but has ended",
        test="",
        target="two_passes_engine:Engine.step",
        cut="""
            self.compute(self.prompts())
            self.compute(self.decodes())
        """,
        becomes="""
            prompts, decodes = self.prompts(), self.decodes()
            self.compute(prompts)
            self.compute(decodes)
        """,
    ),
)
