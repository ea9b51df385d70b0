"""What a server recorded: replayed in this process, and as a schedule."""

from scripted.adapters.lockstep.recordings.again import replay_engine
from scripted.adapters.lockstep.recordings.as_schedule import plan_of, schedule_of_recording

__all__ = ["plan_of", "replay_engine", "schedule_of_recording"]
