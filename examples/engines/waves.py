"""The adapter of data-parallel ranks with waves and a coordinator.

``scripted explore --adapter examples/engines/waves.py --corpus``
"""

import waves_engine
from rank_machine import RankMachine, rank_adapter

from scripted.sdk import Answer, Mutant, Pause, PauseMode, Resume

MODES = (PauseMode(name="keep"), PauseMode(name="abort", aborts=True))


class WavesMachine(RankMachine):
    """The coordinator and each rank are threads."""

    def __init__(self, config):
        super().__init__(config, waves_engine)

    def make_group(self):
        config = self.config
        group = waves_engine.Group(config.ranks, self.compute, self.group.all_gather, self.tell, config.sizes)
        group.start()
        return group

    def take(self, event):
        match event:
            case Pause():
                self.engine.tell_all("pause", event.mode == "abort")
                self.replies.append(Answer(call_id=event.call_id, ok=True))
            case Resume():
                self.engine.tell_all("resume")
                self.replies.append(Answer(call_id=event.call_id, ok=True))
            case _:
                super().take(event)


ADAPTER = rank_adapter(
    "waves",
    WavesMachine,
    Mutant(
        name="a-forwarded-wake-counts-as-running",
        origin="vllm-project/vllm pull request 51481",
        bug="the coordinator takes the ranks for running once it has told them so, but paused ones discard that",
        signature="nothing happens any more",
        test="",
        target="waves_engine:Coordinator.take",
        cut="self.wave = wave\n",
        becomes="self.wave, self.is_running = wave, True\n",
        kind="imitated",
        note="the same order of events in a coordinator of our own",
    ),
    Mutant(
        name="a-pause-tells-nobody",
        origin="vllm-project/tpu-inference pull request 3362",
        bug="a pause that aborts ends the requests of each rank, and returns none of them: no client is told",
        signature="nothing happens any more",
        test="",
        target="waves_engine:Rank.take",
        cut="self.end_aborted(self.finish_requests())",
        becomes="[self.end(request, 'abort') for request in self.finish_requests()]",
        kind="imitated",
        note="the same loss in ranks of our own",
    ),
    pause_modes=MODES,
)
