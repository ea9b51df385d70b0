"""This project's own scheduler as a subject of the search."""

from scripted.subjects.lockstep.subject import SUBJECT, LockstepSubject

__all__ = ["SUBJECT", "LockstepSubject"]
