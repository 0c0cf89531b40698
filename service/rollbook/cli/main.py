"""Entry point: parses the command line, maps errors to truthful exit codes.

Exit codes: 0 done; 1 a check found something (audit, doctor) or the run failed; 2 the input is wrong (configuration,
arguments); 3 fenced by a newer holder; 130 stopped by Ctrl-C after a graceful drain.
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from rollbook.cli import inspecting, maintaining, modelling, roles, running
from rollbook.core.errors import ConfigError, Fenced, RollbookError, ServerFenced, TaskError


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each group registers its own commands."""
    parser = argparse.ArgumentParser(
        prog="rollbook",
        description="Reinforcement learning of language models over a ledger: written once, trained once, never lost.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (running, roles, inspecting, maintaining, modelling):
        group.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = build_parser().parse_args(argv)
    logging.getLogger("rollbook").addHandler(logging.NullHandler())  # commands print; only roles log, with a handler of their own
    try:
        return int(args.function(args) or 0)
    except KeyboardInterrupt:
        return 130
    except (ConfigError, TaskError) as error:
        print(f"rollbook {args.command}: {error}", file=sys.stderr)
        return 2
    except (Fenced, ServerFenced) as error:
        print(f"rollbook {args.command}: {error}", file=sys.stderr)
        return 3
    except RollbookError as error:
        print(f"rollbook {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
