"""The error tree of `ci`: everything that it raises deliberately.

Each text names the thing, the rule, the value and the remedy: most of them become answers on pull requests.
"""


class CiError(Exception):
    """Base of everything that `ci` raises deliberately."""


class CatalogueError(CiError):
    """`ci/suites.toml` or `ci/permissions.json` breaks a rule; the text names file, field, value and remedy."""


class TimesError(CiError):
    """The file of measured times cannot be read; the text says how to make a new one."""


class SpecError(CiError):
    """A test spec names nothing, or several things, or something outside the registered tests."""


class CommandRefusedError(CiError):
    """A refused slash command; the text is the answer to its author."""


class GitHubError(CiError):
    """GitHub's API failed a request: the text has the request, the status and GitHub's message.

    `status` is 0 if no answer came.
    """

    def __init__(self, text: str, *, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
