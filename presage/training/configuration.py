"""Read a configuration from a TOML file and `--set key=value`; reject unknown keys and values of the wrong type.

    # next-agent.toml
    min_evidence = 20
    [network]
    epochs = 10

is equivalent to `--set min_evidence=20 --set network.epochs=10`. Keys are the fields of the configuration dataclass,
with dots for nested ones. Omitted keys keep their defaults.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from presage.errors import ConfigurationError

Config = TypeVar("Config")


Limits = Mapping[str, tuple[float, float]]
"""Smallest and largest allowed value by key, inclusive."""


def read_configuration(
    kind: type[Config], file: Path | None = None, settings: Sequence[str] = (), limits: Limits | None = None
) -> Config:
    """Build a configuration. Settings override the file; the file overrides the defaults.

    Args:
        kind: a dataclass whose fields are scalars or dataclasses, all with defaults.
        settings: `key=value`, the value in TOML syntax; a bare word is a string.
        limits: ranges of numeric keys; a key without one must be finite and at least 0.

    Raises:
        ConfigurationError: unreadable file, unknown key, or invalid value.
    """
    values = _read(file) if file is not None else {}
    config = _build(kind, values, str(file), limits or {})
    for setting in settings:
        key, separator, text = setting.partition("=")
        key = key.strip()
        if not separator or not all(key.split(".")):
            raise ConfigurationError(f"--set {setting!r}: wanted key=value, such as --set network.epochs=10")
        nested: Any = _value(text.strip())
        for name in reversed(key.split(".")):
            nested = {name: nested}
        values = _merged(values, nested)
        config = _build(kind, values, f"--set {setting}", limits or {})
    return config


def keys(kind: type[Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """All keys of a configuration with their type names."""
    hints = get_type_hints(kind)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            yield from keys(hint, f"{prefix}{field.name}.")
        else:
            yield f"{prefix}{field.name}", _name(hint)


def _name(hint: Any) -> str:
    """The type of a key, as shown in error messages."""
    if get_origin(hint) is Literal:
        return ", ".join(map(str, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"list of {_name(get_args(hint)[0])}"
    return getattr(hint, "__name__", str(hint))


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(
            f"{file}: cannot be read ({error.strerror or error}); a TOML file is wanted: check the path"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{file}: not TOML ({error}); wanted lines such as `min_evidence = 20`") from error


def _value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _merged(values: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(values)
    for key, value in more.items():
        old = merged.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged


def _build(
    kind: type[Config],
    values: Mapping[str, Any],
    source: str,
    limits: Limits,
    prefix: str = "",
    root: type[Any] | None = None,
) -> Config:
    root, hints = root or kind, get_type_hints(kind)
    built = {}
    for name, value in values.items():
        key = f"{prefix}{name}"
        if name not in {field.name for field in dataclasses.fields(cast(Any, kind))}:
            known_keys = ", ".join(f"{known_key} ({type_name})" for known_key, type_name in keys(root))
            raise ConfigurationError(f"{source}: no key {key!r}; the keys are {known_keys}")
        hint = hints[name]
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, dict):
                inside = ", ".join(inner_key for inner_key, _ in keys(hint, f"{key}."))
                raise ConfigurationError(f"{source}: {key} is {value!r}; it is a table, set its keys: {inside}")
            built[name] = _build(hint, value, source, limits, f"{key}.", root)
        else:
            built[name] = _scalar(hint, value, key, source, limits.get(key, (0, math.inf)))
    return kind(**built)


def _scalar(hint: Any, value: Any, key: str, source: str, limits: tuple[float, float]) -> Any:
    try:
        # Strict mode: otherwise "yes" would pass for true and 3.0 for 3. TOML lists become the dataclass's tuples.
        checked = TypeAdapter(hint).validate_python(tuple(value) if isinstance(value, list) else value, strict=True)
    except ValidationError as error:
        given = f"{value!r} ({type(value).__name__})"
        wanted = "one of" if get_origin(hint) is Literal else "a value of type"
        raise ConfigurationError(f"{source}: {key} is {given}; {wanted} {_name(hint)} is wanted") from error
    least, most = limits
    if isinstance(checked, int | float) and not (least <= checked <= most and math.isfinite(checked)):
        ends = f"a finite number of at least {least}" if most == math.inf else f"a number from {least} to {most}"
        raise ConfigurationError(f"{source}: {key} is {checked}; {ends} is wanted")
    return checked
