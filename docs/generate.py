"""Writes what pages say of the code from the code: those under ``docs/reference``, and elsewhere the tables of methods,
each between two comments; the JSON Schema of evidence bundles, and the verifier as a page.

    python docs/generate.py [--check]

``--check`` writes nothing and ends with 1 if a page is not what the code says. A new method is in all of them by its
entry in the registry.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, get_args, get_type_hints

import typer
from bundle_schema import bundle_schema
from pydantic import BaseModel
from typer.cli import get_docs_for_click
from typer.main import get_command
from typer.models import Context

from medsilo.algorithms.declarations import Blind, Protected, Sums
from medsilo.algorithms.families.sharing import COUNT
from medsilo.algorithms.method import Method
from medsilo.algorithms.models import Layout, build
from medsilo.algorithms.protection.tiers import best_tier
from medsilo.algorithms.registry import METHODS
from medsilo.coordinator.cli import app as coordinator_app
from medsilo.coordinator.config import CoordinatorConfig
from medsilo.privacy.audit.verifier_page import verifier_page
from medsilo.privacy.consent.consent import Consent
from medsilo.privacy.consent.plan import ModelPlan
from medsilo.privacy.consent.tiers import LEARNS, Tier
from medsilo.privacy.dossier.questionnaire import Answers
from medsilo.privacy.errors import MedsiloError
from medsilo.privacy.exposure import MODEL, Exposure
from medsilo.privacy.witness.config import WitnessConfig, WitnessPolicy
from medsilo.silo.cli import app as silo_app
from medsilo.silo.commands.shard import shard
from medsilo.silo.flower.config import FlowerConfig
from medsilo.silo.state.config import SiloConfig
from medsilo.simulation.cli import app as simulation_app
from medsilo.simulation.experiment import SETTINGS, ExperimentConfig

DOCS = Path(__file__).parent
BEGIN, END = "<!-- {} (written by docs/generate.py) -->\n", "<!-- end -->"
ON_FRONT = 6
"""How many methods, the registry's first, the README's table has."""
_KEYS = re.compile(r"(?:^|(?<=[.;] )|(?<=\) )|(?<=:\n)|(?<=\n))((?:``\w+``,? (?:and )?)*``\w+``):\s+", re.MULTILINE)
_ENTRY = re.compile(r"^    (\w+(?:, \w+)*): ", re.MULTILINE)


def main() -> None:
    pages: dict[str, Callable[[], str]] = {
        "configuration.md": configuration,
        "methods.md": methods,
        "commands.md": commands,
    }
    tables: dict[str, Callable[[], str]] = {
        "../README.md": front_table,
        "methods.md": consent_table,
        "differential-privacy.md": privacy_tables,
        "secure-aggregation.md": masks_table,
        "own-data-and-models.md": trained_table,
        "threat-model.md": tiers_table,
    }
    texts = {DOCS / "reference" / name: make().rstrip() + "\n" for name, make in pages.items()}
    texts[DOCS / "bundle.schema.json"] = bundle_schema() + "\n"
    texts[DOCS / "offline-verifier.html"] = verifier_page().decode()
    texts |= {(DOCS / name).resolve(): _between(DOCS / name, make) for name, make in tables.items()}
    stale = []
    for path, text in texts.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path))
            if "--check" not in sys.argv:
                path.write_text(text, encoding="utf-8")
    if "--check" in sys.argv and stale:
        sys.exit(f"not what the code says any more: {', '.join(stale)}; run `python docs/generate.py`")


def trained_table() -> str:
    """Bytes of tensors in an update of FedAvg, by what of the network is trained."""
    kinds: list[tuple[str, Any]] = [("all", "all"), ("head", "head"), ("last: 2", {"last": 2})]
    kinds.append(("lora: {rank: 4}", {"lora": {"rank": 4}}))
    header = ("network", *(f"`{title}`" for title, _ in kinds))
    rows = []
    for name in ("diversifed-cnn", "lenet5", "resnet8", "torchvision:resnet18", "torchvision:mobilenet_v2"):
        sizes = []
        for _, train in kinds:
            layout = Layout.of(build(ModelPlan(name=name, input_shape=(3, 28, 28), classes=9, train=train)))
            sizes.append(sum(spec.nbytes for spec in (*layout.parameters, COUNT)))
        shown = [f"{size:,} (1/{sizes[0] / size:,.0f})" for size in sizes[1:]]
        rows.append((f"`{name}`", f"{sizes[0]:,}", *shown))
    return _rows(header, rows)


def configuration() -> str:
    """Every key of each kind of file."""
    parts = [
        "# Configuration files\n\nEvery key of the files that Medsilo reads, from the code that reads them. All are "
        "YAML; an unknown key, a wrong value or a key that stands twice is an error that names the file, the key and "
        "the nearest valid one. Relative paths are taken from the file's folder. Ready files are in `configs/` of the "
        "source."
    ]
    files: list[tuple[str, type[BaseModel]]] = [
        ("`coordinator.yaml`: the coordinator", CoordinatorConfig),
        ("`hospitalN.yaml`: a silo", SiloConfig),
        ("`hospitalN-flower.yaml`: a door for a [Flower app](../flower.md)", FlowerConfig),
        ("`hospitalN.consent.yaml`: what a hospital agrees to", Consent),
        ("`hospitalN.dossier.yaml`: what only the hospital can say (`silo dossier`)", Answers),
        ("`witness.yaml`: a [witness](../witnesses.md)", WitnessConfig),
        ("A policy on witnesses (`audit verify --witness`)", WitnessPolicy),
        ("An experiment (`simulation run`)", ExperimentConfig),
    ]
    seen: set[type[BaseModel]] = set()
    for title, model in files:
        parts.append(f"## {title}\n\n{_lead(model)}\n\n{_table(model)}")
        seen.add(model)
        for path, inner in _inner(model, ""):
            if inner in seen:
                parts.append(f"### `{path}:`\n\nAs [above](#{_anchor(inner)}).")
                continue
            seen.add(inner)
            parts.append(f"### `{path}:` {{#{_anchor(inner)}}}\n\n{_lead(inner)}\n\n{_table(inner)}")
    parts.append(
        "## Data settings\n\n`setting:` of an experiment, and the options of `silo shard`.\n\n"
        + "\n\n".join(f"### `kind: {kind}`\n\n{_dataclass(setting)}" for kind, setting in SETTINGS.items())
    )
    return "\n\n".join(parts)


def methods() -> str:
    """Every method: what it does, its hyper-parameters, what it exposes."""
    parts = [
        "# Methods in full\n\nEach method's own words from `algorithms/`, with its hyper-parameters and what "
        "it exposes at their defaults. [All in one table](../methods.md)."
    ]
    for name, method in METHODS.items():
        module = inspect.getmodule(method)
        text = inspect.cleandoc((module.__doc__ if module else None) or "")
        first = text.split("\n", 1)[0]
        title = re.split(r": | \(", first)[0] if ": " in first or " (" in first else method.__name__
        made = _made(method)
        exposure = ""
        if made is not None:
            exposure = (
                f"\n\n*A silo sends:* {_classes(made.uploads)}. *It gets:* {_classes(made.downlink)}. "
                "PROTOCOL and IDENTITY travel with every method, INITIAL_MODEL to a silo that has no model yet."
                f"\n\n{_protection(method)}"
            )
        parts.append(f"## {title} (`{name}`)\n\n{_prose(text)}\n\n{_dataclass(method)}{exposure}")
    return "\n\n".join(parts)


def front_table() -> str:
    """What a silo sends, what it gets and what it has to consent to: the first methods."""
    rows = [
        (f"`{name}`", method.sends, method.gets, consents(method) or "none")
        for name, method in list(METHODS.items())[:ON_FRONT]
    ]
    head = ("method", "what a silo sends", "what it gets back", "classes to consent to, besides PROTOCOL and IDENTITY")
    more = len(METHODS) - ON_FRONT
    return f"{_rows(head, rows)}\n\nThese and {more} more are in [the table of methods](docs/methods.md)."


def consent_table() -> str:
    """The same of all methods, and how secret what they send can be kept from the coordinator at best."""
    rows = [
        (f"`{name}`", method.sends, consents(method) or "–", method.gets, _tier(method))
        for name, method in METHODS.items()
    ]
    return _rows(("method", "what a silo sends", "classes to consent to", "what it gets", "tier"), rows)


def tiers_table() -> str:
    """What each tier lets whom learn."""
    return _rows(
        ("tier", "who", "learns"), [(tier, who, what) for tier, said in LEARNS.items() for who, what in said.items()]
    )


def privacy_tables() -> str:
    """Which methods run under differential privacy, on which conditions, and why the others do not."""
    free: list[str] = []
    bound: list[tuple[str, ...]] = []
    refused: dict[str, list[str]] = {}
    for name, method in METHODS.items():
        stated = method.under_privacy
        if isinstance(stated, str):
            refused.setdefault(stated, []).append(name)
        elif conditions := _conditions(stated):
            bound.append((name, conditions))
        else:
            free.append(name)
    return (
        _rows(("runs", "on condition"), [(", ".join(free), "–"), *bound])
        + "\n\n"
        + _rows(("refused", "since"), [(", ".join(names), reason) for reason, names in refused.items()])
    )


def masks_table() -> str:
    """Which methods run masked, and with blind mixtures, and why the others do not."""
    found: dict[tuple[str, str], list[str]] = {}
    for name, method in METHODS.items():
        stated = method.under_masks
        masked = f"refused: {stated}" if isinstance(stated, str) else _rounds(method)
        found.setdefault((masked, _blind(method)), []).append(name)
    return _rows(
        ("method", "masked in", "blind mixtures"), [(", ".join(names), *said) for said, names in found.items()]
    )


def consents(method: type[Method]) -> str:
    """What a silo must consent to at a method's defaults, PROTOCOL and IDENTITY apart."""
    asked = set(method().required) - {Exposure.PROTOCOL, Exposure.IDENTITY}
    names = [exposure.value for exposure in Exposure if exposure in asked]
    if asked >= set(MODEL):
        names = ["MODEL_PARAMETERS", *(name for name in names if name not in MODEL)]
    return ", ".join(names)


def _tier(method: type[Method]) -> str:
    found = best_tier(method(), 100)
    blind = method.under_blind
    if found == Tier.PLAIN and isinstance(blind, Blind):
        return f"{found}; {Tier.BLIND} with {_conditions(blind)}"
    return found


def _rounds(method: type[Method]) -> str:
    assert isinstance(method.under_masks, Sums)
    return "all rounds" if method.under_masks.rounds(method(), 100) == 100 else "its first rounds alone"


def _blind(method: type[Method]) -> str:
    stated = method.under_blind
    if isinstance(stated, str):
        return f"refused: {stated}"
    return f"yes, with {conditions}" if (conditions := _conditions(stated)) else "yes"


def _conditions(stated: Protected | Blind) -> str:
    return "; ".join(
        " or ".join(f"`{one.name}: {_default(value)}`" for value in one.values) for one in stated.conditions
    )


def _protection(method: type[Method]) -> str:
    """How a method stands under differential privacy, under masks and where mixtures are blind."""
    private, masked = method.under_privacy, method.under_masks
    if isinstance(private, str):
        privacy = f"refused, since {private}"
    else:
        privacy = f"runs with {conditions}" if (conditions := _conditions(private)) else "runs"
    masks = f"refused, since {masked}" if isinstance(masked, str) else _rounds(method)
    blind = _blind(method).replace("refused: ", "refused, since ")
    return f"*Under differential privacy:* {privacy}. *Under masks:* {masks}. *Blind mixtures:* {blind}."


def _rows(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ("---",) * len(head), *rows))


def _between(path: Path, make: Callable[[], str]) -> str:
    """A page whose marked part is made anew."""
    begin = BEGIN.format(make.__name__)
    before, found, rest = path.read_text(encoding="utf-8").partition(begin)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        raise SystemExit(f"{path} has no part between `{begin.strip()}` and `{END}`")
    return f"{before}{begin}\n{make()}\n\n{END}{after}"


def commands() -> str:
    """Every command and option."""
    with_shard = typer.Typer(help=silo_app.info.help)
    with_shard.registered_commands = [*silo_app.registered_commands]
    with_shard.registered_groups = [*silo_app.registered_groups]
    with_shard.command()(shard)
    found = ["# Commands\n\nWhat `--help` says, in one page. Exit codes are [listed apart](../exit-codes.md)."]
    for name, app in (("silo", with_shard), ("coordinator", coordinator_app), ("simulation", simulation_app)):
        command = get_command(app)
        context: Any = Context
        text = get_docs_for_click(obj=command, ctx=context(command, info_name=name), name=name)
        text = re.sub(r"\n\* `--(?:install|show)-completion`:.*", "", text)
        found.append(re.sub(r"^(#+) ", r"#\1 ", text, flags=re.MULTILINE))
    return "\n\n".join(found)


def _made(method: type[Method]) -> Method | None:
    try:
        return method()
    except (TypeError, MedsiloError):
        return None


def _classes(classes: frozenset[Exposure]) -> str:
    return ", ".join(exposure.value for exposure in Exposure if exposure in classes) or "nothing"


def _anchor(model: type[BaseModel]) -> str:
    return model.__name__.lower()


def _inner(model: type[BaseModel], above: str) -> Iterator[tuple[str, type[BaseModel]]]:
    for key, field in model.model_fields.items():
        for kind in _models(field.annotation):
            path = f"{above}{key}"
            yield path, kind
            yield from _inner(kind, f"{path}.")


def _models(annotation: Any) -> list[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [found for part in get_args(annotation) for found in _models(part)]


def _meanings(documented: type) -> tuple[str, dict[str, str]]:
    """A docstring's text before its keys, and what it says of each key."""
    text = inspect.cleandoc(documented.__doc__ or "")
    lead, _, entries = text.partition("\nAttributes:\n")
    found: dict[str, str] = {}
    if entries:
        pieces = _ENTRY.split(entries)[1:]
        for names, meaning in zip(pieces[::2], pieces[1::2], strict=True):
            found |= dict.fromkeys(names.split(", "), _line(meaning.partition("\n\n")[0]))
        return lead, found
    pieces = _KEYS.split(text)
    for names, meaning in zip(pieces[1::2], pieces[2::2], strict=True):
        for name in re.findall(r"``(\w+)``", names):
            found[name] = _line(meaning)
    return pieces[0], found


def _lead(model: type[BaseModel]) -> str:
    return _prose(_meanings(model)[0].strip())


def _table(model: type[BaseModel]) -> str:
    meanings: dict[str, str] = {}
    for base in reversed(model.__mro__):
        if isinstance(base, type) and issubclass(base, BaseModel) and base.__doc__:
            meanings |= _meanings(base)[1]
    properties = model.model_json_schema()["properties"]
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for key, field in model.model_fields.items():
        default = "**needed**" if field.is_required() else _default(field.get_default(call_default_factory=True))
        meaning = meanings.get(key) or field.description or ""
        if not meaning and not _models(field.annotation):
            raise SystemExit(f"{model.__module__}.{model.__name__}: the docstring says nothing of ``{key}``")
        below = _models(field.annotation)
        if below:
            meaning = f"{meaning} See [`{key}:`](#{_anchor(below[0])}).".strip()
        lines.append(f"| `{key}` | {_cell(_kind(properties[key], model))} | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines)


def _default(value: object) -> str:
    if value is None or value in ((), {}, []):
        return "none"
    if isinstance(value, BaseModel):
        return "as below"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def _kind(schema: Mapping[str, Any], model: type[BaseModel]) -> str:
    """The kind of value that a JSON Schema asks for, in words."""
    if "$ref" in schema or "allOf" in schema:
        return "keys, see below"
    if "anyOf" in schema:
        kinds = [_kind(part, model) for part in schema["anyOf"] if part.get("type") != "null"]
        return " or ".join(dict.fromkeys(kinds))
    if "enum" in schema:
        return " or ".join(f"`{value}`" for value in schema["enum"])
    if "const" in schema:
        return f"`{schema['const']}`"
    match schema.get("type"):
        case "integer" | "number" as kind:
            bounds = [
                f"{sign} {schema[key]:,}".replace(",", " ")
                for key, sign in (
                    ("exclusiveMinimum", ">"),
                    ("minimum", "≥"),
                    ("exclusiveMaximum", "<"),
                    ("maximum", "≤"),
                )
                if key in schema
            ]
            return " ".join(["whole number" if kind == "integer" else "number", *bounds])
        case "boolean":
            return "`true` or `false`"
        case "array":
            items = schema.get("items") or {}
            return f"list, each: {_kind(items, model)}" if items else "list"
        case "object":
            return "`key: value` lines"
        case "string":
            return {"path": "path", "date": "date (YYYY-MM-DD)"}.get(schema.get("format", ""), "text")
    return "text"


def _dataclass(documented: type) -> str:
    """The table of a frozen dataclass's fields; nothing for one without any."""
    meanings: dict[str, str] = {}
    for base in reversed(documented.__mro__):
        if dataclasses.is_dataclass(base):
            meanings |= _meanings(base)[1]
    fields = [field for field in dataclasses.fields(documented) if field.init]
    if not fields:
        return "It has no hyper-parameters."
    hints, annotated = get_type_hints(documented), get_type_hints(documented, include_extras=True)
    lines = ["| key | value | default | meaning |", "| --- | --- | --- | --- |"]
    for field in fields:
        choices = get_args(hints[field.name])
        kind = (
            " or ".join(f"`{c}`" for c in choices)
            if choices and str in map(type, choices)
            else _words(hints[field.name])
        )
        if spans := getattr(annotated[field.name], "__metadata__", ()):
            kind = f"{kind} {spans[0].signs}"
        default = "**needed**" if field.default is dataclasses.MISSING else _default(field.default)
        if field.default_factory is not dataclasses.MISSING:
            default = _default(field.default_factory())
        meaning = meanings.get(field.name, "")
        if not meaning:
            raise SystemExit(
                f"{documented.__module__}.{documented.__name__}: the docstring says nothing of {field.name}"
            )
        lines.append(f"| `{field.name}` | {kind} | {_cell(default)} | {_cell(meaning)} |")
    return "\n".join(lines)


def _words(kind: Any) -> str:
    plain = {int: "whole number", float: "number", bool: "`true` or `false`", str: "text"}
    if kind in plain:
        return plain[kind]
    inner = [_words(part) for part in get_args(kind) if part not in (type(None), Ellipsis)]
    return "list, each: " + " or ".join(dict.fromkeys(inner)) if inner else "list"


def _prose(text: str) -> str:
    """Docstring text as Markdown: its indented blocks stay as they are."""
    return re.sub(r"``([^`]+)``", r"`\1`", text)


def _line(text: str) -> str:
    return _prose(" ".join(text.split()))


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


if __name__ == "__main__":
    main()
