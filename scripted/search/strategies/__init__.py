"""Strategies of search: each decides what is added to a base workload, and runs nothing."""

from scripted.search.strategies.base import Strategy, StrategyName
from scripted.search.strategies.exhaustive import Exhaustive
from scripted.search.strategies.pairs import Pairs
from scripted.search.strategies.pct import Pct
from scripted.search.strategies.random_events import RandomEvents

__all__ = ["Exhaustive", "Pairs", "Pct", "RandomEvents", "Strategy", "StrategyName"]
