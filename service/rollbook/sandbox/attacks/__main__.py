"""``python -m rollbook.sandbox.attacks BACKEND``: one pass of the suite in a process of its own, its result as JSON.

Owns the process: it starts anew once, so that a secret is in its first environment, as a service's credentials are.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict

from rollbook.core.errors import ConfigError, Unavailable
from rollbook.core.host import host
from rollbook.core.sandboxing import Sandbox
from rollbook.sandbox.attacks.bait import SECRET_VARIABLE, secret
from rollbook.sandbox.attacks.suite import ATTACKS, examine


def maker_of(name: str, slots: int) -> Sandbox:
    """A backend by its name, or by ``module:function`` one of somebody's own. Raises ConfigError."""
    module, colon, function = name.partition(":")
    if colon:
        made: Sandbox = getattr(importlib.import_module(module), function)(slots)
        return made
    from rollbook.sandbox.backends import make_backend

    return make_backend(name, slots)


def main(argv: Sequence[str] | None = None) -> int:
    """Print one JSON object: ``results`` and ``enforced``, or ``error`` where the backend cannot be made, perhaps only now."""
    parser = argparse.ArgumentParser(prog="attacks")
    parser.add_argument("backend", help="zygote, bubblewrap, landlock, unsafe, or module:function")
    parser.add_argument("--only", action="append", default=[], choices=[each.name for each in ATTACKS], metavar="ATTACK")
    parser.add_argument("--control", action="store_true", help="lift the limits: only walls contain then")
    args = parser.parse_args(argv)
    if SECRET_VARIABLE not in host().environ:
        again = [sys.executable, "-m", "rollbook.sandbox.attacks", *(sys.argv[1:] if argv is None else argv)]
        os.execve(sys.executable, again, {**host().environ, SECRET_VARIABLE: secret("environment")})
    try:
        passed = examine(lambda slots: maker_of(args.backend, slots), args.only, args.control)
    except (ConfigError, Unavailable, OSError, ImportError) as error:
        print(json.dumps({"error": f"{error}", "cut_short": isinstance(error, Unavailable)}))
        return 0
    print(json.dumps({"results": [asdict(result) for result in passed.results], "enforced": passed.enforced}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
