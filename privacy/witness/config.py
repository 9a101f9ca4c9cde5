"""A witness's configuration file, and how the parties whose checkpoints it cosigns name it in theirs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field, model_validator

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.files.configuration import FilePath, StrictModel, load
from medsilo.privacy.identity.cosignature import COSIGNATURE, ED25519, CosignatureError, NoteKey, Policy, read_key
from medsilo.privacy.identity.endpoint import Address, is_loopback

MOST_WITNESSES = 16
"""Of one party."""


def _key(text: str, kind: int, what: str) -> str:
    try:
        found = read_key(text)
    except CosignatureError as error:
        raise ValueError(str(error)) from None
    if found.kind != kind:
        raise ValueError(f"{text:.200} is not the key of a {what}")
    return text.strip()


WitnessKey = Annotated[str, AfterValidator(lambda text: _key(text, COSIGNATURE, "witness"))]
"""``name+hash+key`` of who cosigns (tlog-cosignature, type 0x04)."""
LogKey = Annotated[str, AfterValidator(lambda text: _key(text, ED25519, "journal"))]
"""``name+hash+key`` of a journal, or of another log (signed-note, type 0x01)."""


class WitnessTls(StrictModel):
    """What a witness shows to who calls it, as PEM files. ``certificate``: it, and those between it and its CA.
    ``key``: its private key.
    """

    certificate: FilePath
    key: FilePath


class WitnessConfig(StrictModel):
    """``witness.yaml``. Relative paths are taken from the file's folder.

    ``name``: as which it cosigns, by custom a host name with a path, as ``ethics.example.org/witness``. ``listen``:
    address and port. ``state``: folder for its key and for the last size and root of each log. ``logs``: keys of the
    journals whose checkpoints it cosigns, ``name+hash+key`` as ``witness key`` prints them; of one log there may be
    several. ``tls``: by default plain text, which shows sizes and roots to the network and nothing else.
    """

    name: Annotated[str, Field(min_length=1, max_length=200, pattern=r"^[^\s+]+$")]
    listen: Address
    state: FilePath
    logs: tuple[LogKey, ...] = Field(min_length=1)
    tls: WitnessTls | None = None

    @classmethod
    def read(cls, path: Path) -> Self:
        """Raises ``ConfigurationError`` naming the file and every key that is wrong."""
        return load(path, cls)

    @property
    def key(self) -> Path:
        """The file of its private key."""
        return self.state / "witness.key"

    @property
    def keys(self) -> list[NoteKey]:
        """The logs' keys."""
        return [read_key(text) for text in self.logs]


class WitnessAddress(StrictModel):
    """A witness that cosigns this party's checkpoints.

    ``url``: where it takes them, without ``add-checkpoint``; ``https``, or ``http`` on loopback. ``key``: its public
    key, ``name+hash+key``. ``ca``: a file of certificates (PEM) to check its own with; the system's by default.
    """

    url: str
    key: WitnessKey
    ca: FilePath | None = None

    @model_validator(mode="after")
    def _usable(self) -> WitnessAddress:
        parts = urlsplit(self.url)
        try:
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and not (parts.query or parts.fragment)
            good = good and parts.username is None and self.url.isascii() and self.url.isprintable()
            plain = parts.scheme == "http" and not is_loopback(self.address)
        except ValueError:
            good = plain = False
        if not good:
            raise ValueError(f"{self.url:.200} should be https://HOST/PATH")
        if plain:
            raise ValueError("http is for loopback addresses only; use https")
        return self

    @property
    def address(self) -> str:
        """``host:port``."""
        parts = urlsplit(self.url)
        host = f"[{parts.hostname}]" if ":" in (parts.hostname or "") else parts.hostname
        return f"{host}:{parts.port or (443 if parts.scheme == 'https' else 80)}"

    @property
    def secure(self) -> bool:
        """Whether it is asked over TLS."""
        return urlsplit(self.url).scheme == "https"

    @property
    def path(self) -> str:
        """The path of its URL, without the slash at its end."""
        return urlsplit(self.url).path.rstrip("/")

    @property
    def note_key(self) -> NoteKey:
        """Its public key."""
        return read_key(self.key)


class WitnessPolicy(StrictModel):
    """Whose cosignatures a journal is to have.

    ``keys``: of witnesses, ``name+hash+key``. ``needed``: of how many of them; of all by default. ``fresh_hours``:
    within how long after its own time each record is to have been seen by so many; ever by default.
    """

    keys: tuple[WitnessKey, ...] = Field(min_length=1, max_length=64)
    needed: int | None = Field(default=None, ge=1)
    fresh_hours: float | None = Field(default=None, gt=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _possible(self) -> WitnessPolicy:
        try:
            self.rule()
        except CosignatureError as error:
            raise ValueError(str(error)) from None
        return self

    def rule(self) -> Policy:
        """It as the verifier takes it."""
        keys = tuple(read_key(text) for text in self.keys)
        fresh = None if self.fresh_hours is None else round(self.fresh_hours * 3600)
        return Policy(keys, self.needed or len({key.name for key in keys}), fresh)


def read_policy(text: str) -> Policy:
    """A policy from what ``--witness`` is given: a witness's key, or a file with one or with a policy (YAML).

    Raises ``ConfigurationError`` for anything else.
    """
    try:
        return Policy((read_key(text),), 1)
    except CosignatureError:
        path = Path(text)
    if not path.exists():
        raise ConfigurationError(f"--witness {text}: is neither a key in the form name+hash+key nor a file")
    content = path.read_text(encoding="utf-8", errors="replace").strip()
    try:
        return Policy((read_key(content),), 1)
    except CosignatureError:
        return load(path, WitnessPolicy).rule()
