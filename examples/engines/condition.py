"""The adapter of an engine whose worker waits at a condition variable. Its search stalls the worker between two waits.

``scripted explore --adapter examples/engines/condition.py --corpus``
"""

import condition_engine
from engine_machine import ThreadMachine, adapter_of

from scripted.sdk import Mutant


class ConditionMachine(ThreadMachine):
    """Clients call the engine on the harness's thread, whatever the worker does."""

    def __init__(self, config):
        super().__init__(config, condition_engine)

    def make(self):
        engine = condition_engine.Engine(self.forward, self.tell, *self.config.sizes)
        engine.start()
        return engine


ADAPTER = adapter_of(
    "condition",
    ConditionMachine,
    Mutant(
        name="it-looks-before-it-locks",
        origin="written for this example",
        bug="the worker looks for work before it takes the lock: what comes in between wakes nobody",
        signature="nothing happens any more",
        test="",
        target="condition_engine:Engine.serve",
        cut="""
            with self.changed:
                while not self.has_work:
                    self.changed.wait()
        """,
        becomes="""
            if not self.has_work:
                with self.changed:
                    self.changed.wait()
            with self.changed:
        """,
    ),
    stalls=True,
)
