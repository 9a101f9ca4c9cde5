"""When a journal's records were written, by the other side's clock: a record's time is its owner's word alone.

The cosignatures that one side gives under the other's checkpoints name a time and are signed (C2SP's cosignature/v1).
Each bounds records from two sides: what it covers was written before that time, and what stands behind the message
that brought it was written after.
"""

from __future__ import annotations

import itertools
from array import array
from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime

TOLERANCE_SECONDS = 300
"""How far two machines' clocks may be apart without anything being made of it."""
_EXPLAINED = 1000
_MOST = 255
_ONE_MORE = bytes(min(count + 1, _MOST) for count in range(256))
"""Counts of other sides, for ``bytes.translate``."""


@dataclass
class Times:
    """How many records' times the other sides' signed times confirm, contradict, or leave open.

    Confirmed: not before what the record follows, nor after what follows it, within ``tolerance_seconds``; ``widest``
    is the longest time, in seconds, between such two. ``first_contradicted`` is a record's index; ``contradiction``
    says it in words. ``alone``: other sides whose clock contradicts what others confirm, where no more of them
    contradict it than confirm it; they count for nothing. ``signed``: whether the times are signed ones; if not, they
    are those of the other side's journal.
    """

    confirmed: int = 0
    contradicted: int = 0
    unconfirmed: int = 0
    tolerance_seconds: int = TOLERANCE_SECONDS
    widest: int = 0
    first_contradicted: int | None = None
    contradiction: str = ""
    alone: list[str] = field(default_factory=list)
    signed: bool = True

    def sentence(self) -> str:
        """It in words; empty where nothing is known."""
        if not self.confirmed and not self.contradicted:
            return ""
        whose = "signed times of the other side" if self.signed else "times in the other side's journal"
        wide = f" (to within {_duration(self.widest)} at the widest)" if self.widest and self.confirmed else ""
        return (
            f"Times, held against the {whose} around them, give or take {self.tolerance_seconds // 60} minutes: "
            f"{self.confirmed} confirmed{wide}, {self.contradicted} contradicted, {self.unconfirmed} not confirmed."
        )


@dataclass
class _Words:
    """One other side's signed times. ``upto``: the first record that none of them covers yet."""

    upto: int
    since: list[int] = field(default_factory=list)
    """Records from which on a time is the least, in order; with ``after``, these times."""
    after: list[float] = field(default_factory=list)
    contradicted: array[int] = field(default_factory=lambda: array("Q"))

    def bounds(self, first: int, end: int) -> Iterator[tuple[int, float]]:
        """Ranges of the records, by their ends, with the time that each was written after."""
        number = bisect_right(self.since, first)
        while first < end:
            stop = min(self.since[number], end) if number < len(self.since) else end
            yield stop, self.after[number - 1] if number else 0.0
            first, number = stop, number + 1

    def forget(self, first: int) -> None:
        """What bounds no record from ``first`` on any more."""
        number = max(bisect_right(self.since, first) - 1, 0)
        del self.since[:number], self.after[:number]


class Clockwork:
    """Takes a journal's records and the other sides' signed times as they come. Keeps nine bytes a record, at the end
    eleven, and eight more for each other side that contradicts its time.

    ``first``: index of the first record. ``trusted``: nobody's clock is outvoted by the others'.
    """

    def __init__(self, first: int = 0, *, trusted: bool = False) -> None:
        self._first = first
        self._trusted = trusted
        self._times = array("d")
        self._confirming = bytearray()
        """By how many other sides a record's time is confirmed."""
        self._words: dict[str, _Words] = {}
        self._explained: dict[int, str] = {}
        self._widest = 0.0

    @property
    def heard(self) -> bool:
        """Whether there was any signed time at all."""
        return bool(self._words)

    @property
    def latest(self) -> float:
        """The time of the record taken last, in seconds since 1970."""
        return self._times[-1]

    def take(self, time: str) -> None:
        """Takes the next record's time."""
        self._times.append(datetime.fromisoformat(time).timestamp())
        self._confirming.append(0)

    def signed(self, peer: str, size: int, time: int) -> None:
        """The record taken last brought another party's word that it saw the first ``size`` records by that time."""
        words = self._words.setdefault(peer, _Words(self._first))
        index = self._first + len(self._times) - 1
        self._judge(peer, words, min(size, index), time)
        if not words.after or time > words.after[-1]:
            if words.since[-1:] == [index]:
                words.after[-1] = time
                return
            words.since.append(index)
            words.after.append(time)

    def after(self, peer: str) -> float:
        """By another party's latest signed time: what comes now is written after that; 0 if there is none."""
        words = self._words.get(peer)
        return words.after[-1] if words is not None and words.after else 0.0

    def earlier(self, first: int, end: int, than: float) -> Iterator[tuple[int, float]]:
        """Of the records from ``first`` on and before ``end`` those that say to be of an earlier time, with that."""
        begin = max(first - self._first, 0)
        for place, time in enumerate(self._times[begin : max(end - self._first, 0)], begin):
            if time < than:
                yield self._first + place, time

    def conclude(self) -> Times:
        """What came of it."""
        end = self._first + len(self._times)
        for peer, words in self._words.items():
            self._judge(peer, words, end, None)
        contradicting = bytearray(len(self._confirming))
        for words in self._words.values():
            for index in words.contradicted:
                place = index - self._first
                contradicting[place] = _ONE_MORE[contradicting[place]]
        alone = [
            peer for peer, words in self._words.items() if not self._trusted and self._is_outvoted(words, contradicting)
        ]
        doubted = bytearray(len(self._confirming))
        for peer, words in self._words.items():
            for index in words.contradicted if peer not in alone else ():
                doubted[index - self._first] = 1
        contradicted = doubted.count(1)
        confirmed = sum(map(bool, self._confirming)) - sum(map(bool, itertools.compress(self._confirming, doubted)))
        unconfirmed = len(self._times) - confirmed - contradicted
        found = Times(confirmed, contradicted, unconfirmed, widest=round(self._widest), alone=alone)
        if found.contradicted:
            found.first_contradicted = self._first + doubted.find(1)
            found.contradiction = self._explained.get(found.first_contradicted, "its time is contradicted")
        return found

    def _is_outvoted(self, words: _Words, contradicting: bytearray) -> bool:
        """Whether one other side's clock is against the record's own and as many others' at least.

        One that confirms what several contradict silences nobody: it may belong to whoever wrote the record.
        """
        outvoted = joined = 0
        for index in words.contradicted:
            against = contradicting[index - self._first]
            if self._confirming[index - self._first] >= against:
                outvoted += 1
            elif against > 1:
                joined += 1
        return outvoted > joined

    def _judge(self, peer: str, words: _Words, end: int, before: int | None) -> None:
        """Judges the records up to ``end`` by what ``peer`` has signed: ``before`` is the time that they precede."""
        start = words.upto
        if start >= end:
            return
        latest = float("inf") if before is None else before + TOLERANCE_SECONDS
        for stop, after in words.bounds(start, end):
            earliest = after - TOLERANCE_SECONDS
            span = slice(start - self._first, stop - self._first)
            times = self._times[span]
            if earliest <= min(times) and max(times) <= latest:
                if before is not None and after:
                    self._confirming[span] = self._confirming[span].translate(_ONE_MORE)
                    self._widest = max(self._widest, before - after)
            else:
                for index, time in enumerate(times, start):
                    self._judge_one(peer, words, index, time, after, before)
            start = stop
        words.upto = end
        words.forget(end)

    def _judge_one(self, peer: str, words: _Words, index: int, time: float, after: float, before: int | None) -> None:
        early = time < after - TOLERANCE_SECONDS
        late = before is not None and time > before + TOLERANCE_SECONDS
        if early or late:
            words.contradicted.append(index)
            if index not in self._explained and len(self._explained) < _EXPLAINED:
                what = f"follows what {peer} signed at {moment(after)}" if early else ""
                what = what or f"had been seen by {peer} at {moment(before or 0)}, as that has signed"
                self._explained[index] = f"it says that it was written at {moment(time)}, and it {what}"
        elif before is not None and after:
            place = index - self._first
            self._confirming[place] = _ONE_MORE[self._confirming[place]]
            self._widest = max(self._widest, before - after)


def moment(time: float) -> str:
    """A time in seconds since 1970, in words."""
    try:
        return f"{datetime.fromtimestamp(time, UTC):%Y-%m-%d %H:%M:%S} UTC"
    except (ValueError, OverflowError, OSError):
        return f"{time:.0f} s after 1970"


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} minutes"
    return f"{seconds / 3600:.0f} hours" if seconds < 172_800 else f"{seconds / 86400:.0f} days"
