"""The machine of data-parallel ranks: one batch of all ranks a step, and collectives as rendezvous."""

from engine_machine import Config, ThreadMachine
from paged_requests import Work

from scripted import sdk
from scripted.sdk.cooperative import Collectives


class RankConfig(Config, frozen=True):
    """The settings of each rank, and the number of ranks."""

    ranks: int = 2
    blocks: int = 8
    batch_requests: int = 2


class RankMachine(ThreadMachine):
    """The block ``b`` of rank ``r`` is the block ``r * blocks + b``. ``engine`` has ``ranks``."""

    def __init__(self, config: RankConfig, *modules):
        self.arrived = 0
        super().__init__(config, *modules)

    def make(self):
        self.group = Collectives(self.threads, self.config.ranks)
        self.results = [self.threads.queue() for _ in range(self.config.ranks)]
        # How many shares of the batch in flight are of each rank.
        self.parts = ()
        return self.make_group()

    def run(self, events, now):
        is_unfinished = super().run(events, now)
        if self.requests and self.launched == self.landed and not is_unfinished:
            self.group.check()
        return is_unfinished

    def compute(self, rank: int, batch: list[Work]) -> list[int]:
        """Compute a batch of each rank together; that of a rank without work is empty."""
        batches = self.group.enter(rank, "forward", batch)
        if rank == 0:
            self.parts = tuple(len(one) for one in batches)
            self.launch([self.moved(number, work) for number, one in enumerate(batches) for work in one])
        return self.results[rank].get()

    def moved(self, rank: int, work: Work) -> Work:
        blocks = tuple(rank * self.config.blocks + block for block in work.blocks)
        return Work(work.request, work.start, work.count, blocks)

    def land(self, tokens):
        for results, part in zip(self.results, self.parts, strict=True):
            results.put(tokens[:part])
            tokens = tokens[part:]

    def add(self, request):
        self.engine.add(request, self.arrived % self.config.ranks)
        self.arrived += 1

    @property
    def pool(self):
        return self.engine.ranks[0].pool

    def counts(self):
        free = sum(len(rank.pool.free) for rank in self.engine.ranks)
        return {**super().counts(), "blocks_free": free}


def rank_adapter(name, machine, *mutants, pause_modes=()):
    """Declare the adapter of a machine of ranks."""
    return sdk.SchedulerAdapter(
        name,
        config=RankConfig,
        machine=machine,
        limits=lambda config: sdk.Limits(
            block_size=config.block_size,
            blocks=config.ranks * config.blocks,
            batch_tokens=config.ranks * config.batch_tokens,
            batch_requests=config.ranks * config.batch_requests,
            context_tokens=config.blocks * config.block_size,
        ),
        # One rank may be full while another has room, so requests may wait although all of them together fit.
        can=lambda _: sdk.Capabilities(flush=False, preemption=False, continuous=False, pause_modes=pause_modes),
        mutants=mutants,
        may_grow=("home",),
    )
