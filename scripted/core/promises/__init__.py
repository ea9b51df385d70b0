"""Promises that every scheduler keeps, one in each file, named by what it guards. They know no adapter.

``core/run.py`` and the account check them; a protocol beside each names the state that it needs of a machine.
"""

from scripted.core.promises.asked_twice import HasQueries
from scripted.core.promises.cached_prefixes import CachedPrefix, HoldsPrefixes, KeepsPrefixes
from scripted.core.promises.told_ends import ListsRequests

__all__ = ["CachedPrefix", "HasQueries", "HoldsPrefixes", "KeepsPrefixes", "ListsRequests"]
