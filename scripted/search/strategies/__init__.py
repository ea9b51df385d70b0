"""Strategies of search: each decides what is added to a base workload, and runs nothing."""

from scripted.search.strategies.base import Drawn, Strategy, StrategyName
from scripted.search.strategies.exhaustive import Exhaustive
from scripted.search.strategies.pct import Pct
from scripted.search.strategies.random_events import RandomEvents, Swarm
from scripted.search.strategies.surw import Surw

__all__ = ["Drawn", "Exhaustive", "Pct", "RandomEvents", "Strategy", "StrategyName", "Surw", "Swarm"]
