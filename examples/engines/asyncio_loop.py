"""The adapter of an asyncio engine: clients and the engine are tasks of one loop, which each step runs until all wait.

``scripted explore --adapter examples/engines/asyncio_loop.py --corpus``
"""

from asyncio_engine import Engine
from engine_machine import LoopMachine, adapter_of

from scripted.sdk import Mutant


class AsyncioMachine(LoopMachine):
    """Each request has a client, whose task is cancelled when it aborts."""

    def __init__(self, config):
        super().__init__(config)
        self.clients = {}
        self.loop.call(self.make)

    def make(self):
        self.engine = Engine(self.forward, *self.config.sizes)
        self.loop.start(self.engine.serve())

    def add(self, request):
        self.clients[request.id] = self.loop.start(self.read(request))

    def abort(self, rid):
        self.clients.pop(rid).cancel()
        self.tell(self.requests[rid], None, "abort")

    async def read(self, request):
        async for token, reason in self.engine.generate(request):
            if reason:
                del self.clients[request.id]
            self.tell(request, token, reason)


ADAPTER = adapter_of(
    "asyncio-loop",
    AsyncioMachine,
    Mutant(
        name="who-leaves-is-computed-on",
        origin="written for this example",
        bug="a client that leaves ends its own task alone: its request is computed on, for nobody",
        signature="is launched, but has ended",
        test="",
        target="asyncio_engine:Engine.generate",
        cut='self.end(request, "abort")',
        becomes="pass",
    ),
    Mutant(
        name="a-late-result-goes-by-its-id",
        origin="written for this example",
        bug="the result of a request whose client has left goes to the next request with its id",
        signature="is told tokens, but nothing of it was ever computed",
        test="",
        target="asyncio_engine:Engine.take_results",
        cut="request = work.request",
        becomes="request = next((r for r in self.running + self.waiting if r.id == work.request.id), work.request)",
    ),
)
