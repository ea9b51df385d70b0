"""The words of a schedule's line: what is quoted comes back as it was, what cannot be written is refused."""

from __future__ import annotations

import pytest

from scripted.core.placed_action import clauses_of, quoted, words_of_clause
from scripted.core.refusals import ScriptDefinitionError
from scripted.core.schedule import Schedule

ODD_PATHS = ("/models/of mine", "/models;old/a", "/a b;c = d/e", "/plain")


@pytest.mark.parametrize("path", ODD_PATHS)
def test_a_path_of_weights_survives_its_text(path: str) -> None:
    schedule = Schedule.parse(f'default; 1 start a prompt=5; 3 update path_of_weights="{path}"; 9 flush')
    assert len(schedule.placed) == 3
    assert schedule.placed[1].action.path_of_weights == path  # type: ignore[attr-defined]
    assert Schedule.parse(str(schedule)) == schedule


@pytest.mark.parametrize("path", ODD_PATHS)
def test_a_path_of_a_model_survives_its_text(path: str) -> None:
    schedule = Schedule.parse(f'page_size=4 model="{path}" pp_size=2; 1 flush')
    assert (schedule.config.model, schedule.config.pp_size, schedule.config.page_size) == (path, 2, 4)
    assert Schedule.parse(str(schedule)) == schedule


def test_only_what_needs_quotes_gets_them() -> None:
    assert [quoted(value) for value in ("a", 3, "a=b", "a b", "a;b", "")] == ["a", "3", "a=b", '"a b"', '"a;b"', '""']


def test_clauses_and_words() -> None:
    assert clauses_of('a; b "x; y";; c') == ["a", ' b "x; y"', "", " c"]
    assert words_of_clause(' update  path="x y" z=""') == ["update", "path=x y", "z="]
    assert clauses_of("") == [""]


def test_a_quote_without_its_second_is_refused() -> None:
    with pytest.raises(ScriptDefinitionError, match=r"a double quote of a schedule is never closed .* close it"):
        Schedule.parse('model="/a b; 1 flush')


def test_a_value_with_a_quote_is_refused() -> None:
    with pytest.raises(ScriptDefinitionError, match=r"double quote cannot be written in a schedule.*another name"):
        quoted('/a"b')
