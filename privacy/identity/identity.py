"""A party's name, as its certificate says it: ``spiffe://FEDERATION/ROLE/NAME``."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, cast

from medsilo.privacy.errors import IdentityError

Role = Literal["silo", "coordinator", "operator"]
"""``operator``: a person who looks at the coordinator's page; no RPC is for it."""
ROLES: tuple[Role, ...] = ("silo", "coordinator", "operator")
_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_URI = re.compile(r"spiffe://([^/]+)/([^/]+)/([^/]+)")
LONGEST_NAME = 64  # X.509's limit for a common name (RFC 5280, ub-common-name)


@dataclass(frozen=True)
class Identity:
    """A party. Federation and name are lower-case letters, digits and hyphens, at most 63."""

    federation: str
    role: Role
    name: str

    def __post_init__(self) -> None:
        for what, value in (("federation", self.federation), ("name", self.name)):
            if not _LABEL.fullmatch(value):
                raise IdentityError(
                    f"{what} {value!r} should be lower-case letters, digits and hyphens (at most 63), "
                    "for example hospital-3"
                )
        if self.role not in ROLES:
            raise IdentityError(f"role {self.role!r} should be {' or '.join(ROLES)}")

    @property
    def uri(self) -> str:
        """``spiffe://FEDERATION/ROLE/NAME``."""
        return f"spiffe://{self.federation}/{self.role}/{self.name}"

    @property
    def server_name(self) -> str:
        """The DNS name in a coordinator's certificate."""
        return f"{self.name}.coordinator.{self.federation}"

    @classmethod
    def parse(cls, uri: str) -> Identity:
        """Raises ``IdentityError`` for anything but an identity."""
        match = _URI.fullmatch(uri)
        if match is None:
            raise IdentityError(f"{uri!r} is not an identity; it should be spiffe://FEDERATION/ROLE/NAME")
        return cls(match[1], cast("Role", match[2]), match[3])


@lru_cache(maxsize=1024)
def is_silo(uri: str) -> bool:
    """Whether a URI is in the form of a silo's identity, whatever its name is."""
    match = _URI.fullmatch(uri)
    return match is not None and match[2] == "silo"
