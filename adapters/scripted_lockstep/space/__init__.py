"""What generated targets are drawn from: settings, workloads, events."""
