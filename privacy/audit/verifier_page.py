"""The verifier as one HTML file, which needs no network and no installation: the same checks, in the browser."""

from __future__ import annotations

import base64
import hashlib
import inspect
import json
from importlib.resources import files

from medsilo.privacy.exposure import MEANING
from medsilo.privacy.journal.records import TYPES

_TEMPLATES = files("medsilo.privacy.verify") / "templates"


def verifier_page() -> bytes:
    """The file's bytes, always the same. Its policy lets it open nothing, and run and look like nothing but what is in
    it."""
    style, verifier, page = map(_read, ("verifier.css", "verifier.js", "page.js"))
    words = {
        "classes": {exposure.value: said for exposure, said in MEANING.items()},
        "kinds": {kind: " ".join((inspect.getdoc(found) or "").split()) for kind, found in TYPES.items()},
    }
    scripts = " ".join(map(_hash, (verifier, page)))
    policy = f"default-src 'none'; script-src {scripts}; style-src {_hash(style)}; base-uri 'none'; form-action 'none'"
    parts = {
        "policy": policy,
        "style": style,
        "words": json.dumps(words, ensure_ascii=False, sort_keys=True).replace("<", "\\u003c"),
        "verifier": verifier,
        "page": page,
    }
    content = _read("verifier.html")
    for name, part in parts.items():
        content = content.replace(f"{{{{{name}}}}}", part, 1)
    return content.encode()


def _read(name: str) -> str:
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    """As a content security policy names what may run."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"
