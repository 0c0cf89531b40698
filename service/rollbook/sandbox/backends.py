"""Backends by name.

Owns the names. Which of them may be used is decided by what they contain (``selection``), never here.
"""

from __future__ import annotations

from rollbook.core.errors import ConfigError
from rollbook.core.sandboxing import Sandbox
from rollbook.sandbox.zygote import MODES, ZygoteSandbox


def make_backend(name: str, slots: int) -> Sandbox:
    """A backend of that name. Raises: ConfigError (unknown, or it cannot work on this machine); Unavailable (killed on trial)."""
    if name not in MODES:
        raise ConfigError(f"sandbox backend {name!r}: one of {', '.join(MODES)}")
    return ZygoteSandbox(name, slots)
