"""The run's secret: where it comes from, where it does not go."""

from __future__ import annotations

from pathlib import Path

import pytest

from engine.core.errors import ConfigError
from engine.process.links.secret import Secret, read_secret


def test_a_new_one_is_written_for_its_owner_alone_and_read_back(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text("what a killed server left")
    path.chmod(0o644)
    secret = Secret.new()
    secret.write(path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert read_secret(path).mac(b"x") == secret.mac(b"x") != Secret.new().mac(b"x")
    assert path.read_text().strip() not in repr(secret)


def test_one_that_others_can_read_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    Secret.new().write(path)
    path.chmod(0o640)
    with pytest.raises(
        ConfigError, match=f"must be accessible to its owner only, got mode 640 of {path}; run `chmod 600 {path}`"
    ):
        read_secret(path)


@pytest.mark.parametrize(
    ("content", "told"),
    [(None, "must be readable text"), (b"\xff" * 40, "must be readable text"), (b" short \n", "got 5")],
)
def test_what_is_no_secret_is_refused(tmp_path: Path, content: bytes | None, told: str) -> None:
    path = tmp_path / "secret"
    if content is not None:
        path.write_bytes(content)
        path.chmod(0o600)
    with pytest.raises(ConfigError, match=told) as caught:
        read_secret(path)
    assert "short" not in str(caught.value).replace("too short", "")
