"""Attacks on evidence with the keys of all parties, against one honest witness:
``python -m tests.support.runs.witness_campaign --attacks 1000``.

Each attack makes a federation's journals with real doors, and then others in their place, signed with the parties' own
keys. It passes if ``audit verify`` finds everything sound that it is to be shown: without a witness, with its
cosignatures alone, and with its own last word too (``--seen``).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from medsilo.privacy.audit.verification import verify_evidence
from medsilo.privacy.audit.witnesses import Asked
from medsilo.privacy.identity.cosignature import Policy
from medsilo.privacy.journal.records import read
from tests.support.evidence.exchanging import COORDINATOR, origin_of
from tests.support.evidence.witnessed import HOSPITALS, WITNESS, Clocks, World

WAYS = ("without a witness", "its cosignatures", "its cosignatures and its last word")
FRESH = 1200
"""How soon a record is to be seen, in seconds: two of a world's intervals."""
_HOSPITAL, _SECOND, _COORDINATOR = "hospital1", "hospital2", "coordinator"
_ORIGINS = {identity.rpartition("/")[2]: origin_of(identity) for identity in (*HOSPITALS, COORDINATOR)}


@dataclass(frozen=True)
class Shown:
    """What an attacker shows: pairs of evidence, each held against the other. ``words``: the witness's own last word on
    each journal, by name."""

    pairs: tuple[tuple[Path, Path], ...]
    words: Mapping[str, str]


def honest(chance: random.Random, folder: Path, clocks: Clocks) -> Shown:
    """No attack: what is shown is what happened."""
    world = World(folder / "world", clocks).begin()
    for number in range(chance.randint(2, 5)):
        world.round(number)
    return _both(world, folder)


def rewrite(chance: random.Random, folder: Path, clocks: Clocks) -> Shown:
    """Both sides write another past from some round on, and sign it; what the witness cosigned before that is kept, and
    perhaps what it has cosigned of the true one."""
    world = World(folder / "world", clocks).begin()
    rounds = chance.randint(2, 5)
    since = chance.randint(0, rounds - 1)
    before = clocks.true
    other = world.copy(folder / "another") if since == 0 else None
    for number in range(rounds):
        world.round(number)
        if number + 1 == since:
            before, other = clocks.true, world.copy(folder / "another")
    now, clocks.true = clocks.true, before
    assert other is not None
    party = chance.choice(other.parties())
    party.door.note(read({"kind": "padding", "number": chance.random()}))
    asks = chance.random() < 0.5
    for number in range(since, rounds):
        other.round(number, shown=False, chunks=chance.randint(1, 4))
        if asks:
            true, clocks.true = clocks.true, now  # the witness's clock nobody sets back
            assert not any(other.show()), "a witness has cosigned two histories"
            clocks.true = true
    clocks.true = now
    if chance.random() < 0.5:
        _paste(world, other)
    return _both(other, folder)


def rollback(chance: random.Random, folder: Path, clocks: Clocks) -> Shown:
    """Both sides put their journals back to an earlier round, as if what came later had never been."""
    world = World(folder / "world", clocks).begin()
    rounds = chance.randint(2, 5)
    back = chance.randint(1, rounds - 1)
    earlier = None
    for number in range(rounds):
        world.round(number)
        if number + 1 == back:
            earlier = world.copy(folder / "earlier")
    assert earlier is not None
    return _both(earlier, folder)


def fork(chance: random.Random, folder: Path, clocks: Clocks) -> Shown:
    """The coordinator keeps a second journal for the second hospital from some round on. It passes if each hospital's
    evidence, and the coordinator's for it, are sound."""
    world = World(folder / "world", clocks, hospitals=2).begin()
    since, rounds = chance.randint(0, 2), chance.randint(1, 3)
    for number in range(since):
        world.round(number)
    other = world.copy(folder / "second")
    other.exchanges[1].coordinator.door.note(read({"kind": "padding", "number": chance.random()}))
    del world.exchanges[1], other.exchanges[0]
    for number in range(since, since + rounds):
        for one in chance.sample([world, other], 2):  # whichever the witness is shown first
            one.round(number)
    pairs = []
    for one, name in ((world, _HOSPITAL), (other, _SECOND)):
        found = _finish(one, folder / f"shown-{name}")
        pairs += [(found[_COORDINATOR], found[name]), (found[name], found[_COORDINATOR])]
    return Shown(tuple(pairs), _words(world, (_HOSPITAL, _SECOND, _COORDINATOR)))


def back_dating(chance: random.Random, folder: Path, clocks: Clocks) -> Shown:
    """From the beginning, or after a pause of hours to weeks that their clocks leave out, both sides date what they
    write back by more than the witness' interval, without a step that would show in it. The journals are shown to the
    witness after each round, or at the end only."""
    world = World(folder / "world", clocks)
    rounds = chance.randint(2, 5)
    since = chance.randint(0, rounds - 1)
    pause = chance.choice([4_000.0, 86_400.0, 30 * 86_400.0]) * chance.uniform(1, 1.5)
    each = chance.random() < 0.5
    if since == 0:
        clocks.wrong = -pause
    world.begin()
    for number in range(rounds):
        if number == since > 0:
            clocks.true += pause
            clocks.wrong = -pause
        world.round(number, shown=each or number < since)
    if not each:
        world.show()
    return _both(world, folder)


ATTACKS: dict[str, Callable[[random.Random, Path, Clocks], Shown]] = {
    "rewritten by both sides": rewrite,
    "put back by both sides": rollback,
    "fork shown to two hospitals": fork,
    "dated back by both sides": back_dating,
}


def passes(shown: Shown) -> dict[str, bool]:
    """Whether all that is shown is sound, by how it is verified."""
    policy = Policy((WITNESS,), 1, FRESH)

    def sound(pair: tuple[Path, Path], way: str) -> bool:
        path, peer = pair
        word = shown.words.get(path.stem)
        seen = (word,) if way == WAYS[2] and word else ()
        asked = None if way == WAYS[0] else Asked(policy, seen)
        return verify_evidence(path, peer=peer, witnesses=asked).sound

    return {way: all(sound(pair, way) for pair in shown.pairs) for way in WAYS}


def attack(name: str, seed: int) -> dict[str, bool]:
    """Makes one attack; whether it passes."""
    make = ATTACKS.get(name, honest)
    with tempfile.TemporaryDirectory() as place:
        clocks = Clocks()
        with clocks.set():
            shown = make(random.Random(f"{name} {seed}"), Path(place), clocks)
        return passes(shown)


def _both(world: World, folder: Path) -> Shown:
    found = _finish(world, folder / "shown")
    pairs = ((found[_HOSPITAL], found[_COORDINATOR]), (found[_COORDINATOR], found[_HOSPITAL]))
    return Shown(pairs, _words(world, (_HOSPITAL, _COORDINATOR)))


def _finish(world: World, folder: Path) -> dict[str, Path]:
    for exchange in world.exchanges:
        exchange.attest()
    world.close()
    return world.bundles(folder)


def _words(world: World, names: tuple[str, ...]) -> dict[str, str]:
    assert world.witness is not None
    return {name: world.witness.last(_ORIGINS[name]) for name in names}


def _paste(world: World, other: World) -> None:
    """Puts the true journals' cosignatures into the false ones."""
    for true, false in zip(world.parties(), other.parties(), strict=True):
        for record in true.journal.records():
            if record["kind"] == "cosigned":
                kept = {key: value for key, value in record.items() if key not in ("v", "index", "time")}
                false.journal.append([kept])
                return


def seeds(attacks: int) -> Iterator[tuple[str, int]]:
    """So many attacks, of each kind alike many."""
    for number in range(attacks):
        yield list(ATTACKS)[number % len(ATTACKS)], number // len(ATTACKS)


def main() -> int:
    """0 if no attack passed the witness, and nothing honest was accused."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--attacks", type=int, default=1000)
    parser.add_argument("--out", type=Path, default=Path("docs/results/witnesses.json"))
    given = parser.parse_args()
    passed = {name: Counter(dict.fromkeys(WAYS, 0)) for name in (*ATTACKS, "nothing: what happened")}
    made: Counter[str] = Counter()
    began = time.monotonic()
    plan = [*seeds(given.attacks), *(("nothing: what happened", number) for number in range(given.attacks // 10))]
    for name, seed in plan:
        found = attack(name, seed)
        made[name] += 1
        passed[name].update(way for way in WAYS if found[way])
        if sum(made.values()) % 50 == 0:
            print(sum(made.values()), f"{time.monotonic() - began:.0f} s", {n: dict(c) for n, c in passed.items()})
    table = {name: {"made": made[name], "sound": dict(passed[name])} for name in passed}
    command = f"python -m tests.support.runs.witness_campaign --attacks {given.attacks}"
    given.out.write_text(json.dumps({"command": command, "attacks": table}, indent=1) + "\n")
    got_through = sum(passed[name][WAYS[2]] for name in ATTACKS)
    accused = made["nothing: what happened"] - passed["nothing: what happened"][WAYS[2]]
    print(f"{got_through} attacks passed the witness; {accused} honest worlds were accused")
    return int(bool(got_through or accused))


if __name__ == "__main__":
    sys.exit(main())
