"""Other libraries' conventions as environments: ``trl:``, ``verl:``, ``rg:`` and ``verifiers:``.

Owns the choice of the adapter. Never imports an adapter's library before it is asked for: each is optional. Every adapter keeps
one rule whatever its library does with trouble (P6): what a user's function raises passes through, for the process around it to
tell, and no answer is never a 0.
"""

from __future__ import annotations

import importlib
from typing import cast

from rollbook.core.config import ADAPTERS, Config
from rollbook.core.environments import Environment
from rollbook.core.errors import ConfigError

_MODULES = {"trl": "trl", "verl": "verl", "rg": "reasoning_gym", "verifiers": "verifiers_v1"}


def load(prefix: str, rest: str, config: Config) -> Environment:
    """The environment that ``environment.name = "PREFIX:REST"`` names.

    Raises: ConfigError (no such adapter, function, dataset or package, or settings that do not fit).
    """
    if prefix not in _MODULES:
        raise ConfigError(f"environment.name = '{prefix}:{rest}': the adapters are {', '.join(f'{name}:' for name in ADAPTERS)}")
    if not rest.strip():
        raise ConfigError(f"environment.name = '{prefix}:': write what it is to load behind the colon")
    module = importlib.import_module(f"{__name__}.{_MODULES[prefix]}")
    return cast(Environment, module.make(rest, config))
