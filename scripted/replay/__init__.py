"""Replay: schedules and recordings run again, compared with themselves, shown step by step."""

from scripted.replay.rerun import Rerun, is_recording, replay_engine, rerun, rerun_in_fresh_process

__all__ = ["Rerun", "is_recording", "replay_engine", "rerun", "rerun_in_fresh_process"]
