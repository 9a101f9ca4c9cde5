"""Keys and passwords stand in their own files and nowhere else: not in logs, errors, journals, databases or reports."""

from __future__ import annotations

import base64
from collections.abc import Callable
from pathlib import Path

import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.support.runs.federation import Federation

PASSWORD = "correct-horse-battery-staple"


def spellings(path: Path) -> list[bytes]:
    """A key's secret part as it might be written: its file's lines, raw, hexadecimal, base64, as Python shows bytes."""
    content = path.read_bytes()
    secrets = [content]
    if content.startswith(b"-----"):
        key = serialization.load_pem_private_key(content, None)
        raw = (
            key.private_numbers().private_value.to_bytes(32, "big")
            if isinstance(key, ec.EllipticCurvePrivateKey)
            else key.private_bytes_raw()  # type: ignore[union-attr]
        )
        secrets = [raw]
        lines = content.splitlines()[1:-1]
    else:
        lines = []
    found = [line for line in lines if len(line) > 40]
    for secret in secrets:
        found += [secret, secret.hex().encode(), base64.b64encode(secret).rstrip(b"="), repr(secret)[2:-1].encode()]
        found.append(str(int.from_bytes(secret, "big")).encode())
    return found


def test_no_key_stands_anywhere_but_in_its_own_file(federation: Callable[..., Federation]) -> None:
    one = federation(run={"rounds": 1})
    for name in one.silos:
        one.write_silo(name, keep_sent_days=1)
    coordinator = one.start("talkative", "coordinator", "serve", "--until-done", "--config", "coordinator.yaml")
    one.wait_to_say("coordinator", "listening")
    silos = [one.start("talkative", "silo", "train", "--config", f"{name}.yaml") for name in one.silos]
    one.finish(*silos, coordinator)
    said = [one.command("coordinator", "ca", "revoke", "hospital3")]
    said.append(one.command("silo", "audit", "export", "--config", "hospital1.yaml"))
    said.append(one.command("silo", "keys", "--config", "hospital2.yaml", "--rotate"))
    keys = sorted([*one.folder.rglob("*.key"), *one.folder.rglob("*.key.next")])
    assert {path.name for path in keys} == {"ca.key", "tls.key", "audit.key", "sent.key"}
    assert {path.stat().st_mode & 0o777 for path in keys} == {0o600}
    secrets = {path: spellings(path) for path in keys}

    # Each wider than its owner: refused by every command that would use it, without a word of what is in it.
    for party, name, command in (
        ("hospital1", "tls.key", ("silo", "train", "--config", "hospital1.yaml")),
        ("hospital1", "audit.key", ("silo", "train", "--config", "hospital1.yaml")),
        ("hospital1", "sent.key", ("silo", "train", "--config", "hospital1.yaml")),
        ("coordinator", "tls.key", ("coordinator", "serve", "--config", "coordinator.yaml")),
        ("coordinator", "audit.key", ("coordinator", "serve", "--config", "coordinator.yaml")),
        ("ca", "ca.key", ("coordinator", "ca", "revoke", "hospital2")),
    ):
        path = one.folder / "ca" / name if party == "ca" else one.keys(party) / name
        for mode in (0o640, 0o604):
            path.chmod(mode)
            said.append(one.command(*command, expect=5))
            assert name in said[-1].replace("\n", "")
            assert "chmod 600" in said[-1].replace("\n", " ")
        content = path.read_bytes()
        path.chmod(0o600)
        path.write_bytes(content[: len(content) // 2])  # damaged
        said.append(one.command(*command, expect=5))
        path.write_bytes(content)

    texts = {path: path.read_bytes() for path in one.folder.rglob("*") if path.is_file()}
    assert len(texts) > 40
    assert any(b"this is said too" in text for text in texts.values()), "the logs are detailed"
    found = [
        f"{key.relative_to(one.folder)} in {path.relative_to(one.folder)}"
        for key, spelled in secrets.items()
        for path, text in texts.items()
        for secret in spelled
        if path != key and secret in text
    ]
    assert found == []
    everything = "".join(said).replace("\n", "").encode()
    assert [key.name for key, spelled in secrets.items() for secret in spelled if secret in everything] == []


@pytest.mark.parametrize(
    ("store", "code"),
    [
        (f"postgresql+psycopg://me:{PASSWORD}@localhost:1/x", 2),
        (f"postgresql+psycopg://localhost:1/x?password={PASSWORD}", 2),
        (f"no such url {PASSWORD}://me:{PASSWORD}@", 2),
        ("postgresql+psycopg://me@127.0.0.1:1/x", 12),
    ],
)
def test_a_databases_password_is_never_shown(
    federation: Callable[..., Federation], monkeypatch: pytest.MonkeyPatch, store: str, code: int
) -> None:
    """The last one's password comes by the environment, and nobody listens at its address."""
    monkeypatch.setenv("PGPASSWORD", PASSWORD)
    one = federation(coordinator={"store": store})
    one.forked = False  # the environment counts for a new process
    said = one.command("coordinator", "status", "--config", "coordinator.yaml", expect=code)
    assert PASSWORD not in said.replace("\n", "")
