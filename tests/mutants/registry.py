"""Defects that copy public bugs, switched on by ROLLBOOK_MUTANT in a test process and nowhere else.

A mutant names what it replaces (module and dotted attribute) and builds the defective replacement from the original. The
catalogue is filled by the other modules of this package.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Build = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Mutant:
    """One defect: ``build`` gets the original of ``module``.``target`` and returns what takes its place."""

    name: str
    module: str
    target: str
    build: Build
    copies: str
    """The public bug in one sentence."""

    def owner(self) -> Any:
        """The object that holds the attribute to replace. Raises AttributeError when the product no longer has it."""
        found = importlib.import_module(self.module)
        *path, last = self.target.split(".")
        for part in path:
            found = getattr(found, part)
        getattr(found, last)
        return found

    def install(self) -> None:
        """Replace the original for the rest of this process."""
        owner, last = self.owner(), self.target.split(".")[-1]
        setattr(owner, last, self.build(getattr(owner, last)))


MUTANTS: dict[str, Mutant] = {}


def mutant(module: str, target: str) -> Callable[[Build], Build]:
    """Register the decorated builder under its own name; its docstring is the bug it copies."""

    def register(build: Build) -> Build:
        assert build.__doc__ and build.__name__ not in MUTANTS, build.__name__
        MUTANTS[build.__name__] = Mutant(build.__name__, module, target, build, build.__doc__.strip())
        return build

    return register


def load() -> dict[str, Mutant]:
    """The whole catalogue."""
    for part in ("leases", "plans", "roles", "learning", "rewards", "hangs"):
        importlib.import_module(f"mutants.{part}")
    return MUTANTS


def install(name: str) -> None:
    """Install one mutant by name."""
    load()[name].install()
