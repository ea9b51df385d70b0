"""Replay: schedules and recordings run again, compared with themselves, shown step by step."""

from scripted.replay.rerun import is_recording, rerun, rerun_in_fresh_process, schedule_of_recording

__all__ = ["is_recording", "rerun", "rerun_in_fresh_process", "schedule_of_recording"]
