"""The catalogue of suites, stages, runners and flaky failure classes, read from `ci/suites.toml`.

All of `ci` asks this one object; an unknown name is an error everywhere.
"""

import tomllib
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, field_validator, model_validator

from ci.errors import CatalogueError

CATALOGUE_PATH = "ci/suites.toml"
CPU_RUNNER = "cpu"
CODE_ERRORS = frozenset(
    {
        "AssertionError",
        "AttributeError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "IntegrityError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "RecursionError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
        "ValueError",
        "ZeroDivisionError",
    }
)

Name = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,39}$")]


class Hardware(StrEnum):
    CPU = "cpu"
    CUDA = "cuda"


class FlakyClass(BaseModel):
    """An exception class, by its bare name, whose failures are retried; `reason` justifies that."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    error: Annotated[str, StringConstraints(pattern=r"^[A-Za-z_]\w*$")]
    retries: int = Field(ge=1, le=3)
    reason: Annotated[str, StringConstraints(min_length=10)]

    @field_validator("error")
    @classmethod
    def _is_no_code_error(cls, error: str) -> str:
        if error in CODE_ERRORS:
            raise ValueError(f"{error} is an error of the code and is never retried; remove it and fix the test")
        return error


class Catalogue(BaseModel):
    """The catalogue: names map to a sentence (suites, stages), a command (environments) or a runner's labels."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    registered_roots: tuple[str, ...] = Field(min_length=1)
    timeout_per_file_s: int = Field(gt=0, le=6 * 3600)
    cpu_suites: dict[Name, str]
    own_environments: dict[Name, str] = {}
    cuda_stages: dict[Name, str] = {}
    runners: dict[Name, Annotated[tuple[str, ...], Field(min_length=1)]]
    flaky: tuple[FlakyClass, ...] = ()

    @field_validator("registered_roots")
    @classmethod
    def _stay_inside(cls, roots: tuple[str, ...]) -> tuple[str, ...]:
        for root in roots:
            if root.startswith("/") or ".." in root.split("/"):
                raise ValueError(f"{root!r} must be a folder inside the repository, written relative to it")
        return tuple(root.rstrip("/") for root in roots)

    @field_validator("runners")
    @classmethod
    def _have_a_cpu_runner(cls, runners: dict[str, tuple[str, ...]]) -> dict[str, tuple[str, ...]]:
        if CPU_RUNNER not in runners:
            raise ValueError(f"needs an entry {CPU_RUNNER!r}: the runner of all CPU suites")
        return runners

    @model_validator(mode="after")
    def _environments_are_of_suites(self) -> Self:
        for name in self.own_environments:
            if name not in self.cpu_suites:
                raise ValueError(f"own_environments has {name!r}, which is no entry of cpu_suites; add it there")
        return self

    @classmethod
    def load(cls, root: Path) -> "Catalogue":
        """Read the catalogue of the repository at `root`. Raises `CatalogueError`."""
        path = root / CATALOGUE_PATH
        try:
            return cls.model_validate(tomllib.loads(path.read_text(encoding="ascii")))
        except OSError as exc:
            raise CatalogueError(
                f"{path}: cannot be read ({exc}); run from a repository that has one, or pass --root"
            ) from exc
        except ValidationError as exc:
            raise CatalogueError(f"{path}: {_first_complaint(exc)}") from exc
        except (ValueError, RecursionError) as exc:
            raise CatalogueError(f"{path}: is not ASCII TOML: {exc}") from exc

    def runner_labels(self, runner: str) -> tuple[str, ...]:
        """Return the labels by which a job requests this runner."""
        return self.runners[runner]

    def retries(self, error: str) -> int:
        """Return how often to retry after this exception; 0 for an undeclared one."""
        return max((known.retries for known in self.flaky if known.error == error), default=0)


def _first_complaint(exc: ValidationError) -> str:
    error = exc.errors()[0]
    field = ".".join(str(part) for part in error["loc"]) or "the file"
    return f"{field}: {error['msg']} (got {str(error.get('input'))[:80]})"
