"""Reads YAML files into strict typed models; an error names the file, the key and the nearest valid key."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, ValidationInfo

from medsilo.privacy.errors import ConfigurationError
from medsilo.privacy.printable import printable


class StrictModel(BaseModel):
    """A part of a configuration: unknown keys are errors, values are not changed once read."""

    model_config = ConfigDict(extra="forbid", frozen=True)


def with_home(path: Path) -> Path:
    """The path with the home folder that its ``~`` stands for; raises ``ConfigurationError`` if nobody has it."""
    try:
        return path.expanduser()
    except RuntimeError:
        raise ConfigurationError(f"names a home folder that is not known here: {path.parts[0]}") from None


def beside_file(value: Any, info: ValidationInfo) -> Any:
    """A path that a file names, taken from that file's folder; anything else as it is."""
    folder = (info.context or {}).get("folder")
    if folder is None or not isinstance(value, str | Path):
        return value
    try:
        return folder / with_home(Path(value))
    except ConfigurationError as error:
        raise ValueError(str(error)) from None


FilePath = Annotated[Path, BeforeValidator(beside_file)]
"""A path; a relative one is taken from the folder of the file that names it."""

Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")]
"""A party's, federation's or run's name: lower-case letters, digits and hyphens."""

_LONGEST_SHOWN = 200
HIDDEN = "hidden"
"""The type of a mistake in a value that is not to be shown."""

_DATE = "should be a day as year-month-day, for example 2027-11-21"
_NUMBER = "should be a number, with a point and not a comma before decimals"
_WHOLE = "should be a whole number, in figures"
_PLAINER = {
    "date_from_datetime_parsing": _DATE,
    "date_from_datetime_inexact": _DATE,
    "date_type": _DATE,
    "float_parsing": _NUMBER,
    "int_parsing": _WHOLE,
    "int_type": _WHOLE,
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
}
"""In place of Pydantic's own words, by the type of the mistake."""

Model = TypeVar("Model", bound=StrictModel)


_LARGEST_FILE = 1 << 19


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the second would silently win, and aliases: a few lines of them stand
    for more values than any memory holds."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        """As ``yaml.composer`` has it; raises ``ComposerError`` for ``*name``."""
        if self.check_event(yaml.events.AliasEvent):
            event = self.peek_event()  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, "aliases (*name) are not used here", event.start_mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


def _mapping(loader: _UniqueKeyLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key_node, _ in node.value:
        key = loader.construct_object(key_node, deep=True)
        if not isinstance(key, str | int | float | bool | None):
            raise yaml.constructor.ConstructorError(None, None, "a key must be a word", key_node.start_mark)
        if key in seen:
            raise yaml.constructor.ConstructorError(None, None, f"the key {key!r} stands twice", key_node.start_mark)
        seen.add(key)
    return loader.construct_mapping(node, deep=True)


_UniqueKeyLoader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def load(path: Path, model: type[Model]) -> Model:
    """The file's contents as a model.

    Raises ``ConfigurationError`` naming the file and, one line each, every key that is wrong and why.
    """
    try:
        with path.open("rb") as file:
            data = file.read(_LARGEST_FILE + 1)
        if len(data) > _LARGEST_FILE:
            raise ConfigurationError(f"{path}: is larger than {_LARGEST_FILE >> 10} KiB, so it is no configuration")
        content = yaml.load(data.decode(), Loader=_UniqueKeyLoader)  # noqa: S506 a SafeLoader
    except FileNotFoundError:
        raise ConfigurationError(f"{path}: there is no such file") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: cannot be read: {error}") from None
    except (
        yaml.YAMLError,
        RecursionError,
        ValueError,
        TypeError,
        AttributeError,
        LookupError,
        ArithmeticError,
    ) as error:
        # PyYAML raises the last four for values such as a date of the year 0.
        hint = '\nAn IPv6 address needs quotes: "[2001:db8::5]:7443"' if "]:" in str(error) else ""
        raise ConfigurationError(f"{path}: is not valid YAML: {_where(error)}{hint}") from None
    if content is None:
        content = {}
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path}: should hold `key: value` lines, not a {type(content).__name__}")
    try:
        return model.model_validate(content, context={"folder": path.absolute().parent})
    except ValidationError as error:
        raise ConfigurationError("\n".join(f"{path}: {line}" for line in explain(error, model))) from None


def _where(error: Exception) -> str:
    """What PyYAML says, with the line that it is about."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return str(error)
    mark = error.problem_mark
    said = f"line {mark.line + 1}, column {mark.column + 1}: {error.problem}"
    if error.context_mark is not None and error.context_mark.line != mark.line:
        said += f" ({error.context}, which begins in line {error.context_mark.line + 1})"
    if error.problem and ("block" in error.problem or "mapping values" in error.problem):
        said += ". Indent the line like its neighbours, with spaces, and quote a value that holds a colon"
    return said


def explain(error: ValidationError, model: type[BaseModel]) -> list[str]:
    """One printable line per mistake: the key's path, what is wrong, and for an unknown key the nearest valid one."""
    lines = []
    # A key that is missing is often one that is misspelt, and then follows from it.
    for mistake in sorted(error.errors(), key=lambda one: one["type"] == "missing"):
        where = ".".join(str(part) for part in mistake["loc"])
        if mistake["type"] == "extra_forbidden":
            valid = _keys_at(model, mistake["loc"][:-1])
            near = difflib.get_close_matches(str(mistake["loc"][-1]), valid, n=1, cutoff=0.5)
            hint = f"did you mean `{near[0]}`?" if near else f"valid keys here: {', '.join(sorted(valid))}"
            lines.append(f"unknown key `{where}`; {hint}")
        elif mistake["type"] == HIDDEN:
            lines.append(f"`{where}`: {mistake['msg']}")
        elif mistake["type"] == "missing":
            lines.append(f"the key `{where}` is missing")
        elif mistake["type"] in _PLAINER:
            lines.append(f"`{where}`: {_PLAINER[mistake['type']]} (got {_shown(mistake['input'])})")
        else:
            said = f"`{where}`: " * bool(where) + mistake["msg"].removeprefix("Value error, ")
            # What is wrong with a list or a part of the file is said in words; the whole of it explains nothing.
            own = mistake["type"] == "value_error" and isinstance(mistake["input"], list | dict)
            lines.append(said if own else f"{said} (got {_shown(mistake['input'])})")
    return [printable(line) for line in lines]


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_SHOWN else f"{text[:_LONGEST_SHOWN]}…"


def _keys_at(model: type[BaseModel], location: tuple[str | int, ...]) -> list[str]:
    kind: Any = model
    for part in location:
        fields = getattr(kind, "model_fields", {})
        if part in fields:
            kind = _model_in(fields[part].annotation)
    return list(getattr(kind, "model_fields", {}))


def _model_in(annotation: Any) -> Any:
    """The model inside ``Model | None``, ``list[Model]`` and the like."""
    if get_origin(annotation) is None:
        return annotation
    return next((found for found in map(_model_in, get_args(annotation)) if hasattr(found, "model_fields")), None)
