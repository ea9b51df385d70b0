"""The same adapter with the bug fixed: what a request computed after its end is not shared.

``scripted explore --adapter examples/your_scheduler/fixed.py --corpus``
"""

from adapter import Config, Machine, adapter_of
from scheduler import Scheduler


class FixedScheduler(Scheduler):
    """Blocks of a request that has ended are not its own any more, so what is in them is not remembered."""

    def _remember(self, request, work):
        if not request.ended:
            super()._remember(request, work)


class FixedMachine(Machine):
    """The machine of the adapter, with the other scheduler in it."""

    def __init__(self, config: Config):
        super().__init__(config)
        self.scheduler = FixedScheduler(config.blocks, config.block_size, config.batch_tokens, config.batch_requests)


ADAPTER = adapter_of("fixed", FixedMachine)
