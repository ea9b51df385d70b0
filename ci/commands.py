"""Parses slash commands: the first line of a comment becomes one typed command, or a refusal with a reason.

Pure and suspicious: the text is a stranger's. Nothing is expanded, evaluated or looked up here.
"""

import difflib
import re
from collections.abc import Callable
from dataclasses import dataclass

from ci.errors import CommandRefusedError
from ci.quoting import quoted
from ci.request import Tier
from ci.specs import SPECS_MAX
from ci.suites import Hardware

BODY_MAX_CHARS = 65_536  # What GitHub accepts.
LINE_MAX_CHARS = 8_000
REPEAT_MAX = 100
MINUTES_MAX = 120
MINUTES_DEFAULT = 10
NEAR_ENOUGH = 0.75
WORD = re.compile(r"[A-Za-z0-9_./:\[\]=,+-]+", re.ASCII)
NUMBER = re.compile(r"[1-9][0-9]{0,3}", re.ASCII)


@dataclass(frozen=True)
class RerunTest:
    """`/rerun-test <spec>... [--repeat N] [--tier T] [--hw H]`."""

    specs: tuple[str, ...]
    repeat: int = 1
    tier: Tier | None = None
    hardware: Hardware | None = None


@dataclass(frozen=True)
class RerunGroup:
    """`/rerun-group <folder>`: all registered tests of one folder below the registered root."""

    group: str


@dataclass(frozen=True)
class RerunStage:
    """`/rerun-stage <suite>` or `/rerun-stage <stage> <runner>`."""

    stage: str
    runner: str | None = None


@dataclass(frozen=True)
class RerunFailedCi:
    """`/rerun-failed-ci`: the failed jobs of the head commit's runs."""


@dataclass(frozen=True)
class TagRunCiLabel:
    """`/tag-run-ci-label`: the label that lets the larger suites run."""


@dataclass(frozen=True)
class TagAndRerunCi:
    """`/tag-and-rerun-ci`: the label, then the failed jobs."""


@dataclass(frozen=True)
class Explore:
    scenario: str
    minutes: int = MINUTES_DEFAULT


Command = RerunTest | RerunGroup | RerunStage | RerunFailedCi | TagRunCiLabel | TagAndRerunCi | Explore
Options = dict[str, str]


def parse_comment(body: str) -> Command | None:
    """Return the command in a comment's first line; None if there is none of ours. Raises `CommandRefusedError`."""
    line = body.partition("\n")[0].removesuffix("\r")
    name = _command_name(line)
    if name is None:
        return None
    if len(body) > BODY_MAX_CHARS or len(line) > LINE_MAX_CHARS:
        raise CommandRefusedError(f"a command line has at most {LINE_MAX_CHARS} characters, this one has {len(line)}")
    words = line.replace("\t", " ").split(" ")[1:]
    arguments, options = _sorted_words([word for word in words if word])
    usage, build = COMMANDS[name]
    unknown = [option for option in options if f"--{option} " not in usage]
    if unknown:
        written = unknown[0] if unknown[0].startswith("-") else f"--{unknown[0]}"
        raise CommandRefusedError(f"{name} has no option {quoted(written)}; usage: `{usage}`")
    return build(usage, arguments, options)


def name_of(command: Command) -> str:
    """Return the command's word without the slash: `rerun-test` for `RerunTest`."""
    return re.sub(r"(?<!^)(?=[A-Z])", "-", type(command).__name__).lower()


def _command_name(line: str) -> str | None:
    """Return our command; refuse a misspelling of one; ignore the commands of other bots."""
    word = re.split(r"[ \t]", line, maxsplit=1)[0]
    if not word.startswith("/") or word in COMMANDS:
        return word if word in COMMANDS else None
    shown = word[:40]
    near = [name for name in COMMANDS if shown.startswith(name)]
    near = near or difflib.get_close_matches(shown, COMMANDS, 2, NEAR_ENOUGH)
    if near:
        listed = " or ".join(f"`{name}`" for name in near)
        raise CommandRefusedError(f"there is no command {quoted(word)}; did you mean {listed}?")
    return None


def _sorted_words(words: list[str]) -> tuple[list[str], Options]:
    """Separate arguments from `--name value` and `--name=value`, after checking each word's characters."""
    if len(words) > 2 * SPECS_MAX:
        raise CommandRefusedError(f"{len(words)} words are too many; name at most {SPECS_MAX} tests, or a folder")
    arguments: list[str] = []
    options: Options = {}
    rest = iter(words)
    for word in rest:
        _check_alphabet(word)
        if not word.startswith("-"):
            arguments.append(word)
            continue
        option, equals, value = word.partition("=")
        name = option.removeprefix("--")
        if name in options:
            raise CommandRefusedError(f"{quoted(option)} is given twice; give it once")
        options[name] = value if equals else next(rest, "")
        if not options[name]:
            raise CommandRefusedError(f"{quoted(option)} needs a value")
        _check_alphabet(options[name])
    return arguments, options


def _check_alphabet(word: str) -> None:
    if not WORD.fullmatch(word):
        raise CommandRefusedError(
            f"{quoted(word)} has characters that no command needs; use A-Z a-z 0-9 _ . / : [ ] = , + -"
        )


def _rerun_test(usage: str, arguments: list[str], options: Options) -> Command:
    if not 1 <= len(arguments) <= SPECS_MAX:
        raise CommandRefusedError(f"name 1 to {SPECS_MAX} tests, got {len(arguments)}; usage: `{usage}`")
    repeat = _number(options, "repeat", 1, REPEAT_MAX)
    tier = Tier(_choice(options, "tier", list(Tier))) if "tier" in options else None
    hardware = Hardware(_choice(options, "hw", list(Hardware))) if "hw" in options else None
    return RerunTest(tuple(arguments), repeat, tier, hardware)


def _explore(usage: str, arguments: list[str], options: Options) -> Command:
    _count(usage, arguments, 1, 1)
    return Explore(arguments[0], _number(options, "minutes", MINUTES_DEFAULT, MINUTES_MAX))


def _plain(kind: Callable[..., Command], low: int, high: int) -> Callable[[str, list[str], Options], Command]:
    """Return the builder of a command with `low` to `high` arguments and no options."""

    def build(usage: str, arguments: list[str], _options: Options) -> Command:
        _count(usage, arguments, low, high)
        return kind(*arguments)

    return build


def _count(usage: str, arguments: list[str], low: int, high: int) -> None:
    if not low <= len(arguments) <= high:
        raise CommandRefusedError(f"got {len(arguments)} arguments; usage: `{usage}`")


def _number(options: Options, name: str, default: int, high: int) -> int:
    text = options.get(name, str(default))
    if not NUMBER.fullmatch(text) or int(text) > high:
        raise CommandRefusedError(f"`--{name}` must be a whole number from 1 to {high}, got {quoted(text)}")
    return int(text)


def _choice(options: Options, name: str, choices: list[Tier] | list[Hardware]) -> str:
    if options[name] not in choices:
        listed = ", ".join(choices)
        raise CommandRefusedError(f"`--{name}` must be one of {listed}, got {quoted(options[name])}")
    return options[name]


COMMANDS: dict[str, tuple[str, Callable[[str, list[str], Options], Command]]] = {
    "/rerun-test": ("/rerun-test SPEC... [--repeat N] [--tier T] [--hw H]", _rerun_test),
    "/rerun-group": ("/rerun-group FOLDER", _plain(RerunGroup, 1, 1)),
    "/rerun-stage": ("/rerun-stage SUITE, or /rerun-stage STAGE RUNNER", _plain(RerunStage, 1, 2)),
    "/rerun-failed-ci": ("/rerun-failed-ci", _plain(RerunFailedCi, 0, 0)),
    "/tag-run-ci-label": ("/tag-run-ci-label", _plain(TagRunCiLabel, 0, 0)),
    "/tag-and-rerun-ci": ("/tag-and-rerun-ci", _plain(TagAndRerunCi, 0, 0)),
    "/explore": ("/explore FILE::SCENARIO [--minutes M]", _explore),
}
