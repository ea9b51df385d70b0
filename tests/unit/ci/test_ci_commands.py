"""The grammar of slash commands; any other comment is refused with a reason or ignored."""

import pytest
from every_case import every_case
from hypothesis import example, given
from hypothesis import strategies as st

from ci.commands import (
    COMMANDS,
    Command,
    Explore,
    RerunFailedCi,
    RerunGroup,
    RerunStage,
    RerunTest,
    TagAndRerunCi,
    TagRunCiLabel,
    name_of,
    parse_comment,
)
from ci.errors import CommandRefusedError
from ci.request import Tier
from ci.suites import Hardware


@pytest.mark.parametrize(
    ("body", "command"),
    [
        ("/rerun-test test_a.py", RerunTest(("test_a.py",))),
        ("/rerun-test  a.py\tb.py  --repeat 20 --tier sim\nthanks!", RerunTest(("a.py", "b.py"), 20, Tier.SIM)),
        ("/rerun-test --repeat=3 a.py::T::test_x[1-2]\r\n", RerunTest(("a.py::T::test_x[1-2]",), 3)),
        ("/rerun-test a.py --hw cuda", RerunTest(("a.py",), hardware=Hardware.CUDA)),
        ("/rerun-group pipeline", RerunGroup("pipeline")),
        ("/rerun-stage base-cpu", RerunStage("base-cpu")),
        ("/rerun-stage extra-b 4-gpu", RerunStage("extra-b", "4-gpu")),
        ("/rerun-failed-ci", RerunFailedCi()),
        ("/tag-run-ci-label", TagRunCiLabel()),
        ("/tag-and-rerun-ci ", TagAndRerunCi()),
        ("/explore tests/registered/a.py::test_x", Explore("tests/registered/a.py::test_x")),
        ("/explore a.py::test_x --minutes 30", Explore("a.py::test_x", 30)),
    ],
)
def test_each_command(body: str, command: Command) -> None:
    """A command runs for those who may give it (E03)."""
    assert parse_comment(body) == command
    assert f"/{name_of(command)}" in COMMANDS


@pytest.mark.parametrize(
    "body",
    [
        "",
        "looks good",
        " /rerun-test a.py",
        "see\n/rerun-test a.py",
        "> /rerun-test a.py",
        "/lgtm",
        "/assign me",
        "//",
        "/",
    ],
)
def test_other_comments_are_none_of_ours(body: str) -> None:
    """E03: the first line decides."""
    assert parse_comment(body) is None


@every_case(
    ("body", "text"),
    [
        ("/rerun-tests a.py", "did you mean `/rerun-test`"),
        ("/rerun-tset a.py", "did you mean `/rerun-test`"),
        ("/rerun-test;reboot", "there is no command"),
        ("/rerun-test", "name 1 to 50 tests, got 0; usage: `/rerun-test SPEC..."),
        ("/rerun-test a.py --repeat", "needs a value"),
        ("/rerun-test a.py --repeat 0", "from 1 to 100, got `0`"),
        ("/rerun-test a.py --repeat 101", "from 1 to 100, got `101`"),
        ("/rerun-test a.py --repeat -1", "from 1 to 100, got `-1`"),
        ("/rerun-test a.py --repeat 1e2", "from 1 to 100, got `1e2`"),
        ("/rerun-test a.py --repeat 2 --repeat 3", "given twice"),
        ("/rerun-test a.py --tier gpu", "one of sim, server, all, got `gpu`"),
        ("/rerun-test a.py --hw tpu", "one of cpu, cuda"),
        ("/rerun-test a.py --minutes 3", "no option `--minutes`"),
        ("/rerun-test a.py -k x", "no option"),
        ("/rerun-test a.py && reboot", "`&&` has characters"),
        ("/rerun-test `reboot`.py", "has characters"),
        ("/rerun-test a.py\x00", "has characters"),
        ("/rerun-test a.py\u2028b.py", "has characters"),
        ("/rerun-test t\u0435st.py", "has characters"),
        ("/rerun-test ${{github.token}}", "has characters"),
        ("/rerun-test " + "a " * 51, "name 1 to 50 tests, got 51"),
        ("/rerun-test " + "a " * 4000, "at most 8000 characters"),
        ("/rerun-test " + "a " * 3000, "too many"),
        ("/rerun-failed-ci now", "got 1 arguments"),
        ("/rerun-stage", "got 0 arguments"),
        ("/explore a b", "got 2 arguments"),
        ("/explore a.py::x --minutes 121", "from 1 to 120"),
    ],
)
def test_each_refusal_says_why(body: str, text: str) -> None:
    """Every command is answered, refusals too (E04); a comment is hostile input (E05)."""
    with pytest.raises(CommandRefusedError) as caught:
        parse_comment(body)
    assert text in str(caught.value)
    assert str(caught.value).isascii()


@given(st.text(max_size=300), st.sampled_from([*COMMANDS, ""]))
@example("\n", "/rerun-test")
@example(" --\n", "/rerun-test")
@example(" --=x a", "/rerun-test")
def test_any_text_is_a_command_or_none_or_refused_in_words(text: str, name: str) -> None:
    """A comment is hostile input (E05)."""
    command, refusal = outcome(f"{name} {text}" if name else text)
    assert refusal.isascii()
    assert len(refusal) < 500
    words = command.specs if isinstance(command, RerunTest) else ()
    assert all(word.isascii() and not set(word) & set("$`;&|<>(){}'\"\\ \n\r\t*?!#@~^%") for word in words)


def outcome(body: str) -> tuple[Command | None, str]:
    try:
        return parse_comment(body), ""
    except CommandRefusedError as exc:
        return None, str(exc)
