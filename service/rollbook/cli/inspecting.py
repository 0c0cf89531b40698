"""`rollbook status · audit · why · replay · report · evaluate`: look at a run without changing it.

Each works with the run's server up or down. Never writes to the ledger.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rollbook.cli.common import add_config, ledger_of, read_config
from rollbook.core.config import Config
from rollbook.core.ports import LedgerPort
from rollbook.core.records import SlotKey


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands that only look."""
    for name, function, text in (
        ("status", status, "what runs, rates, lag, failures"),
        ("audit", audit, "every invariant as a query; exit 1 and the offending ids on violation"),
        ("why", why, "the whole story of one rollout"),
        ("replay", replay, "rebuild versions from checkpoint 0 and the stored plans; compare digests"),
        ("report", report, "one HTML file with plots"),
        ("evaluate", evaluate, "greedy accuracy of a version on held-out tasks"),
        ("regenerate", regenerate, "generate a stored rollout again from its key and compare"),
    ):
        parser = commands.add_parser(name, help=text)
        if name == "audit":
            parser.add_argument("--list", action="store_true", help="print the invariants instead of checking them")
            parser.add_argument("config", metavar="CONFIG", nargs="?", help="configuration file or run directory")
            parser.add_argument("--set", dest="overrides", action="append", default=[], metavar="A.B=C")
        else:
            add_config(parser)
        if name in ("why", "regenerate"):
            parser.add_argument("sample", metavar="SAMPLE_ID", help="ORDINAL.SIBLING, for example 12.3")
        if name == "replay":
            parser.add_argument("--to", type=int, default=0, metavar="STEP", help="last step; default: all stored")
        if name in ("status", "why"):
            parser.add_argument("--json", action="store_true")
        if name == "evaluate":
            parser.add_argument("--version", type=int, default=-1, help="policy version; default: newest")
            parser.add_argument("--size", type=int, default=0, help="held-out tasks; default: task.heldout_size")
        parser.set_defaults(function=function)


def status(args: argparse.Namespace) -> int:
    """Print the run's state once."""
    from rollbook.report.progress import status_lines

    config = read_config(args)
    with ledger_of(config) as ledger:
        state = ledger.run_status()
        print(json.dumps(state, indent=1) if args.json else "\n".join(status_lines(state, config)))
    return 0


def audit(args: argparse.Namespace) -> int:
    """Run every invariant."""
    if args.list:
        from rollbook.ledger.audit import CHECKS

        for check in CHECKS:
            print(f"{check.promise:<4} {check.name:<32} {check.sentence}")
        return 0
    if not args.config:
        print("name the run: rollbook audit CONFIG")
        return 2
    with ledger_of(read_config(args)) as ledger:
        return 0 if print_audit(ledger) else 1


def print_audit(ledger: LedgerPort) -> bool:
    """Print ``audit: clean`` or every violation; True when clean."""
    violations = ledger.audit()
    for v in violations:
        ids = ", ".join(v.ids[:20]) + (f" … {len(v.ids)} in all" if len(v.ids) > 20 else "")
        print(f"{v.promise} {v.check}: {v.detail}  [{ids}]")
    print(f"audit: {len(violations)} violations" if violations else "audit: clean")
    return not violations


def why(args: argparse.Namespace) -> int:
    """Tell one rollout's story in order."""
    key = _key(args.sample)
    with ledger_of(read_config(args)) as ledger:
        story = ledger.explain(key)
    if args.json:
        print(json.dumps(story, indent=1))
        return 0
    for name, value in story.items():
        if name != "history":
            print(f"{name:<14} {value}")
    for entry in story.get("history", []):
        print("  " + "  ".join(f"{k}={v}" for k, v in entry.items()))
    return 0


def _key(text: str) -> SlotKey:
    from rollbook.core.errors import InvalidRequest

    try:
        return SlotKey.parse(text)
    except ValueError as error:
        raise InvalidRequest(str(error)) from None


def replay(args: argparse.Namespace) -> int:
    """Oracle R: an uninterrupted learner over the stored plans."""
    from rollbook.learner.replay import replay as rebuild

    config = read_config(args)
    with ledger_of(config) as ledger:
        result = rebuild(config, ledger, args.to or ledger.resume_point().last_planned_step)
    print(json.dumps(result, indent=1))
    return 0 if result["equal"] else 1


def report(args: argparse.Namespace) -> int:
    """Write the report of a run."""
    config = read_config(args)
    with ledger_of(config) as ledger:
        print(write_report(config, ledger, Path(config.run.dir) / "report"))
    return 0


def write_report(config: Config, ledger: LedgerPort, out_dir: Path) -> Path:
    """Plots and HTML; prints the reward curve as well."""
    from rollbook.report.html import write
    from rollbook.report.plots import terminal_curve

    metrics = ledger.step_metrics(ledger.resume_point().lineage)
    print(terminal_curve([m["reward_mean"] for m in metrics if m.get("reward_mean") is not None]))
    return write(config, ledger, metrics, out_dir)


def evaluate(args: argparse.Namespace) -> int:
    """Greedy and sampled held-out accuracy of one version."""
    from rollbook.report.evaluate import evaluate_version

    config = read_config(args)
    with ledger_of(config) as ledger:
        result = evaluate_version(config, ledger, args.version, args.size or config.task.heldout_size)
    print(json.dumps(result, indent=1))
    return 0


def regenerate(args: argparse.Namespace) -> int:
    """Generate a stored rollout again and compare tokens and log-probs."""
    from rollbook.report.regenerate import regenerate_sample

    config = read_config(args)
    with ledger_of(config) as ledger:
        result = regenerate_sample(config, ledger, _key(args.sample))
    print(json.dumps(result, indent=1))
    return 0 if result["tokens_equal"] else 1
