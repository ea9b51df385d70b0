"""The search: strategies over an adapter's schedules, campaigns, shrinking, and the tests written from failures.

It knows no scheduler: all such knowledge comes from the adapter.
"""
