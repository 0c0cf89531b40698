"""Entry point: parses the command line, maps errors to truthful exit codes.

Exit codes are listed in ``supervise.policy``.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import sys
from collections.abc import Sequence

from rollbook.cli import (
    clustering,
    inspecting,
    keeping,
    maintaining,
    modelling,
    repairing,
    roles,
    running,
    securing,
    tasks,
    viewing,
)
from rollbook.core.errors import (
    ChainMismatch,
    ConfigError,
    Fenced,
    LedgerBehind,
    PermissionDenied,
    RollbookError,
    RunPaused,
    SchemaTooNew,
    SchemaTooOld,
    ServerFenced,
    TaskError,
    Unauthenticated,
    UnsafeStorage,
)
from rollbook.supervise.policy import EXIT_CONFIG, EXIT_FAILED, EXIT_FENCED, EXIT_PAUSED, EXIT_STOPPED

REFUSALS = (ConfigError, TaskError, ChainMismatch, SchemaTooNew, SchemaTooOld, UnsafeStorage, Unauthenticated, PermissionDenied)
"""What only a person can repair, so that starting again does not help."""


def build_parser() -> argparse.ArgumentParser:
    """The whole command line; each group registers its own commands."""
    parser = argparse.ArgumentParser(
        prog="rollbook",
        description="Reinforcement learning of language models over a ledger: written once, trained once, never lost.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for group in (running, clustering, roles, inspecting, viewing, maintaining, keeping, repairing, modelling, tasks, securing):
        group.register(commands)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    args = build_parser().parse_args(keeping.spelled(sys.argv[1:] if argv is None else argv))
    logging.getLogger("rollbook").addHandler(logging.NullHandler())  # commands print; only roles log, with a handler of their own
    try:
        code = int(args.function(args) or 0)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return EXIT_STOPPED
    except BrokenPipeError:
        # The reader has seen enough; without this the interpreter complains once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (RunPaused, LedgerBehind) as error:
        print(f"rollbook {args.command}: paused: {error}", file=sys.stderr)
        return EXIT_PAUSED
    except REFUSALS as error:
        print(f"rollbook {args.command}: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except (Fenced, ServerFenced) as error:
        print(f"rollbook {args.command}: {error}", file=sys.stderr)
        return EXIT_FENCED
    except RollbookError as error:
        print(f"rollbook {args.command}: {type(error).__name__}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except OSError as error:
        if error.filename is None:
            raise
        hint = "; free space, the same command goes on from here" if error.errno in (errno.ENOSPC, errno.EDQUOT) else ""
        print(f"rollbook {args.command}: {error.filename}: {error.strerror}{hint}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
