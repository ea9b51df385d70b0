"""The adapter of an engine that computes inside ``step``: the loop of its server is a thread.

``scripted explore --adapter examples/engines/inside.py --corpus``
"""

from engine_machine import ThreadMachine, adapter_of
from inside_engine import Engine

from scripted.sdk import Mutant


class InsideMachine(ThreadMachine):
    """What clients want waits in an inbox until ``step`` has returned."""

    def make(self):
        self.inbox = self.threads.queue()
        self.threads.start("server", self.serve)
        return Engine(self.forward, *self.config.sizes)

    def serve(self):
        while True:
            while not self.inbox.empty() or not self.engine.has_work:
                call, argument = self.inbox.get()
                call(argument)
            for request, token in self.engine.step():
                self.tell(request, token, request.ended)

    def add(self, request):
        self.inbox.put((self.engine.add, request))

    def abort(self, rid):
        self.inbox.put((self.end_aborted, rid))

    def end_aborted(self, rid):
        if self.engine.abort(rid):
            self.tell(self.requests[rid], None, "abort")


ADAPTER = adapter_of(
    "inside",
    InsideMachine,
    Mutant(
        name="an-abort-finds-who-runs-alone",
        origin="written for this example",
        bug="the abort of a request that waits finds nothing, and the request runs later",
        signature="is launched, but it was aborted",
        test="",
        target="inside_engine:Engine.abort",
        cut="for queue in (self.waiting, self.running):",
        becomes="for queue in (self.running,):",
    ),
)
