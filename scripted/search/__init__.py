"""The search: strategies over the schedules of an adapter, campaigns, shrinking, and the tests written from failures.

Knows no scheduler: everything about one comes from its adapter.
"""
