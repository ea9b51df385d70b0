"""Schedulers that come along as subjects of the search: this project's own, and those of other engines."""
