"""The adapter of an engine behind a blocking queue.

``scripted explore --adapter examples/engines/blocking_queue.py --corpus``
"""

import blocking_queue_engine
from engine_machine import ThreadMachine, adapter_of

from scripted.sdk import Mutant


class QueueMachine(ThreadMachine):
    """Messages wait in the engine's own queue while a batch is computed."""

    def __init__(self, config):
        super().__init__(config, blocking_queue_engine)

    def make(self):
        engine = blocking_queue_engine.Engine(self.forward, self.tell, *self.config.sizes)
        engine.start()
        return engine


ADAPTER = adapter_of(
    "blocking-queue",
    QueueMachine,
    Mutant(
        name="an-abort-overtakes-its-request",
        origin="written for this example",
        bug="an abort does not go through the queue: it finds no request that is still in there, and is forgotten",
        signature="is launched, but it was aborted",
        test="",
        target="blocking_queue_engine:Engine.abort",
        cut='self.messages.put(("abort", request.id))',
        becomes="self.end_aborted(request.id)",
    ),
    Mutant(
        name="a-late-abort-ends-the-thread",
        origin="sgl-project/sglang pull request 29984",
        bug="an abort of a request that has just ended ends the thread: messages are taken, and nobody reads them",
        signature="list index out of range",
        test="",
        target="blocking_queue_engine:Engine.end_aborted",
        cut="in (*self.waiting, *self.running):",
        becomes="in ([one for one in (*self.waiting, *self.running) if one.id == request_id][0],):",
        kind="imitated",
        note="there two threads use one socket, and the one that is hit dies; here an order of messages does it",
    ),
)
