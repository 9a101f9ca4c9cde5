"""What a signed checkpoint promises."""

from __future__ import annotations

import base64
import hashlib

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from medsilo.privacy.errors import JournalError
from medsilo.privacy.journal.checkpoint import Checkpoint, cosign, read_note, verify, verify_cosignature

ORIGIN = "medsilo/test/silo/hospital1"
KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
CHECKPOINT = Checkpoint(ORIGIN, 12, hashlib.sha256(b"root").digest())


def test_a_signed_checkpoint_is_verified_and_read_back() -> None:
    assert verify(CHECKPOINT.sign(KEY), PUBLIC) == CHECKPOINT


def test_the_note_has_the_form_of_c2sp() -> None:
    note = CHECKPOINT.sign(KEY)
    lines = note.split("\n")
    assert lines[:4] == [ORIGIN, "12", base64.b64encode(CHECKPOINT.root).decode(), ""]
    dash, name, encoded = lines[4].split(" ")
    assert (dash, name, lines[5:]) == ("—", ORIGIN, [""])
    blob = base64.b64decode(encoded)
    # Signed note: key hash = SHA-256(name ‖ newline ‖ 0x01 ‖ public key)[:4]; what is signed ends with a newline.
    assert blob[:4] == hashlib.sha256(ORIGIN.encode() + b"\n\x01" + PUBLIC).digest()[:4]
    Ed25519PublicKey.from_public_bytes(PUBLIC).verify(blob[4:], "\n".join(lines[:3]).encode() + b"\n")


def test_every_change_of_a_signed_byte_is_refused() -> None:
    note = CHECKPOINT.sign(KEY).encode()
    signed = len(CHECKPOINT.text().encode()) + 1
    for position in range(signed):
        for change in (1, 2, 4, 8, 16, 32, 64, 128):
            changed = bytearray(note)
            changed[position] ^= change
            with pytest.raises(JournalError):
                verify(changed.decode("utf-8", errors="replace"), PUBLIC)


def test_every_change_of_a_signature_byte_is_refused() -> None:
    """The last byte, the line's end, apart: a line may end with the text."""
    note = CHECKPOINT.sign(KEY).encode()
    accepted = []
    for position in range(len(CHECKPOINT.text().encode()) + 1, len(note) - 1):
        for value in range(256):
            changed = bytearray(note)
            changed[position] = value
            if bytes(changed) == note:
                continue
            try:
                verify(changed.decode("utf-8", errors="replace"), PUBLIC)
            except JournalError:
                continue
            accepted.append((position - len(note), chr(note[position]), chr(value)))
    assert accepted == []


def test_another_key_is_refused() -> None:
    other = Ed25519PrivateKey.from_private_bytes(bytes(32))
    with pytest.raises(JournalError, match="not signed with this key"):
        verify(CHECKPOINT.sign(other), PUBLIC)
    with pytest.raises(JournalError, match="not signed with this key"):
        verify(CHECKPOINT.sign(KEY), other.public_key().public_bytes_raw())


def test_a_signature_moved_to_another_checkpoint_is_refused() -> None:
    signature = CHECKPOINT.sign(KEY).partition("\n\n")[2]
    other = Checkpoint(ORIGIN, 13, CHECKPOINT.root)
    with pytest.raises(JournalError, match=f"signature does not hold for {ORIGIN}"):
        verify(f"{other.text()}\n{signature}", PUBLIC)


def test_a_signature_of_another_name_is_refused() -> None:
    note = CHECKPOINT.sign(KEY).replace(f"— {ORIGIN}", "— somebody-else")
    with pytest.raises(JournalError, match=f"no signature by {ORIGIN}"):
        verify(note, PUBLIC)


@pytest.mark.parametrize(
    "note",
    [
        "",
        "\n",
        "\n\n",
        "a\nb",
        "a\nb\nc\n\n",
        "a\n1\n!!!\n\n— a AAAA\n",
        "a\n1\nAAAA\n\n— a AAAA\n",
        "a\n1\n\n\n— a \n",
    ],
)
def test_what_is_no_checkpoint_is_refused(note: str) -> None:
    with pytest.raises(JournalError, match="cannot be used"):
        verify(note, PUBLIC)


def test_a_note_is_read_without_its_key_but_not_out_of_form() -> None:
    note = CHECKPOINT.sign(KEY)
    assert read_note(note) == CHECKPOINT
    for change in (("\n12\n", "\n012\n"), ("\n12\n", "\n+12\n"), ("\n12\n", "\n 12\n"), ("\n12\n", "\n1_2\n")):
        with pytest.raises(JournalError, match="not in canonical form"):
            read_note(note.replace(*change))


WITNESS = "medsilo/test/coordinator/coordinator"
WITNESS_KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(1, 33)))
WITNESS_PUBLIC = WITNESS_KEY.public_key().public_bytes_raw()
TIME = 1_679_315_147


def test_a_cosignature_has_the_form_of_c2sp() -> None:
    """tlog-cosignature: key hash with 0x04, eight bytes of time, a signature over the checkpoint's own lines."""
    note = CHECKPOINT.sign(KEY)
    dash, name, encoded = cosign(note, WITNESS, WITNESS_KEY, TIME).split(" ")
    assert (dash, name) == ("—", WITNESS)
    blob = base64.b64decode(encoded)
    assert len(blob) == 4 + 8 + 64
    assert blob[:4] == hashlib.sha256(WITNESS.encode() + b"\n\x04" + WITNESS_PUBLIC).digest()[:4]
    assert int.from_bytes(blob[4:12], "big") == TIME
    body = "".join(f"{line}\n" for line in note.split("\n")[:3])
    Ed25519PublicKey.from_public_bytes(WITNESS_PUBLIC).verify(
        blob[12:], b"cosignature/v1\ntime 1679315147\n" + body.encode()
    )


def test_a_cosignature_says_when_the_checkpoint_was_seen() -> None:
    note = CHECKPOINT.sign(KEY)
    line = cosign(note, WITNESS, WITNESS_KEY, TIME)
    assert verify_cosignature(line, note, WITNESS, WITNESS_PUBLIC) == TIME
    # What is signed is one line, and nothing beside it: there is no room for bytes that nobody signed.
    for more in (f"{note}{line}\n", f"{line}\n", f"{line}\n{line}"):
        with pytest.raises(JournalError):
            verify_cosignature(more, note, WITNESS, WITNESS_PUBLIC)


def test_a_note_carries_any_witnesses_and_is_its_owners_all_the_same() -> None:
    """C2SP signed-note: signatures of unknown keys are ignored, wherever they stand; of known ones all have to hold."""
    text, own = CHECKPOINT.sign(KEY).split("\n\n")
    note = f"{text}\n\n{own}"
    others = [
        cosign(note, WITNESS, WITNESS_KEY, TIME).removesuffix("\n"),
        cosign(note, ORIGIN, KEY, TIME),  # the owner's, as its own witness: of another kind than the checkpoint's
        CHECKPOINT.sign(WITNESS_KEY).split("\n")[4],  # the owner's name with another key
        f"— a-witness/of=another+world {base64.b64encode(b'abcd' + bytes(200)).decode()}",  # of an unknown kind
    ]
    for lines in (others, [*reversed(others)], others * 10):
        assert verify(note + "".join(f"{line}\n" for line in lines), PUBLIC) == CHECKPOINT
        before = f"{text}\n\n" + "".join(f"{line}\n" for line in lines) + own
        assert verify(before, PUBLIC) == CHECKPOINT
        assert read_note(before) == CHECKPOINT
    for lines in (others * 20, [f"— w {'A' * 400}" for _ in range(60)], [""], ["remark"], ["— w"], ["— w !"]):
        with pytest.raises(JournalError, match="cannot be used"):
            verify(note + "".join(f"{line}\n" for line in lines), PUBLIC)
    with pytest.raises(JournalError, match="no signature by"):
        verify(f"{text}\n\n{others[0]}\n", PUBLIC)
    with pytest.raises(JournalError, match="not signed with this key"):
        verify(f"{text}\n\n{others[2]}\n", PUBLIC)
    blob = base64.b64decode(own.split(" ")[2])
    forged = base64.b64encode(blob[:4] + bytes(64)).decode()
    with pytest.raises(JournalError, match="does not hold"):
        verify(f"{note}— {ORIGIN} {forged}\n", PUBLIC)


def test_a_cosignature_is_for_one_checkpoint_of_one_name_and_key() -> None:
    note = CHECKPOINT.sign(KEY)
    line = cosign(note, WITNESS, WITNESS_KEY, TIME)
    for other in (
        Checkpoint(ORIGIN, 13, CHECKPOINT.root),
        Checkpoint(ORIGIN, 12, bytes(32)),
        Checkpoint("medsilo/test/silo/hospital2", 12, CHECKPOINT.root),
    ):
        with pytest.raises(JournalError, match=f"cosignature of {WITNESS} is not for this checkpoint"):
            verify_cosignature(line, other.sign(KEY), WITNESS, WITNESS_PUBLIC)
    with pytest.raises(JournalError, match="not made with this key"):
        verify_cosignature(line, note, WITNESS, PUBLIC)
    with pytest.raises(JournalError, match="no signature by somebody-else"):
        verify_cosignature(line, note, "somebody-else", WITNESS_PUBLIC)
    # The owner's own signature under the note is no cosignature.
    with pytest.raises(JournalError, match="not made with this key"):
        verify_cosignature(note.splitlines()[-1], note, ORIGIN, PUBLIC)


def test_every_change_of_a_cosignatures_bytes_is_refused() -> None:
    note = CHECKPOINT.sign(KEY)
    line = cosign(note, WITNESS, WITNESS_KEY, TIME)
    head, _, encoded = line.rpartition(" ")
    blob = base64.b64decode(encoded)
    for position in range(len(blob)):
        for bit in range(8):
            changed = bytearray(blob)
            changed[position] ^= 1 << bit
            with pytest.raises(JournalError):
                verify_cosignature(f"{head} {base64.b64encode(changed).decode()}", note, WITNESS, WITNESS_PUBLIC)
    for changed_line in ("", "rubbish", head, line[:-4], f"{line}AAAA", line.replace("—", "-"), f" {line}"):
        with pytest.raises(JournalError):
            verify_cosignature(changed_line, note, WITNESS, WITNESS_PUBLIC)
