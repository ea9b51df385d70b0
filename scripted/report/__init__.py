"""Shows a run to people: the report of a failure, the step table, the trace and its timeline."""
