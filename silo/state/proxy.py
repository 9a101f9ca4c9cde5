"""A hospital's HTTP proxy, through which the coordinator is reached by CONNECT (RFC 9110, section 9.3.6)."""

from __future__ import annotations

import base64
import os
from typing import Any

from pydantic import field_validator, model_validator
from pydantic_core import PydanticCustomError

from medsilo.privacy.errors import IdentityError
from medsilo.privacy.files.configuration import HIDDEN, FilePath, StrictModel
from medsilo.privacy.identity.endpoint import split_address

_WRITTEN = "http://host:port, for example http://proxy.hospital.example:3128"


class ProxyConfig(StrictModel):
    """``url``: ``http://host:port``. ``credentials``: a file with one line, ``name:password``, that nobody but this
    account can read; without it the proxy is told no name.

    A wrong value is not shown in errors: it may hold a password.
    """

    url: str
    credentials: FilePath | None = None

    @model_validator(mode="before")
    @classmethod
    def _mapping(cls, value: Any) -> Any:
        if not isinstance(value, dict):
            raise PydanticCustomError(HIDDEN, f"should hold the key `url` ({_WRITTEN}) and, if needed, `credentials`")
        return value

    @field_validator("url", mode="before")
    @classmethod
    def _plain(cls, url: Any) -> str:
        scheme, separator, rest = str(url).partition("://")
        if "@" in rest:
            problem = (
                "should hold no name and password; put them into a file, as one line `name:password`, and name it as "
                "`credentials:`"
            )
        elif scheme.lower() == "https":
            problem = f"should begin with http://, which is how a proxy itself is spoken to; {_WRITTEN}"
        elif not separator or scheme.lower() != "http":
            problem = f"should be {_WRITTEN}"
        else:
            try:
                split_address(rest.removesuffix("/"))
            except ValueError:
                problem = f"should be {_WRITTEN}"
            else:
                return str(url)
        raise PydanticCustomError(HIDDEN, problem)

    @property
    def address(self) -> str:
        """``host:port``."""
        return self.url.partition("://")[2].removesuffix("/")

    def authorization(self) -> str | None:
        """The value of the header ``Proxy-Authorization`` (Basic, RFC 7617); None without ``credentials``.

        Raises ``IdentityError`` if the file is missing, can be read by others, or holds anything but one line.
        """
        path = self.credentials
        if path is None:
            return None
        try:
            if path.stat().st_mode & 0o077:
                raise IdentityError(f"{path}: others can read the proxy's password; run `chmod 600 {path}`")
            line = path.read_text(encoding="utf-8").removesuffix("\n").removesuffix("\r")
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "is not UTF-8 text"
            raise IdentityError(f"{path}: the proxy's credentials cannot be read: {reason}") from None
        if not line.isprintable() or not line.partition(":")[0] or ":" not in line:
            raise IdentityError(f"{path}: should be one line, name:password, for the proxy {self.address}")
        return "Basic " + base64.b64encode(line.encode()).decode()


def proxies_in_environment() -> list[str]:
    """The environment's variables that name a proxy."""
    usual = ("grpc_proxy", "https_proxy", "http_proxy", "all_proxy")
    names = [*usual, *map(str.upper, usual), "GRPC_ADDRESS_HTTP_PROXY"]
    return [name for name in names if os.environ.get(name)]
