"""The timeline: a run as one self-contained HTML page, and as a Perfetto trace."""

from scripted.report.timeline.page import render_timeline
from scripted.report.timeline.perfetto import to_perfetto

__all__ = ["render_timeline", "to_perfetto"]
