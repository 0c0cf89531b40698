"""`rollbook status · audit · why · replay · report · evaluate · regenerate`: look at a run without changing it.

Each works with the run's server up or down. Never changes what the run has recorded; where no server answers, opening the
database takes the server's own fence for the length of the command, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from datetime import UTC, datetime
from pathlib import Path

from rollbook.cli.common import add_config, ledger_of, read_config
from rollbook.cli.paging import page_url
from rollbook.core.config import Config
from rollbook.core.errors import ConfigError, NotFound, RollbookError, Unavailable
from rollbook.core.ports import LedgerPort
from rollbook.core.records import Role, SlotKey
from rollbook.observe import failures
from rollbook.rpc.client import LedgerClient
from rollbook.supervise import control, placements

LOOK_S = 15.0
"""How long a short look waits for a server that stops answering meanwhile."""


def register(commands: argparse._SubParsersAction) -> None:
    """Add the commands that only look."""
    for name, function, text in (
        ("status", status, "what runs, rates, lag, failures"),
        ("audit", audit, "every invariant as a query; exit 1 and the offending ids on violation"),
        ("why", why, "the whole story of one rollout"),
        ("replay", replay, "rebuild versions from the start or a checkpoint and the stored plans; compare digests"),
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
            parser.add_argument("--explain", action="store_true", help="at a difference, tell the first tensor and element")
            parser.add_argument(
                "--from-checkpoint", action="store_true", help="begin at the newest checkpoint at or below STEP, not at step 0"
            )
        if name in ("status", "why"):
            parser.add_argument("--json", action="store_true")
        if name == "regenerate":
            parser.add_argument(
                "--engine", choices=("transformers", "vllm"), default="transformers",
                help="engine to generate with; vllm takes the settings of the configuration's first vllm worker",
            )  # fmt: skip
        if name == "evaluate":
            parser.add_argument("--version", type=int, default=-1, help="policy version; default: newest")
            parser.add_argument("--size", type=int, default=0, help="held-out tasks; default: task.heldout_size")
        parser.set_defaults(function=function)


def status(args: argparse.Namespace) -> int:
    """Print the run's state once."""
    from rollbook.report.progress import on_terminal, status_lines
    from rollbook.report.standing import standing
    from rollbook.report.trouble import troubles

    config = read_config(args)
    run_dir = Path(config.run.dir)
    waiting = control.waiting_lines(control.read_state(run_dir))
    try:
        with ledger_of(config, LOOK_S) as ledger:
            state = ledger.run_status()
            is_served = isinstance(ledger, LedgerClient)
    except RollbookError:  # what waits for a place may be the ledger server itself
        print("\n".join(waiting), file=sys.stderr)
        raise
    if not is_served:  # what holds the role now is this command
        state["roles"] = [role for role in state["roles"] if role["role"] != Role.LEDGER.value]
    now_s = time.time()
    at, wrong = standing(state, now_s), troubles(state, now_s, failures.read(run_dir))
    if args.json:
        around = {"standing": at.as_dict(), "troubles": wrong}
        around |= {"supervisor": control.read_state(run_dir), "placements": placements.newest(run_dir)}
        print(json.dumps(state | {"server": is_served} | around, indent=1))
        return 0
    print(on_terminal(f"{at.state.upper()}  waits for {at.waits_for}{_since(at.since_step_s)}"))
    for line in wrong:
        print(on_terminal(f"TROUBLE  {line}"))
    print("\n".join([*status_lines(state, config), *waiting, *placements.placement_lines(placements.newest(run_dir))]))
    if is_served and (url := page_url(run_dir)):
        print(f"status page  {url}")
    if not is_served:
        print("no ledger server answers: read from the database itself")
    return 0


def _since(step_s: float | None) -> str:
    return "" if step_s is None else f"; {step_s:.0f} s since the last step"


def audit(args: argparse.Namespace) -> int:
    """Run every invariant."""
    if args.list:
        from rollbook.ledger.audit import CHECKS

        for check in CHECKS:
            print(f"{check.promise:<4} {check.name:<32} {check.sentence}")
        return 0
    if not args.config:
        raise ConfigError("name the run: rollbook audit CONFIG")
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
    with ledger_of(read_config(args), LOOK_S) as ledger:
        story = ledger.explain(key)
    if args.json:
        print(json.dumps(story, indent=1))
        return 0
    print("\n".join(story_lines(story)))
    return 0


def story_lines(story: dict) -> list[str]:
    """A rollout's story for a person: what is known, then what happened, in seconds since it was issued."""
    from rollbook.report.progress import on_terminal

    lines = [f"{story['sample_id']}  {story['end']}"]
    shown = {name: value for name, value in story.items() if name not in ("sample_id", "end", "history") and value is not None}
    lines += [f"{name:<18} {_shown(value)}" for name, value in shown.items()]
    history = story["history"]
    began = history[0]["at_s"]
    lines.append(f"issued at {datetime.fromtimestamp(began, UTC):%Y-%m-%d %H:%M:%S} UTC; seconds since then:")
    for entry in history:
        details = "  ".join(f"{k}={_shown(v)}" for k, v in entry.items() if k not in ("at_s", "what") and v not in ("", None))
        lines.append(f"  {entry['at_s'] - began:+10.3f}  {entry['what']:<16} {details}".rstrip())
    return [on_terminal(line) for line in lines]


def _shown(value: object) -> object:
    return f"{value:.6g}" if isinstance(value, float) else value


def _key(text: str) -> SlotKey:
    try:
        return SlotKey.parse(text)
    except ValueError as error:
        raise ConfigError(str(error)) from None


def replay(args: argparse.Namespace) -> int:
    """Oracle R: an uninterrupted learner over the stored plans."""
    from rollbook.learner.replay import replay as rebuild

    config = read_config(args)
    with ledger_of(config) as ledger:
        last = args.to or ledger.resume_point().last_planned_step
        result = rebuild(config, ledger, last, explain=args.explain, from_checkpoint=args.from_checkpoint)
    print(json.dumps(result, indent=1))
    if result.get("explanation"):
        print(result["explanation"]["summary"], file=sys.stderr)
    return 0 if result["equal"] else 1


def report(args: argparse.Namespace) -> int:
    """Write the report of a run."""
    config = read_config(args)
    with ledger_of(config) as ledger:
        print(write_report(config, ledger, Path(config.run.dir) / "report"))
    return 0


def write_report(config: Config, ledger: LedgerPort, out_dir: Path) -> Path:
    """Plots and HTML; prints the reward curve as well."""
    from rollbook.ledger.readonly import Reader
    from rollbook.report.bias import alarm_lines
    from rollbook.report.html import write
    from rollbook.report.plots import terminal_curve

    metrics = ledger.step_metrics(ledger.resume_point().lineage)
    print(terminal_curve([m["reward_mean"] for m in metrics if m.get("reward_mean") is not None]))
    counts = ledger.survival()
    for line in alarm_lines(counts):
        print(line)
    try:
        records = Reader(config.ledger.url, config.run.id, config.ledger.password_file)
    except (Unavailable, NotFound, ConfigError) as error:  # the server may be where its database is, and this command elsewhere
        return write(config, ledger, metrics, out_dir, counts, None, str(error))
    with records:
        return write(config, ledger, metrics, out_dir, counts, records)


def evaluate(args: argparse.Namespace) -> int:
    """Greedy and sampled held-out accuracy of one version."""
    from rollbook.report.evaluate import evaluate_version
    from rollbook.report.heldout import keep

    config = read_config(args)
    with ledger_of(config) as ledger:
        result = evaluate_version(config, ledger, args.version, args.size or config.task.heldout_size)
    keep(config.run.dir, result)
    print(json.dumps(result, indent=1))
    return 0


def regenerate(args: argparse.Namespace) -> int:
    """Generate a stored rollout again and compare tokens and log-probs."""
    from rollbook.report.regenerate import regenerate_sample

    key = _key(args.sample)
    config = read_config(args)
    with ledger_of(config) as ledger:
        result = regenerate_sample(config, ledger, key, args.engine)
    print(json.dumps(result, indent=1))
    return 0 if result["tokens_equal"] else 1
