"""Numbers, times and lists in words."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any


def listed(items: Sequence[str]) -> str:
    """``a, b and c``."""
    return " and ".join([", ".join(items[:-1]), items[-1]] if len(items) > 1 else items)


def readable_bytes(count: int) -> str:
    """``178.6 kB`` and the like."""
    size = float(count)
    for unit in ("bytes", "kB", "MB", "GB", "TB"):
        if size < 1000 or unit == "TB":
            return f"{count} bytes" if unit == "bytes" else f"{size:.1f} {unit}"
        size /= 1000
    raise AssertionError("unreachable: every size has a unit")


def grouped(count: int) -> str:
    """``1 755 080``: digits in threes, held together by no-break spaces."""
    return f"{count:,}".replace(",", "\N{NO-BREAK SPACE}")


def minute(time: str) -> str:
    """A record's time without its seconds."""
    return time[:16].replace("T", " ")


def last_part(identity: str) -> str:
    """A party's name out of its identity."""
    return identity.rsplit("/", 1)[-1]


def text_of(record: Mapping[str, Any], key: str) -> str:
    """A record's entry as text, where it has one."""
    return str(record.get(key, "?"))


def capital(text: str) -> str:
    """The text with a capital first letter, as at a sentence's beginning."""
    return text[:1].upper() + text[1:]


def number_of(count: int, what: str) -> str:
    """``3 rounds``."""
    return f"{count} {what}" + ("" if count == 1 else "s")


def ranges(numbers: Iterable[int]) -> str:
    """Ascending numbers in few words.

    >>> ranges([1, 2, 3, 5])
    '1–3, 5'
    """
    spans: list[list[int]] = []
    for number in numbers:
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    return ", ".join(str(first) if first == last else f"{first}–{last}" for first, last in spans)


def rounds_of(numbers: Collection[int]) -> str:
    """Rounds, counted from 0, as people count them.

    >>> rounds_of([0]), rounds_of([0, 1, 2, 4])
    ('round 1', 'rounds 1–3, 5')
    """
    return f"round{'s' * (len(numbers) > 1)} {ranges(number + 1 for number in sorted(numbers))}"


def rounds_and_end(numbers: Iterable[int], planned: int | None) -> str:
    """Rounds, counted from 0, of a run of ``planned``; what comes after the last one is its end.

    >>> rounds_and_end([0, 1, 2, 3], 3)
    '1–3, end'
    """
    found = sorted(numbers)
    trained = [number + 1 for number in found if planned is None or number < planned]
    return ", ".join([ranges(trained)] * bool(trained) + ["end"] * (len(trained) < len(found)))


def times(count: int) -> str:
    """``once``, ``3 times``."""
    return "once" if count == 1 else f"{grouped(count)} times"


def yes_or_no(condition: bool) -> str:
    """The answer."""
    return "yes" if condition else "no"


def shown(epsilon: float) -> str:
    """An ε with three decimals, rounded up; the sign ∞ where there is no bound."""
    return "∞" if math.isinf(epsilon) else f"{math.ceil(epsilon * 1000 - 1e-6) / 1000:.3f}"
