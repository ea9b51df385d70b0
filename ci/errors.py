"""The error tree of `ci`: everything that it raises on purpose.

Each text names the thing, the rule, the value and the remedy: most of these texts become answers on pull requests.
"""


class CiError(Exception):
    """Base of everything that `ci` raises on purpose."""


class CatalogueError(CiError):
    """`ci/suites.toml` or `ci/permissions.json` breaks a rule; the text names file, field, value and remedy."""


class TimesError(CiError):
    """The file of measured times cannot be read; the text says how to make a new one."""


class SpecError(CiError):
    """A test spec names nothing, or several things, or something outside the registered tests."""


class CommandRefusedError(CiError):
    """A slash command that is not carried out; the text is the answer that its author gets."""


class GitHubError(CiError):
    """GitHub's API failed a request: the text has the request, the status and GitHub's message.

    `status` is 0 when no answer came.
    """

    def __init__(self, text: str, *, status: int = 0) -> None:
        super().__init__(text)
        self.status = status
