"""Short ways to write the expressions that panels share.

Owns the form of a selector, a rate and a quantile. Never knows which metrics there are. Every selector is of the dashboard's run;
``$__rate_interval`` is Grafana's, at least four scrapes long.
"""

from __future__ import annotations

PREFIX = "rollbook_"
WINDOW = "$__rate_interval"


def of(name: str, *matchers: str) -> str:
    """Selector of one of our metrics in the chosen run."""
    chosen = ", ".join(('run=~"$run"', *matchers))
    return f"{PREFIX}{name}{{{chosen}}}"


def total(name: str, *matchers: str, by: str = "") -> str:
    """Sum over processes."""
    return f"sum{_by(by)} ({of(name, *matchers)})"


def newest(name: str, *matchers: str, by: str = "") -> str:
    """Largest over processes: for what one process knows and a successor takes over."""
    return f"max{_by(by)} ({of(name, *matchers)})"


def rate(name: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """Per second."""
    return f"sum{_by(by)} (rate({of(name, *matchers)}[{window}]))"


def increase(name: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """How many in a window."""
    return f"sum{_by(by)} (increase({of(name, *matchers)}[{window}]))"


def observed_once(name: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """How many processes observed a histogram's event in a window, which each does once in its life.

    A series that was not there before counts whole. A process that came to the address of another has the same count again: its
    sum differs, and where the 0 in between was scraped, that is a reset and no event.
    """
    count, total = of(f"{name}_count", *matchers), of(f"{name}_sum", *matchers)
    new = f"max_over_time({count}[{window}]) unless {count} offset {window}"
    return f"sum{_by(by)} (({new}) or (changes({total}[{window}]) - resets({count}[{window}])))"


def share(part: str, whole: str) -> str:
    """Part of a whole that has one value; nothing where nothing happened."""
    return f"{part} / on () group_left () ({whole} > 0)"


def over(part: str, whole: str) -> str:
    """Part of a whole with the same labels; nothing where nothing happened."""
    return f"{part} / ({whole} > 0)"


def age(moment: str) -> str:
    """Seconds since a time stamp."""
    return f"time() - {moment}"


def quantile(q: float, name: str, *matchers: str, by: str = "", window: str = WINDOW) -> str:
    """Quantile of a histogram's observations."""
    buckets = rate(f"{name}_bucket", *matchers, by=f"{by}, le" if by else "le", window=window)
    return f"histogram_quantile({q:g}, {buckets})"


def mean(name: str, *matchers: str, by: str = "") -> str:
    """Mean of a histogram's observations."""
    return f"{rate(f'{name}_sum', *matchers, by=by)} / ({rate(f'{name}_count', *matchers, by=by)} > 0)"


def quantiles(name: str, *matchers: str, qs: tuple[float, ...] = (0.5, 0.95, 0.99)) -> tuple[tuple[str, str], ...]:
    """A query with its legend for each."""
    return tuple((quantile(q, name, *matchers), f"p{q * 100:g}") for q in qs)


def _by(labels: str) -> str:
    return f" by ({labels})" if labels else ""
