"""Which version of the protocol this release speaks, with which others it works, and what is sent to an older party.

Both sides refuse a field that they do not know, so a party is sent nothing newer than it says that it speaks. Which
version brought a field, a value of an enumeration or a call stands beside it in the ``.proto`` (``since``,
``value_since``, ``call_since``), and ``tests/protos/test_versions.py`` holds that against the schemas of every released
version, in ``protos/released``. A silo names its version in each request, a coordinator in the plan's answer; they
speak the older of the two.

>>> from medsilo.protos.medsilo.v1 import coordinator_pb2
>>> answer = coordinator_pb2.GetPlanResponse(time_ms=7, protocol_version=PROTOCOL_VERSION)
>>> older = fitted(answer, 1, "spiffe://test/silo/hospital1")
>>> older.time_ms, older.protocol_version
(7, 0)
"""

from __future__ import annotations

import re
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor, EnumDescriptor, FieldDescriptor
from google.protobuf.message import Message

from medsilo.privacy.errors import RefusedError
from medsilo.privacy.identity.identity import Identity
from medsilo.protos.medsilo.v1 import coordinator_pb2, enrolment_pb2, exposure_pb2
from medsilo.protos.versions import OLDEST_VERSION, PROTOCOL_VERSION

_CALLS = {
    method.name: method
    for schema in (coordinator_pb2, enrolment_pb2)
    for service in schema.DESCRIPTOR.services_by_name.values()
    for method in service.methods
}
# What a coordinator of version 1 answers to a silo of any other; from 2 on, coordinators answer in their own version.
_ONLY = re.compile(r"this coordinator (?:speaks|enrols by) protocol version (\d+), the silo")
_SINCE: dict[str, Any] = {
    "FieldOptions": exposure_pb2.since,
    "EnumValueOptions": exposure_pb2.value_since,
    "MethodOptions": exposure_pb2.call_since,
}
_HOW = "(`silo --version` and `coordinator --version` tell it)"

M = TypeVar("M", bound=Message)


def since(item: Any) -> int:
    """The version that brought a field, a value of an enumeration or a call, by its descriptor."""
    options = item.GetOptions()
    number: int = options.Extensions[_SINCE[options.DESCRIPTOR.name]]
    return number or 1


def is_essential(field: FieldDescriptor) -> bool:
    """Whether a message means something else without the field."""
    return bool(field.GetOptions().Extensions[exposure_pb2.essential])  # type: ignore[index]


def agreed(theirs: int, who: str, here: str) -> int:
    """The version to speak with a party that named ``theirs`` (0 for none: the first).

    ``who``, ``here``: the party and this one in words. Raises ``RefusedError`` for a party that is older than this
    release works with; it says which side to upgrade, and to which version.
    """
    theirs = theirs or 1
    if theirs < OLDEST_VERSION:
        raise RefusedError(
            f"{who} speaks protocol version {theirs}, and {here} works with {OLDEST_VERSION} to {PROTOCOL_VERSION}: "
            f"upgrade {who} to a release of Medsilo that speaks version {PROTOCOL_VERSION} {_HOW}"
        )
    return min(theirs, PROTOCOL_VERSION)


def newer(theirs: int, who: str, here: str) -> str | None:
    """What to say of a party that speaks a newer version than this release; None for any other."""
    if theirs <= PROTOCOL_VERSION:
        return None
    return (
        f"{who} speaks protocol version {theirs}, {here} {PROTOCOL_VERSION}: what came later is not used between them. "
        f"If a run needs it, upgrade {here} to a release of Medsilo that speaks version {theirs} {_HOW}"
    )


def spoken_instead(refusal: str) -> int | None:
    """The version to ask a coordinator for that has refused, in these words, every version but its own; None for any
    other refusal. Raises ``RefusedError`` if this release does not work with it."""
    found = _ONLY.search(refusal)
    return None if found is None else agreed(int(found[1]), "the coordinator", "this silo")


def fitted(message: M, version: int, reader: str, rpc: str = "") -> M:
    """The message as a party understands it that speaks ``version``: without fields that came later.

    ``reader``: the party's identity (URI). ``rpc``: the call that it is sent in. Raises ``RefusedError``, which names
    what the party would need and the version that brought it, where the message would mean something else without.
    """
    if version >= PROTOCOL_VERSION:
        return message
    if rpc in _CALLS and since(_CALLS[rpc]) > version:
        raise _needs(f"the call {rpc}", since(_CALLS[rpc]), version, reader)
    if not _has_newer(message.DESCRIPTOR, version):
        return message
    copy = type(message)()
    copy.CopyFrom(message)
    _prune(copy, version, reader)
    return copy


@cache
def _has_newer(message: Descriptor, version: int, above: tuple[Descriptor, ...] = ()) -> bool:
    return message not in above and any(
        since(field) > version
        or (field.enum_type is not None and any(since(value) > version for value in field.enum_type.values))
        or (field.message_type is not None and _has_newer(field.message_type, version, (*above, message)))
        for field in message.fields
    )


def _prune(message: Message, version: int, reader: str) -> None:
    for field, value in message.ListFields():
        if since(field) > version:
            if is_essential(field):
                raise _needs(field.full_name, since(field), version, reader)
            message.ClearField(field.name)
            continue
        for item in value if field.is_repeated else (value,):
            if field.message_type is not None:
                _prune(item, version, reader)
            elif field.enum_type is not None:
                _check_value(field.enum_type, item, version, reader)


def _check_value(kind: EnumDescriptor, number: int, version: int, reader: str) -> None:
    value = kind.values_by_number.get(number)
    if value is not None and since(value) > version:
        raise _needs(value.name, since(value), version, reader)


def _needs(what: str, brought: int, version: int, reader: str) -> RefusedError:
    who = Identity.parse(reader)
    return RefusedError(
        f"{what} came with protocol version {brought}, and {who.name} speaks {version}: upgrade the {who.role} "
        f"{who.name} to a release of Medsilo that speaks version {brought} or later {_HOW}"
    )
