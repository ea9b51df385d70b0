"""The adapter of data-parallel ranks in step.

``scripted explore --adapter examples/engines/synced.py --corpus``
"""

import synced_engine
from rank_machine import RankMachine, rank_adapter

from scripted.sdk import Mutant


class SyncedMachine(RankMachine):
    """Each rank is a thread."""

    def __init__(self, config):
        super().__init__(config, synced_engine)

    def make_group(self):
        config = self.config
        group = synced_engine.Group(config.ranks, self.compute, self.group.all_gather, self.tell, config.sizes)
        group.start()
        return group


ADAPTER = rank_adapter(
    "synced",
    SyncedMachine,
    Mutant(
        name="an-idle-rank-leaves",
        origin="sgl-project/sglang pull requests 28039, 25404 and 36802",
        bug="a rank without work does not take part in the collective in which the others agree on their batches",
        signature="a deadlock",
        test="",
        target="synced_engine:Rank.iterate",
        cut="batch = self.plan()",
        becomes="""batch = self.plan()
        if not self.is_live:
            return""",
        kind="imitated",
        note="the reports leave for grammars and images, this one for having nothing to do",
    ),
    Mutant(
        name="who-said-all-is-not-alive",
        origin="NVIDIA/TensorRT-LLM pull request 18457",
        bug="a request with all of its tokens counts neither as running nor as alive, and its rank stops",
        signature="a deadlock",
        test="",
        target="synced_engine:Rank.is_live",
        cut=" or self.done",
        becomes="",
        kind="imitated",
        note="the same loss of liveness in ranks of our own",
    ),
)
