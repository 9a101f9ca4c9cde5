"""Keys and signatures of notes are those of the public specifications, and a policy counts whom it names."""

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from medsilo.privacy.identity.cosignature import (
    COSIGNATURE,
    ED25519,
    CosignatureError,
    NoteKey,
    Policy,
    contradicting,
    cosign,
    cosigned_at,
    missing,
    read_key,
    signed_by,
    standing,
    words_of,
)
from medsilo.privacy.journal.checkpoint import Checkpoint, verify

# The example of Go's documentation of golang.org/x/mod/sumdb/note.
GO_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
GO_NOTE = (
    "If you think cryptography is the answer to your problem,\n"
    "then you don't know what your problem is.\n"
    "\n"
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
LOG = Ed25519PrivateKey.from_private_bytes(bytes([1]) * 32)
ORIGIN = "medsilo/tissue/silo/hospital1"
ROOT = bytes(range(32))


def witness(number: int) -> tuple[Ed25519PrivateKey, NoteKey]:
    key = Ed25519PrivateKey.from_private_bytes(bytes([10 + number]) * 32)
    return key, NoteKey(f"w{number}.example.org", COSIGNATURE, key.public_key().public_bytes_raw())


def cosigned(size: int, *lines: tuple[int, int], root: bytes = ROOT) -> str:
    note = Checkpoint(ORIGIN, size, root).sign(LOG)
    for number, time in lines:
        key, public = witness(number)
        note += cosign(note, public.name, key, time) + "\n"
    return note


def test_go_s_own_example_is_read_and_checked() -> None:
    key = read_key(GO_KEY)
    assert (key.name, key.hash.hex(), key.kind, key.text) == ("PeterNeumann", "c74f20a3", ED25519, GO_KEY)
    assert signed_by(GO_NOTE, key)
    with pytest.raises(CosignatureError, match="does not hold"):
        signed_by(GO_NOTE.replace("problem is", "Problem is"), key)


@pytest.mark.parametrize(
    "text",
    [
        "PeterNeumann+c74f20a4+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeuman+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3",
        "+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10T",
        "",
    ],
)
def test_a_key_whose_text_does_not_hold_together_is_no_key(text: str) -> None:
    with pytest.raises(CosignatureError):
        read_key(text)


def test_a_note_holds_for_its_owner_whatever_witnesses_stand_under_it() -> None:
    note = cosigned(7, (1, 1_700_000_000), (2, 1_700_000_100))
    assert verify(note, LOG.public_key().public_bytes_raw()).size == 7
    assert cosigned_at(note, witness(1)[1]) == 1_700_000_000
    assert cosigned_at(note, witness(2)[1]) == 1_700_000_100
    assert cosigned_at(note, witness(3)[1]) is None


def test_a_cosignature_moved_to_another_checkpoint_or_time_does_not_hold() -> None:
    line = cosigned(7, (1, 1_700_000_000)).splitlines()[-1]
    other = Checkpoint(ORIGIN, 8, ROOT).sign(LOG) + line + "\n"
    with pytest.raises(CosignatureError, match="does not hold"):
        cosigned_at(other, witness(1)[1])


def test_a_policy_asks_for_so_many_of_the_witnesses_that_it_names() -> None:
    keys = tuple(witness(number)[1] for number in (1, 2, 3))
    two = Policy(keys, 2, fresh_seconds=3600)
    words = words_of(cosigned(50, (1, 1000), (4, 1000)), keys)
    assert missing(two, standing(two, words), last_time=1000)
    words += words_of(cosigned(40, (2, 900)), keys)
    found = standing(two, words)
    assert (found.covered, found.time) == (40, 1000)
    assert missing(two, found, last_time=1000 + 3600) == []
    assert "hours" in missing(two, found, last_time=1000 + 3601)[0]


def test_one_witness_under_two_keys_is_one_witness() -> None:
    key = witness(1)[1]
    again = NoteKey(key.name, COSIGNATURE, witness(2)[1].public_key)
    with pytest.raises(CosignatureError):
        Policy((key, again), 2)


def test_what_a_witness_saw_stands_against_a_log_that_holds_less_or_something_else() -> None:
    words = words_of(cosigned(50, (1, 1000)), [witness(1)[1]])
    assert contradicting(words, ORIGIN, {50: ROOT}, 60) == []
    assert "withheld" in contradicting(words, ORIGIN, {}, 49)[0]
    assert "another history" in contradicting(words, ORIGIN, {50: bytes(32)}, 60)[0]
    assert "another log" in contradicting(words, "medsilo/tissue/silo/hospital2", {50: ROOT}, 60)[0]
