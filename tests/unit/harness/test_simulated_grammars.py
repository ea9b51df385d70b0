"""Regular expressions of the sim tier: literals and classes with counts say what they say on a server."""

from __future__ import annotations

import random
import re

import pytest
from scripted_lockstep.simulated.grammar import SimulatedGrammar

from engine.core.messages import Grammar, GrammarKind

END = 257


@pytest.mark.parametrize(
    "regex", ["[a-c]{5}x[0-9]{2}", "[ab]{4}", "[x]", "[0-9a-f]{6}", "[a-cx_]y{2}", "[aa-b]", "[A-Za-z0-9_#]{3}[!-/]"]
)
def test_a_class_has_all_of_its_characters_and_no_others(regex: str) -> None:
    grammar, chance = SimulatedGrammar(Grammar(GrammarKind.REGEX, regex), (END,)), random.Random(1)
    met: list[set[str]] = []
    for _ in range(20):
        output: list[int] = []
        while (allowed := grammar.allowed(output)) != (END,):
            assert allowed
            met[len(output) :] = met[len(output) :] or [set(map(chr, allowed))]
            output.append(chance.choice(allowed))
        text = "".join(map(chr, output))
        assert re.fullmatch(regex, text)
        for place, characters in enumerate(met):
            others = (text[:place] + chr(code) + text[place + 1 :] for code in range(33, 127))
            assert {other[place] for other in others if re.fullmatch(regex, other)} == characters
