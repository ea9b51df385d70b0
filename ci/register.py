"""Two calls by which a test file declares its suites and its time.

They do nothing when they run: `ci.registry` reads them from the syntax tree and never imports the file. Their arguments
must therefore be constants, written at the module's top level.
"""


def register_cpu_ci(*, est_time: float, suite: str, nightly: bool = False, disabled: str | None = None) -> None:
    """Register the calling file for a suite that needs no accelerator.

    `est_time` is the expected seconds for the whole file, used until a measured time is recorded; `suite` is a name
    from `ci/suites.toml`; `nightly` keeps the file out of pull requests; `disabled` is the reason why it runs nowhere.
    """


def register_cuda_ci(
    *, est_time: float, stage: str, runner_config: str, nightly: bool = False, disabled: str | None = None
) -> None:
    """Register the calling file for a stage of the CUDA pipeline on one kind of runner, such as `4-gpu`.

    `ci/suites.toml` lists the stages and runner configurations; the rest is as in `register_cpu_ci`.
    """
