"""What people see of a run: the report of a failure, the step table, the trace and its timeline."""
