"""Presents a run to people: the failure report, the step table, the trace and its timeline."""
