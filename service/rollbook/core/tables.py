"""From parsed TOML tables to dataclasses, and one override at a time into a table.

Owns types, unknown and missing keys: every message has the full path of the key and the nearest valid one. Never knows
which dataclasses there are.
"""

from __future__ import annotations

import dataclasses
import difflib
import tomllib
import types
import typing

from rollbook.core.errors import ConfigError

_SHOWN = {"str": "a string", "int": "an integer", "float": "a number", "bool": "true or false", "dict": "a table"}


def _value(kind: typing.Any, value: object, path: str) -> object:
    if isinstance(kind, types.UnionType):
        kinds = typing.get_args(kind)
        if type(value) not in kinds:
            raise ConfigError(f"{path} = {value!r}: expected {' or '.join(_SHOWN[one.__name__] for one in kinds)}")
        return value
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ConfigError(f"{path} = {value!r}: expected {_SHOWN[kind.__name__]}")
    return value


def build(cls: type, table: object, path: str) -> object:
    """One dataclass from one TOML table; unknown and missing keys name the full path."""
    if not isinstance(table, dict):
        raise ConfigError(f"{path or 'the file'}: expected a table [{path}]")
    hints = typing.get_type_hints(cls)
    fields = {f.name: f for f in dataclasses.fields(cls)}
    for key in table:
        if key not in fields:
            near = difflib.get_close_matches(key, fields, n=1, cutoff=0.5)
            hint = f"; did you mean {join(path, near[0])}?" if near else f"; valid keys: {', '.join(fields)}"
            raise ConfigError(f"unknown key {join(path, key)}{hint}")
    values: dict[str, object] = {}
    for name, spec in fields.items():
        where = join(path, name)
        if name not in table:
            if spec.default is dataclasses.MISSING and spec.default_factory is dataclasses.MISSING:
                raise ConfigError(f"missing key {where}: {_way_to_add(hints[name], where, path)}")
            continue
        kind = hints[name]
        if dataclasses.is_dataclass(kind):
            values[name] = build(kind, table[name], where)  # type: ignore[arg-type]
        elif typing.get_origin(kind) is tuple:
            items = table[name]
            item = typing.get_args(kind)[0]
            is_table = dataclasses.is_dataclass(item)
            if not isinstance(items, list):
                raise ConfigError(f"{where}: expected {f'[[{where}]] tables' if is_table else 'a list'}")
            make = build if is_table else _value
            values[name] = tuple(make(item, t, f"{where}[{i}]") for i, t in enumerate(items))
        else:
            is_union = isinstance(kind, types.UnionType)
            values[name] = _value(kind if is_union else typing.get_origin(kind) or kind, table[name], where)
    return cls(**values)


def _way_to_add(kind: type, where: str, path: str) -> str:
    if dataclasses.is_dataclass(kind):
        return f"add a [{where}] table"
    return f"add a [[{where}]] table" if typing.get_origin(kind) is tuple else f"add it to [{path}]"


def join(path: str, name: str) -> str:
    """Full path of a key."""
    return f"{path}.{name}" if path else name


def apply_override(table: dict, assignment: str) -> None:
    """Apply one ``a.b=c`` override; the value is read as TOML, a bare word as a string."""
    name, sep, text = assignment.partition("=")
    if not sep:
        raise ConfigError(f"--set {assignment!r}: write SECTION.KEY=VALUE")
    try:
        value = tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        value = text
    *parents, last = name.strip().split(".")
    place: object = table
    for depth, parent in enumerate(parents):
        if isinstance(place, list):
            place = _entry(place, parent, name, ".".join(parents[:depth]))
        elif isinstance(place, dict):
            place = place.setdefault(parent, {})
    where = ".".join(parents)
    if isinstance(place, list):
        raise ConfigError(f"--set {name}: name one entry, for example {where}.0.{last}")
    if not isinstance(place, dict):
        raise ConfigError(f"--set {name}: {where} is a value, not a table; write SECTION.KEY=VALUE")
    place[last] = value


def _entry(entries: list, index: str, name: str, where: str) -> object:
    if not index.isdigit() or int(index) >= len(entries):
        raise ConfigError(f"--set {name}: {index!r} is no entry of [[{where}]], which has {len(entries)}, counted from 0")
    return entries[int(index)]
