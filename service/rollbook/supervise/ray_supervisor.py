"""The supervisor as a detached actor: the run goes on when the terminal that started it is gone.

Owns the actor's life: one run of the supervision law per attempt, and its end. Ray starts it again where its node is lost; it
then takes over the roles that still run. What it has to say is in the run directory (``control``, ``logs/supervisor.log``).
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ray

from rollbook.core.config import Config, config_from_json
from rollbook.core.errors import RollbookError, Unavailable
from rollbook.supervise import control
from rollbook.supervise.ray_backend import RayBackend, namespace_of
from rollbook.supervise.supervisor import Supervisor

NAME = "supervisor"
ANSWER_S = 10.0
START_S = 90.0
"""How long the actor may take to be placed and to begin."""
PREDECESSOR_S = 30.0
"""How long the lock of a supervisor that was just lost may stay."""
_POLL_S = 0.2


class SupervisorHost:
    """The actor; see ``start_detached`` for its arguments."""

    def __init__(
        self, config_json: str, config_args: Sequence[str], env: Mapping[str, str], accept: Sequence[str], attempt: str
    ) -> None:
        self._config = config_from_json(config_json)
        self._arguments = list(config_args), list(accept), attempt
        self._backend = RayBackend(self._config, env, attempt, is_detached=True)
        self._me = ray.get_runtime_context().current_actor
        self._error: RollbookError | None = None
        self._attempt = attempt
        threading.Thread(target=self._run, name="supervisor", daemon=True).start()

    def attempt(self) -> tuple[str, str]:
        """Its attempt, and why it could not begin."""
        return self._attempt, str(self._error or "")

    def _run(self) -> None:
        config_args, accept, attempt = self._arguments
        state = control.read_state(Path(self._config.run.dir))
        try:
            if state.get("attempt") == attempt and state.get("outcome") != control.RUNNING:
                return  # its predecessor has ended the run and had no time to go
            supervisor = self._begin(config_args, accept, attempt)
            if supervisor is None:
                time.sleep(ANSWER_S)  # whoever has started it reads the reason
            else:
                with contextlib.suppress(RollbookError):  # it is in the state
                    supervisor.run()
        finally:
            ray.kill(self._me, no_restart=True)

    def _begin(self, config_args: list[str], accept: list[str], attempt: str) -> Supervisor | None:
        deadline = time.monotonic() + PREDECESSOR_S
        while True:
            try:
                return Supervisor(self._config, config_args, self._backend, _say_nothing, accept, attempt)
            except Unavailable as error:
                if time.monotonic() > deadline or not ray.get_runtime_context().was_current_actor_reconstructed:
                    self._error = error
                    return None
                time.sleep(_POLL_S)
            except RollbookError as error:
                self._error = error
                return None


def _say_nothing(text: str) -> None:
    """What happens is in the supervisor's log."""


def find(run_id: str) -> Any:
    """The run's detached supervisor; None when there is none."""
    with contextlib.suppress(ValueError):
        return ray.get_actor(NAME, namespace=namespace_of(run_id))
    return None


def start_detached(
    config: Config, config_args: Sequence[str], env: Mapping[str, str], accept: Sequence[str], attempt: str
) -> None:
    """Start the run's supervisor on the cluster and wait until it has begun.

    Args:
        config_args: CONFIG and overrides as the role commands take them, valid on every node.
        env: what roles get of this process's environment.

    Raises: Unavailable when it does not begin, with its reason.
    """
    options: dict[str, Any] = {
        "name": NAME, "namespace": namespace_of(config.run.id), "lifetime": "detached", "max_restarts": -1, "num_cpus": 0,
    }  # fmt: skip
    try:
        host: Any = ray.remote(SupervisorHost)
        actor = host.options(**options).remote(
            config.to_json(), list(config_args), dict(env), list(accept), attempt
        )  # fmt: skip
    except ValueError as error:
        raise Unavailable(f"the run {config.run.id!r} has a supervisor on this cluster already") from error
    deadline = time.monotonic() + START_S
    while control.read_state(Path(config.run.dir)).get("attempt") != attempt:
        reason = ""
        try:
            reason = ray.get(actor.attempt.remote(), timeout=ANSWER_S)[1]
        except ray.exceptions.GetTimeoutError:
            pass
        except ray.exceptions.RayError as error:
            reason = str(error).strip().splitlines()[-1]
        if reason or time.monotonic() > deadline:
            with contextlib.suppress(ray.exceptions.RayError, ValueError):
                ray.kill(actor, no_restart=True)
            raise Unavailable(f"the supervisor did not begin: {reason or f'no node took it within {START_S:.0f} s'}")
        time.sleep(_POLL_S)
