"""Makes ``bundle.schema.json``, the published form of evidence bundles, from the types that read and write them."""

from __future__ import annotations

import ast
import inspect
import itertools
import json
import textwrap
import types
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from medsilo.privacy.audit.bundle import VERSION, Header, Subtree
from medsilo.privacy.door.attestation import Attestation, Consistency, Exchange, Shown, Witnessed
from medsilo.privacy.identity.envelope import ATTESTATION
from medsilo.privacy.journal.records import HASH, LARGEST_NUMBER, TYPES, Charge, Form, Kind, Record

_Schema = dict[str, Any]
_PLAIN: dict[Any, _Schema] = {
    str: {"type": "string"},
    int: {"type": "integer"},
    float: {"type": "number"},
    bool: {"type": "boolean"},
    type(None): {"type": "null"},
}
_NAMED: dict[Any, str] = {Charge: "charge"}
_BASE64 = {"type": "string", "contentEncoding": "base64"}


def bundle_schema() -> str:
    """The JSON Schema, as text."""
    named = {**_given(), **_models(), "record": _record(Record), "charge": _object(Charge)}
    named |= {str(kind): _kind(kind, TYPES[kind]) for kind in Kind}
    named["any_record"] = {
        "allOf": [
            {"$ref": "#/$defs/record"},
            *(
                {"if": {"properties": {"kind": {"const": kind}}}, "then": {"$ref": f"#/$defs/{kind}"}}
                for kind in map(str, Kind)
            ),
        ],
        "description": "A record of any kind; kinds that are not named here are allowed.",
    }
    document = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:medsilo:bundle:1",
        "title": "Medsilo evidence bundle",
        "description": "A journal, or a range of it, that proves itself. The file is written in one way only: `{`, "
        'the header on a line of its own, `"records":[`, each record on a line of its own as it was signed (canonical '
        "JSON, RFC 8785), `]}`. docs/audit.md says how to verify it.",
        "type": "object",
        "properties": {
            "header": {"$ref": "#/$defs/header"},
            "records": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/any_record"}},
        },
        "required": ["header", "records"],
        "additionalProperties": False,
        "$defs": named,
    }
    return json.dumps(document, indent=2, ensure_ascii=False)


def _given() -> _Schema:
    """What other documents say: C2SP's notes, DSSE's envelopes, protobuf's descriptors."""
    signature = {
        "keyid": {"type": "string", "pattern": HASH, "description": "SHA-256 of the public audit key."},
        "sig": {**_BASE64, "description": "Ed25519, over DSSE's pre-authentication encoding."},
    }
    return {
        "hash": {"type": "string", "pattern": HASH},
        "exposure_class": {
            "type": "string",
            "pattern": "^[A-Z][A-Z_]*$",
            "description": "For example MODEL_PARAMETERS_EXTRACTOR; the stored schema names them.",
        },
        "note": {
            "type": "string",
            "pattern": "^[^\\n]+\\n[0-9]+\\n[A-Za-z0-9+/]{43}=\\n\\n(— [^\\n]+ [A-Za-z0-9+/]+={0,2}\\n){1,64}$",
            "description": "A signed checkpoint (C2SP tlog-checkpoint): name of the journal, size, root, empty line, "
            "signature lines: the owner's, and any of witnesses.",
        },
        "schema_files": {
            "type": "array",
            "items": _BASE64,
            "description": "FileDescriptorProto of each file of a wire schema; its hash is the SHA-256 over these, in "
            "order.",
        },
        "envelope": {
            "description": "DSSE envelope. The payload is canonical JSON (RFC 8785).",
            **_closed(
                {
                    "payload": _BASE64,
                    "payloadType": {"type": "string"},
                    "signatures": {"type": "array", "items": _closed(signature)},
                }
            ),
        },
        "attestation_envelope": {
            "allOf": [
                {"$ref": "#/$defs/envelope"},
                {
                    "properties": {
                        "payloadType": {"const": ATTESTATION},
                        "payload": {
                            "contentMediaType": "application/json",
                            "contentSchema": {"$ref": "#/$defs/attestation"},
                        },
                    }
                },
            ]
        },
    }


def _closed(properties: _Schema) -> _Schema:
    return {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }


def _models() -> _Schema:
    """The header, the attestation, and what is in them."""
    found: _Schema = {}
    for model in (Subtree, Header, Attestation, Exchange, Consistency, Witnessed, Shown):
        made = model.model_json_schema(ref_template="#/$defs/{model}")
        said = _said(model)
        properties = {
            name: {**_tidy(field), **({"description": said[name]} if name in said else {})}
            for name, field in made["properties"].items()
        }
        if "checkpoint" in properties:
            properties["checkpoint"] |= {"$ref": "#/$defs/note"}
            del properties["checkpoint"]["type"]
            properties["checkpoint"].pop("maxLength", None)
        found[model.__name__.lower()] = {"description": _line(str(model.__doc__)), **_closed(properties)}
    # What an earlier release does not know is not there where there is nothing to tell.
    found["attestation"]["required"].remove("shown")
    found["header"]["properties"]["v"] = {"const": VERSION}
    found["header"]["properties"]["schemas"]["items"] = {"$ref": "#/$defs/schema_files"}
    return found


def _tidy(made: Any) -> Any:
    """What pydantic makes of a field, in the words of this document."""
    if isinstance(made, list):
        return [_tidy(one) for one in made]
    if not isinstance(made, dict):
        return made
    found = {name: _tidy(value) for name, value in made.items() if name not in ("title", "default")}
    if found.get("pattern") == HASH:
        return {"$ref": "#/$defs/hash"}
    if found.get("type") == "integer":
        found.setdefault("maximum", found.pop("exclusiveMaximum", LARGEST_NUMBER + 1) - 1)
    if "$ref" in found:
        found["$ref"] = found["$ref"].lower()
    if "const" in found or "enum" in found:
        del found["type"]
    return found


def _kind(kind: Kind, made: type[Record]) -> _Schema:
    own = _record(made)
    own["properties"] = {"kind": {"const": str(kind)}, **own["properties"]}
    own["required"] = ["kind", *own["required"]]
    return {"allOf": [{"$ref": "#/$defs/record"}, own]}


def _record(made: type[Record]) -> _Schema:
    found = _object(made)
    if made is Record:
        properties = {"v": {"const": 1}, **found["properties"], "kind": {"type": "string"}}
        found |= {"properties": properties, "required": list(properties)}
    return found


def _object(made: type) -> _Schema:
    """Of a class with annotations, which may have defaults and a docstring each."""
    hints = get_type_hints(made, include_extras=True)
    said = _said(made) if made.__doc__ and not _is_functional(made) else {}
    properties, required = {}, []
    for name in made.__annotations__:
        hint = hints[name]
        if "ClassVar" in str(hint):
            continue
        needed = name not in vars(made)
        if get_origin(hint) is NotRequired:
            hint, needed = get_args(hint)[0], False
        made_of = _type(hint)
        if name in vars(made) and not _may_be_null(hint) and {"type": "null"} in made_of.get("anyOf", ()):
            (made_of,) = (one for one in made_of["anyOf"] if one != {"type": "null"})
        properties[name] = {**made_of, **({"description": said[name]} if name in said else {})}
        if needed:
            required.append(name)
    about = {"description": _line(made.__doc__)} if made.__doc__ and not _is_functional(made) else {}
    return {**about, "type": "object", "properties": properties, "required": required}


def _may_be_null(hint: Any) -> bool:
    return any(isinstance(one, Form) and one.null for one in getattr(hint, "__metadata__", ()))


def _is_functional(made: type) -> bool:
    return is_typeddict(made) and made.__doc__ in (None, dict.__doc__)


def _said(made: type) -> dict[str, str]:
    """The docstring under each annotation."""
    body = ast.parse(textwrap.dedent(inspect.getsource(made))).body[0].body  # type: ignore[attr-defined]
    return {
        one.target.id: _line(after.value.value)
        for one, after in itertools.pairwise(body)
        if isinstance(one, ast.AnnAssign)
        and isinstance(one.target, ast.Name)
        and isinstance(after, ast.Expr)
        and isinstance(after.value, ast.Constant)
    }


def _line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


def _type(hint: Any) -> _Schema:
    """The schema of an annotation."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    if hint in _NAMED:
        return {"$ref": f"#/$defs/{_NAMED[hint]}"}
    if is_typeddict(hint):
        return _object(hint)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _annotated(inner[0], inner[1:])
    if origin is Literal:
        return {"enum": list(inner)}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type(one) for one in inner]}
    if origin is Sequence:
        return {"type": "array", "items": _type(inner[0])}
    if origin is Mapping:
        found: _Schema = {"type": "object"}
        if inner[1] is not Any:
            found["additionalProperties"] = _type(inner[1])
        if inner[0] is not str:
            found["propertyNames"] = _type(inner[0])
        return found
    raise SystemExit(f"{hint}: is no type of a record's field")


def _annotated(plain: Any, said: tuple[Any, ...]) -> _Schema:
    (one,) = said
    if not isinstance(one, Form):
        return _type(one)
    if one.named is not None:
        return {"$ref": f"#/$defs/{one.named}"}
    about = {"pattern": one.pattern, "minimum": one.minimum, "maximum": one.maximum, "minItems": one.least_items}
    return {**_type(plain), **{name: value for name, value in about.items() if value is not None}}
