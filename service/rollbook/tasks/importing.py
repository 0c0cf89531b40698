"""Code that a configuration names: ``module:attribute`` or ``file.py:attribute``.

Owns how such a name becomes an object, and the file it is read from. Never decides what the object must be. Importing runs
the user's code, so only processes that judge or make tasks do it; finding the file runs none of it.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rollbook.core.errors import ConfigError


def load_attribute(spec: str, field: str) -> Any:
    """The object named by ``spec``, which stands in the configuration's ``field``.

    Raises: ConfigError naming what is missing; an exception while importing the module is chained.
    """
    module = load_module(spec, field)
    target: Any = module
    for part in attribute_of(spec).split("."):
        if not hasattr(target, part):
            where = module.__file__ or module.__name__
            raise ConfigError(f"{field} = {spec!r}: {where} has no {part!r}{near(part, dir(target))}")
        target = getattr(target, part)
    return target


def load_module(spec: str, field: str) -> ModuleType:
    """The module or file before the colon, imported once. Raises ConfigError (see ``load_attribute``)."""
    place = place_of(spec, field)
    if place.endswith(".py"):
        return _module_from_file(Path(place).resolve(), spec, field)
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        if error.name and (place == error.name or place.startswith(f"{error.name}.")):
            raise ConfigError(f"{field} = {spec!r}: there is no module {error.name!r} on the import path; "
                              "name a file as path/to/file.py:attribute") from None  # fmt: skip
        raise ConfigError(f"{field} = {spec!r}: importing {place} failed: {error}") from error
    except Exception as error:  # user code at import; reported with its cause
        raise ConfigError(f"{field} = {spec!r}: importing {place} raised {type(error).__name__}: {error}") from error


def source_file(spec: str, field: str) -> Path:
    """The file that the module before the colon is read from; runs at most the packages around it. Raises ConfigError."""
    place = place_of(spec, field)
    source = Path(place) if place.endswith(".py") else None
    if source is None:
        try:
            found = importlib.util.find_spec(place)
        except ModuleNotFoundError:
            found = None
        source = Path(found.origin) if found and found.origin else None
    if source is None or not source.exists():
        raise ConfigError(f"{field} = {spec!r}: no module {place!r}; write module:attribute or file.py:attribute")
    return source


def place_of(spec: str, field: str) -> str:
    """What stands before the colon. Raises ConfigError where there is no module or no attribute."""
    place, colon, attribute = spec.rpartition(":")
    if not (place and colon and attribute):
        raise ConfigError(f"{field} = {spec!r}: write module:attribute or file.py:attribute")
    return place


def attribute_of(spec: str) -> str:
    """What stands behind the colon."""
    return spec.rpartition(":")[2]


def near(name: str, names: Iterable[str]) -> str:
    """``; did you mean 'x'?`` where one of the names resembles ``name``, else nothing."""
    found = difflib.get_close_matches(name, names, n=1)
    return f"; did you mean {found[0]!r}?" if found else ""


def _module_from_file(file: Path, spec: str, field: str) -> ModuleType:
    if not file.is_file():
        raise ConfigError(f"{field} = {spec!r}: there is no file {file}")
    # The path is part of the name, so that two files called reward.py do not shadow each other.
    name = f"rollbook_user_{file.stem}_{hashlib.sha256(str(file).encode()).hexdigest()[:12]}"
    if name in sys.modules:
        return sys.modules[name]
    found = importlib.util.spec_from_file_location(name, file)
    if found is None or found.loader is None:
        raise ConfigError(f"{field} = {spec!r}: {file} cannot be imported")
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # before it runs: dataclasses and pickle look their module up
    try:
        found.loader.exec_module(module)
    except Exception as error:  # user code at import; reported with its cause
        del sys.modules[name]
        raise ConfigError(f"{field} = {spec!r}: importing {file} raised {type(error).__name__}: {error}") from error
    return module
