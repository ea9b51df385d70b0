"""Schedulers that come along as adapters of the search: this project's own, and those of other engines."""
