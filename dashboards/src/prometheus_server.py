"""A Prometheus of one's own on the loopback, on recorded data or scraping a run; and what it is asked.

Owns the process, its port and its data folder. Ends what it started. Needs Debian's package ``prometheus``.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LOOPBACK = "127.0.0.1"
READY_S = 120.0
ANSWER_S = 60.0
RETENTION = "100y"
"""A recorded run may be old."""


class NotReady(Exception):
    """It did not start, or does not answer."""


def is_installed() -> bool:
    """Whether both programs are here."""
    return all(shutil.which(name) for name in ("prometheus", "promtool"))


def load(recorded: Path, data_dir: Path) -> None:
    """Turn OpenMetrics text with time stamps into blocks. Raises NotReady with promtool's words."""
    command = ["promtool", "tsdb", "create-blocks-from", "openmetrics", str(recorded), str(data_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode:
        raise NotReady(f"{recorded}: {done.stderr or done.stdout}")


@contextlib.contextmanager
def prometheus(
    config: Path, data_dir: Path, *, runbooks: Path | None = None, port: int = 0, lookback_s: int = 0
) -> Iterator[str]:
    """Start it; gives its URL. Port 0 takes a free one.

    A recording has no marks where a process left, so its series would live on for five minutes; ``lookback_s`` is how long.
    """
    port = port or _free_port()
    url = f"http://{LOOPBACK}:{port}"
    command = [
        "prometheus", f"--config.file={config}", f"--storage.tsdb.path={data_dir}", f"--storage.tsdb.retention.time={RETENTION}",
        f"--web.listen-address={LOOPBACK}:{port}", "--enable-feature=exemplar-storage", "--log.level=warn",
    ]  # fmt: skip
    command += [f"--web.user-assets={runbooks}"] if runbooks else []
    command += [f"--query.lookback-delta={lookback_s}s"] if lookback_s else []
    with (data_dir.parent / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        _wait(url, process, Path(log.name))
        yield url
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + READY_S
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{url}/-/ready", timeout=5):
                return
        except OSError:
            time.sleep(0.1)
    raise NotReady(f"prometheus is not ready: {log.read_text()[-2000:]}")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((LOOPBACK, 0))
        return int(probe.getsockname()[1])


def ask(url: str, path: str, **parameters: Any) -> Any:
    """``data`` of an answer of the API. Raises NotReady with what Prometheus said."""
    query = urllib.parse.urlencode(parameters, doseq=True)
    try:
        with urllib.request.urlopen(f"{url}/api/v1/{path}?{query}", timeout=ANSWER_S) as answer:
            return json.load(answer)["data"]
    except urllib.error.HTTPError as error:
        raise NotReady(f"{path}: {json.loads(error.read() or b'{}').get('error', error)}") from None


def recorded_lines(url: str, selectors: Sequence[str], seconds: int, at: float) -> Iterator[str]:
    """Raw samples of the last seconds before ``at`` as OpenMetrics text that ``load`` reads again: a run to keep."""
    for selector in selectors:
        for series in ask(url, "query", query=f"{selector}[{seconds}s]", time=at)["result"]:
            labels = dict(series["metric"])
            name = labels.pop("__name__")
            shown = ",".join(f"{label}={json.dumps(value)}" for label, value in sorted(labels.items()))
            yield from (f"{name}{{{shown}}} {value} {moment}\n" for moment, value in series["values"])
    yield "# EOF\n"
