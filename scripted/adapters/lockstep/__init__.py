"""The engine's own scheduler as an adapter: actions, oracle, specification, bugs, workloads, the tiers."""
