"""Strategies of search: each decides what is added to a base workload, and runs nothing."""

from scripted.explore.strategies.base import Strategy, StrategyName
from scripted.explore.strategies.exhaustive import Exhaustive
from scripted.explore.strategies.pairs import Pairs
from scripted.explore.strategies.pct import Pct
from scripted.explore.strategies.random_events import RandomEvents

__all__ = ["Exhaustive", "Pairs", "Pct", "RandomEvents", "Strategy", "StrategyName"]
