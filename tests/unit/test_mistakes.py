"""Typical mistakes get an error with the thing, the rule, the value and the remedy, before any process is started."""

from __future__ import annotations

from mistakes import MISTAKES, answers


def test_every_answer_names_the_thing_the_rule_the_value_and_the_remedy() -> None:
    """C09, C11, A08: at once, for flags of other engines too; nothing is forked or loaded for it."""
    rows = [mistake for mistakes in MISTAKES.values() for mistake in mistakes]
    assert len(rows) == len({mistake.typed for mistake in rows}) >= 60
    bad = [(typed, word, answers()[typed]) for typed, *words in rows for word in words if word not in answers()[typed]]
    assert not bad, "\n".join(map(str, bad))
