"""The space of generated targets: settings, workloads, events."""
