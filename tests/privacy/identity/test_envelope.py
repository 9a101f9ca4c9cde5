"""What a signed document promises: DSSE's form, one type, one key, and one way to write it."""

from __future__ import annotations

import base64
import copy
import hashlib
import json
from collections.abc import Callable
from typing import Any

import pytest
import rfc8785
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib import dsse

from medsilo.privacy.errors import JournalError
from medsilo.privacy.identity.envelope import (
    ATTESTATION,
    ROTATION,
    countersign,
    from_json,
    from_message,
    key_id,
    seal,
    to_json,
    to_message,
    unseal,
)
from medsilo.protos.medsilo.v1 import journal_pb2

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PUBLIC = KEY.public_key().public_bytes_raw()
OTHER = Ed25519PrivateKey.from_private_bytes(bytes(32))
OTHER_PUBLIC = OTHER.public_key().public_bytes_raw()
DOCUMENT = {"v": 1, "by": "spiffe://test/silo/a", "text": "Zürich \u2028 😀", "list": [1, 2.5, None, True]}


def signed(payload: bytes, payload_type: str = ATTESTATION, key: Ed25519PrivateKey = KEY) -> dsse.Envelope:
    """An envelope around any bytes, with a good signature."""
    envelope = dsse.Envelope(payload, payload_type, {})
    countersign(envelope, key)
    return envelope


def pae(payload_type: str, payload: bytes) -> bytes:
    """DSSE's pre-authentication encoding, as its specification has it."""
    kind = payload_type.encode()
    return b"DSSEv1 %d %s %d %s" % (len(kind), kind, len(payload), payload)


def test_what_is_signed_is_the_specifications_encoding() -> None:
    vector = b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"
    assert pae("http://example.com/HelloWorld", b"hello world") == vector
    assert dsse.Envelope(b"hello world", "http://example.com/HelloWorld", {}).pae() == vector
    envelope = seal(DOCUMENT, ATTESTATION, KEY)
    (signature,) = envelope.signatures.values()
    KEY.public_key().verify(bytes.fromhex(signature.signature), pae(ATTESTATION, rfc8785.dumps(DOCUMENT)))


def test_the_json_form_is_the_specifications() -> None:
    content = to_json(seal(DOCUMENT, ATTESTATION, KEY))
    assert set(content) == {"payload", "payloadType", "signatures"}
    assert base64.b64decode(content["payload"], validate=True) == rfc8785.dumps(DOCUMENT)
    assert content["payloadType"] == ATTESTATION
    (signature,) = content["signatures"]
    assert signature["keyid"] == key_id(PUBLIC) == hashlib.sha256(PUBLIC).hexdigest()
    KEY.public_key().verify(
        base64.b64decode(signature["sig"], validate=True), pae(ATTESTATION, rfc8785.dumps(DOCUMENT))
    )


# Numbers as JSON can tell them exactly.
values = st.none() | st.booleans() | st.integers(1 - 2**53, 2**53 - 1) | st.floats(-1e15, 1e15) | st.text()
nested = st.recursive(
    values,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(max_size=5), nested, max_size=4))
@settings(deadline=None)
def test_every_document_comes_back_by_either_way_of_sending_it(document: dict[str, Any]) -> None:
    envelope = seal(document, ATTESTATION, KEY)
    in_message = journal_pb2.Envelope.FromString(to_message(envelope).SerializeToString())
    in_record = json.loads(rfc8785.dumps(to_json(envelope)))
    for again in (envelope, from_message(in_message), from_json(in_record)):
        assert unseal(again, ATTESTATION, PUBLIC) == document
    assert to_json(from_message(in_message)) == in_record
    assert to_message(from_json(in_record)) == in_message


def test_another_key_is_refused() -> None:
    envelope = seal(DOCUMENT, ATTESTATION, OTHER)
    with pytest.raises(JournalError, match=f"does not hold for the audit key {key_id(PUBLIC)[:16]}"):
        unseal(envelope, ATTESTATION, PUBLIC)
    # Nor under the right key's name.
    (signature,) = envelope.signatures.values()
    posing = journal_pb2.Signature(keyid=key_id(PUBLIC), sig=bytes.fromhex(signature.signature))
    message = to_message(envelope)
    del message.signatures[:]
    message.signatures.append(posing)
    with pytest.raises(JournalError, match="does not hold"):
        unseal(from_message(message), ATTESTATION, PUBLIC)


@pytest.mark.parametrize("key", [b"", bytes(31), bytes(33)])
def test_a_key_that_is_none_holds_for_nothing(key: bytes) -> None:
    with pytest.raises(JournalError, match="does not hold"):
        unseal(seal(DOCUMENT, ATTESTATION, KEY), ATTESTATION, key)


def test_a_document_without_a_signature_is_refused() -> None:
    with pytest.raises(JournalError, match="does not hold"):
        unseal(dsse.Envelope(rfc8785.dumps(DOCUMENT), ATTESTATION, {}), ATTESTATION, PUBLIC)


def test_further_signatures_do_no_harm() -> None:
    envelope = seal(DOCUMENT, ATTESTATION, OTHER)
    countersign(envelope, KEY)
    assert unseal(envelope, ATTESTATION, PUBLIC) == unseal(envelope, ATTESTATION, OTHER_PUBLIC) == DOCUMENT


def test_a_document_of_another_type_is_refused_even_with_a_good_signature() -> None:
    with pytest.raises(JournalError, match="is of type"):
        unseal(seal(DOCUMENT, ROTATION, KEY), ATTESTATION, PUBLIC)
    # The type is signed: it cannot be written over.
    message = to_message(seal(DOCUMENT, ROTATION, KEY))
    message.payload_type = ATTESTATION
    with pytest.raises(JournalError, match="does not hold"):
        unseal(from_message(message), ATTESTATION, PUBLIC)


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"rubbish",
        b"\xff",
        b"[]",
        b'"text"',
        b"null",
        b"1",
        b' {"v":1}',
        b'{"v":1}\n',
        b'{"v": 1}',
        b'{"v":1.0}',
        b'{"v":1e0}',
        b'{"b":1,"a":1}',
        b'{"a":1,"a":1}',
        b'{"a":1,"a":2}',
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":9007199254740993}',
        b'{"a":"\\u0041"}',
        b'{"a":"\\ud800"}',
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda payload: payload[:20],
)
def test_what_is_not_one_object_in_canonical_form_is_refused_even_with_a_good_signature(payload: bytes) -> None:
    with pytest.raises(JournalError, match="not a JSON object in canonical form"):
        unseal(signed(payload), ATTESTATION, PUBLIC)


def test_every_change_of_a_byte_is_refused() -> None:
    message = to_message(seal({"a": 1}, ATTESTATION, KEY))
    for field in ("payload", "sig"):
        original = message.payload if field == "payload" else message.signatures[0].sig
        for position in range(len(original)):
            for bit in range(8):
                changed = copy.deepcopy(message)
                data = bytearray(original)
                data[position] ^= 1 << bit
                if field == "payload":
                    changed.payload = bytes(data)
                else:
                    changed.signatures[0].sig = bytes(data)
                with pytest.raises(JournalError, match="does not hold"):
                    unseal(from_message(changed), ATTESTATION, PUBLIC)


CHANGES: dict[str, Callable[[dict[str, Any]], object]] = {
    "no payload": lambda c: c.pop("payload"),
    "no type": lambda c: c.pop("payloadType"),
    "no signatures": lambda c: c.pop("signatures"),
    "a field more": lambda c: c.update(more=1),
    "a payload that is no text": lambda c: c.update(payload=5),
    "a payload that is no base64": lambda c: c.update(payload="!!!!"),
    "a payload with a line break": lambda c: c.update(payload=c["payload"] + "\n"),
    "a payload in another base64": lambda c: c.update(payload="_" + c["payload"][1:]),
    "signatures that are no list": lambda c: c.update(signatures={}),
    "a signature without a key": lambda c: c["signatures"][0].pop("keyid"),
    "a signature that is no base64": lambda c: c["signatures"][0].update(sig="!"),
    "a signature with a field more": lambda c: c["signatures"][0].update(more=1),
    "the same signature twice": lambda c: c["signatures"].append(c["signatures"][0]),
    "a type that is no text": lambda c: c.update(payloadType=None),
}


@pytest.mark.parametrize("what", CHANGES)
def test_json_that_is_not_exactly_an_envelope_is_refused(what: str) -> None:
    content = to_json(seal(DOCUMENT, ATTESTATION, KEY))
    CHANGES[what](content)
    with pytest.raises(JournalError):
        unseal(from_json(content), ATTESTATION, PUBLIC)


@pytest.mark.parametrize("content", [None, [], "text", 5, {}])
def test_json_that_is_no_envelope_at_all_is_refused(content: Any) -> None:
    with pytest.raises(JournalError, match="is not a DSSE envelope"):
        from_json(content)


@pytest.mark.parametrize(
    "message",
    [
        journal_pb2.Envelope(),
        journal_pb2.Envelope(payload=b"{}", payload_type=ATTESTATION),
        journal_pb2.Envelope(payload=b"{}", payload_type=ATTESTATION, signatures=[journal_pb2.Signature()]),
        journal_pb2.Envelope(
            payload=b"{}", payload_type=ATTESTATION, signatures=[journal_pb2.Signature(keyid=key_id(PUBLIC))] * 2
        ),
    ],
)
def test_a_message_that_is_no_signed_document_is_refused(message: journal_pb2.Envelope) -> None:
    with pytest.raises(JournalError):
        unseal(from_message(message), ATTESTATION, PUBLIC)
