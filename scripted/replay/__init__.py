"""Replay: schedules and recordings run again, compared with themselves, shown step by step."""

from scripted.replay.rerun import Rerun, first_difference, is_recording, rerun, rerun_in_fresh_process

__all__ = ["Rerun", "first_difference", "is_recording", "rerun", "rerun_in_fresh_process"]
