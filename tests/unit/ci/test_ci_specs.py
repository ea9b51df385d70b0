"""Specs as people write them are resolved against the registry, or refused with the near matches."""

import pytest
from every_case import every_case
from hypothesis import given
from hypothesis import strategies as st
from sample_tree import SampleTree

from ci.errors import SpecError
from ci.quoting import quoted
from ci.specs import SPECS_MAX, resolve_specs


@pytest.fixture
def big(tree: SampleTree) -> SampleTree:
    tree.good("pipeline/test_flush.py")
    tree.good("pipeline/test_sweep.py")
    tree.good("memory/test_pages.py")
    tree.good("memory/test_twin.py")
    tree.good("pipeline/test_twin.py")
    return tree


def resolved(tree: SampleTree, *specs: str) -> list[str]:
    return [str(target).removeprefix("tests/registered/") for target in resolve_specs(specs, tree.registry)]


@pytest.mark.parametrize(
    ("spec", "targets"),
    [
        ("tests/registered/pipeline/test_flush.py", ["pipeline/test_flush.py"]),
        ("./tests/registered/pipeline/test_flush.py", ["pipeline/test_flush.py"]),
        ("test_flush.py", ["pipeline/test_flush.py"]),
        ("tests/registered/memory", ["memory/test_pages.py", "memory/test_twin.py"]),
        ("tests/registered/memory/", ["memory/test_pages.py", "memory/test_twin.py"]),
        ("test_flush.py::test_flush", ["pipeline/test_flush.py::test_flush"]),
        ("test_flush.py::test_flush[4-2]", ["pipeline/test_flush.py::test_flush[4-2]"]),
        ("test_flush.py::TestGroup", ["pipeline/test_flush.py::TestGroup"]),
        ("test_flush.py::TestGroup::test_method", ["pipeline/test_flush.py::TestGroup::test_method"]),
    ],
)
def test_each_kind_of_spec(big: SampleTree, spec: str, targets: list[str]) -> None:
    """A command runs for those who may give it (E03)."""
    assert resolved(big, spec) == targets


def test_repeats_and_nodes_of_whole_files_fall_away(big: SampleTree) -> None:
    assert resolved(big, "test_flush.py::test_flush", "test_flush.py", "test_flush.py") == ["pipeline/test_flush.py"]


@every_case(
    ("spec", "text"),
    [
        ("test_flsh.py", "did you mean `tests/registered/pipeline/test_flush.py`"),
        ("tests/registered/pipeline/test_flushh.py", "did you mean `tests/registered/pipeline/test_flush.py`"),
        ("test_flush.py::test_flash", "did you mean `test_flush`"),
        ("test_twin.py", "names 2 files"),
        ("tests/registered/pipeline::test_flush", "defines no"),
        ("nothing/like/it", "names no registered test"),
        ("flush", "names no registered test"),
        ("tests/registered/../../etc/passwd", "without .."),
        ("/etc/passwd", "not absolute"),
        ("-rf", "not absolute"),
        ("tests//registered", "inside the repository"),
        ("test_flush.py::a::b::c", "is not a test spec"),
        ("test_flush.py;reboot", "is not a test spec"),
        ("$(reboot)", "is not a test spec"),
        ("", "is not a test spec"),
        ("test_fl\u0443sh.py", "is not a test spec"),
        ("x" * 400, "longer than 300"),
    ],
)
def test_each_refusal_says_why(big: SampleTree, spec: str, text: str) -> None:
    """Every command is answered, refusals too (E04); a comment is hostile input (E05)."""
    with pytest.raises(SpecError, match=r".") as caught:
        resolved(big, spec)
    assert text in str(caught.value)


def test_numbers_are_bounded(big: SampleTree) -> None:
    with pytest.raises(SpecError, match="no test was named"):
        resolved(big)
    with pytest.raises(SpecError, match=f"more than {SPECS_MAX}"):
        resolved(big, *["test_flush.py"] * (SPECS_MAX + 1))


@given(st.text())
def test_quoted_text_is_always_one_short_code_span(text: str) -> None:
    """A comment is hostile input (E05)."""
    shown = quoted(text)
    assert shown.isascii()
    assert shown.isprintable()
    assert (shown[0], shown[-1], shown.count("`")) == ("`", "`", 2)
    assert len(shown) <= 85
