"""The verifiers adapter against the package ``verifiers`` of this interpreter; exits 1 and says why where it fails.

With a folder as its argument it takes the package's shape in small instead (``verifiers_shape``), which needs nothing installed.
Run it with an interpreter that has the real one, which is too large to install beside everything else:
``PYTHONPATH=service:tests /path/to/venv/bin/python tests/environment/verifiers_check.py``.
"""

from __future__ import annotations

import asyncio
import importlib.metadata
import json
import sys
from pathlib import Path
from typing import Any

from rollbook.core.environments import Context, Episode, RewardResult, Turn
from rollbook.core.errors import ConfigError, RollbookError, TaskError, VerifierError
from rollbook.core.records import Blame, RewardStatus
from rollbook.core.sandboxing import Limits
from rollbook.tasks.adapters import load
from task_fixtures import make_config

HERE = Path(__file__).with_name("verifiers_tasksets.py")
CONTEXT = Context(None, Limits(), 1, "r/0.0", 1.0)


def taskset(name: str, **settings: Any) -> Any:
    full = f"verifiers:{HERE}:{name}"
    config = make_config(environment={"name": full, "settings": settings}, task={"source": "environment", "path": ""})
    return load("verifiers", f"{HERE}:{name}", config)


def judge(environment: Any, task: dict, completion: str) -> RewardResult:
    # As tasks travel: through JSON.
    return asyncio.run(environment.score(Episode(json.loads(json.dumps(task)), (Turn(completion),)), CONTEXT))


def refused(kind: type[Exception], said: str, what: Any) -> None:
    try:
        what()
    except kind as error:
        assert said in str(error), f"{error} does not say {said!r}"
        return
    raise AssertionError(f"not refused: expected {kind.__name__} with {said!r}")


def check_tasks() -> None:
    sums = taskset("Sums", taskset={"n": 2}, heldout={"start": 10})
    tasks = list(sums.load("train"))
    assert [t["prompt"] for t in tasks] == ["Add.\n\n0+1=", "Add.\n\n1+1="]
    assert tasks[1]["messages"] == [{"role": "system", "content": "Add."}, {"role": "user", "content": "1+1="}]
    assert tasks[1]["answer"] == "2"
    assert [t["answer"] for t in sums.load("heldout")] == ["11", "12"]
    assert list(taskset("Sums").load("heldout")) == []
    assert len(list(taskset("Endless", tasks_max=4).load("train"))) == 4


def check_scores() -> None:
    sums = taskset("Sums")
    task = list(sums.load("train"))[1]
    right = judge(sums, task, "2")
    assert right == RewardResult(2.5, parts={"right": 1.0, "short": 0.5, "turns": 1.0}), right
    assert judge(sums, task, "three").value == 0.0
    lost = judge(sums, task, "lost")
    assert (lost.value, lost.status, lost.blame) == (None, RewardStatus.INFRA_ERROR, Blame.INFRA)
    from verifiers.v1.errors import TaskError as TheirTaskError

    refused(TheirTaskError, "the table is gone", lambda: judge(sums, task, "raise"))
    refused(Exception, "nan", lambda: judge(sums, task, "nan"))
    refused(VerifierError, "judges its own tasks only", lambda: judge(sums, {"prompt": "p"}, "2"))


def check_refusals() -> None:
    refused(ConfigError, "does not fit", lambda: taskset("Sums", taskset={"m": 2}))
    refused(ConfigError, "takes no setting environment.settings.tasket; did you mean", lambda: taskset("Sums", tasket={}))
    refused(ConfigError, "has no end: set environment.settings.tasks_max", lambda: list(taskset("Endless").load("train")))
    refused(ConfigError, "has the runtime hook setup()", lambda: taskset("NeedsSetup"))
    refused(ConfigError, "needs a container", lambda: taskset("NeedsContainer"))
    refused(ConfigError, "is no verifiers.v1.Taskset", lambda: taskset("SumTask"))
    refused(TaskError, "has no prompt", lambda: list(taskset("UserOpens").load("train")))
    for name, said in (("NoReward", "no reward at all was not given"), ("NeedsRuntime", "ran() needs the library's runtime")):
        environment = taskset(name)
        task = next(iter(environment.load("train")))
        refused(VerifierError, said, lambda e=environment, t=task: judge(e, t, "2"))
    refused(ConfigError, "no-such-taskset", lambda: load("verifiers", "no-such-taskset", make_config()))


def main() -> int:
    if len(sys.argv) > 1:
        from verifiers_shape import install

        install(Path(sys.argv[1]))
    for check in (check_tasks, check_scores, check_refusals):
        try:
            check()
        except (AssertionError, RollbookError) as error:
            print(f"FAIL {check.__name__}: {type(error).__name__}: {error}")
            return 1
        print(f"ok   {check.__name__}")
    print(f"verifiers {importlib.metadata.version('verifiers')}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
