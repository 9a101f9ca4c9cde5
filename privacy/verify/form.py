"""The forms of JSON objects that others wrote: for each name, whether a value is in its form."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

Good = Callable[[Any], bool]
Form = Mapping[str, Good]
HEX16, HEX32 = re.compile(r"[0-9a-f]{32}"), re.compile(r"[0-9a-f]{64}")


def text(most: int = 1 << 24) -> Good:
    """Text of so many characters at most."""
    return lambda value: isinstance(value, str) and len(value) <= most


def whole(least: int, most: int = 2**53 - 1) -> Good:
    """A whole number."""
    return lambda value: type(value) is int and least <= value <= most


def matching(pattern: re.Pattern[str]) -> Good:
    """Text in a pattern."""
    return lambda value: isinstance(value, str) and pattern.fullmatch(value) is not None


def items(most: int, each: Good = lambda _: True) -> Good:
    """A list of so many items at most."""
    return lambda value: isinstance(value, list) and len(value) <= most and all(map(each, value))


def wrong(content: Any, form: Form, optional: Form | None = None) -> str | None:
    """The first name (by the alphabet) that is missing, unknown, or whose value is not in its form; None if all are."""
    if not isinstance(content, dict):
        return "it"
    every = {**form, **(optional or {})}
    missing = [name for name in form if name not in content]
    return min([*missing, *(n for n in content if n not in every or not every[n](content[n]))], default=None)
