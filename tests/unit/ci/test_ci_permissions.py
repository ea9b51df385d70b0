"""Permissions of commands."""

import pytest
from sample_tree import SampleTree

from ci.commands import Command, Explore, RerunFailedCi, RerunGroup, RerunStage, RerunTest, TagAndRerunCi, TagRunCiLabel
from ci.errors import CatalogueError
from ci.permissions import Asker, Permissions

COMMANDS: list[Command] = [
    RerunTest(("a.py",)),
    RerunGroup("a"),
    RerunStage("base-cpu"),
    RerunFailedCi(),
    Explore("a.py::x"),
    TagRunCiLabel(),
    TagAndRerunCi(),
]
NOBODY_LISTED = Permissions({})


def asker(login: str, role: str = "read", *, is_fork: bool = False) -> Asker:
    return Asker(login, role, "author", is_fork)


@pytest.mark.parametrize("command", COMMANDS)
def test_roles_authors_and_forks(command: Command) -> None:
    """A command runs for those who may give it (E03)."""
    is_tag = isinstance(command, TagRunCiLabel | TagAndRerunCi)
    for role in ("admin", "maintain", "write"):
        assert NOBODY_LISTED.refusal(command, asker("writer", role)) is None
        assert NOBODY_LISTED.refusal(command, asker("writer", role, is_fork=True)) is None
    for role in ("read", "none", "triage", ""):
        assert NOBODY_LISTED.refusal(command, asker("stranger", role)) is not None
        assert NOBODY_LISTED.refusal(command, asker("author", role, is_fork=True)) is not None
        assert (NOBODY_LISTED.refusal(command, asker("Author", role)) is not None) == is_tag


def test_the_file_grants_by_command_but_not_on_forks() -> None:
    """A command runs for those who may give it (E03)."""
    listed = Permissions({"trusted": frozenset({"rerun-test", "tag-run-ci-label"})})
    assert listed.refusal(RerunTest(("a.py",)), asker("Trusted")) is None
    assert listed.refusal(TagRunCiLabel(), asker("trusted")) is None
    assert listed.refusal(Explore("a.py::x"), asker("trusted")) is not None
    assert listed.refusal(RerunTest(("a.py",)), asker("trusted", is_fork=True)) is not None


def test_a_refusal_says_who_may() -> None:
    """Every command is answered, refusals too (E04)."""
    assert "`@stranger`" in str(NOBODY_LISTED.refusal(COMMANDS[0], asker("stranger")))
    assert "people with write permission may" in str(NOBODY_LISTED.refusal(COMMANDS[0], asker("author", is_fork=True)))
    assert "ci/permissions.json" in str(NOBODY_LISTED.refusal(TagRunCiLabel(), asker("author")))


def test_the_file_is_read_strictly(tree: SampleTree) -> None:
    assert Permissions.load(tree.root).granted == {}
    path = tree.root / "ci" / "permissions.json"
    path.write_text('{"Trusted": ["rerun-test"]}')
    assert Permissions.load(tree.root).granted == {"trusted": frozenset({"rerun-test"})}
    path.write_text('{"trusted": ["rerun-everything"]}')
    with pytest.raises(CatalogueError, match="no such command: /rerun-everything"):
        Permissions.load(tree.root)
    path.write_text('{"trusted": true}')
    with pytest.raises(CatalogueError, match="must map logins"):
        Permissions.load(tree.root)
