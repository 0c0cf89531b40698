"""Engines by name: the one place that knows which file implements which.

Owns the choice and its checks. Never imports an engine that was not asked for (vllm alone takes half a minute).
"""

from __future__ import annotations

from rollbook.core.config import Config, WorkerConfig
from rollbook.core.errors import ConfigError
from rollbook.core.ports import Engine
from rollbook.rollout.model_files import read_model_files


def make_engine(config: Config, worker: WorkerConfig) -> Engine:
    """Build the engine of one worker kind; it holds no published version until ``load``.

    Raises: ConfigError (not a model directory, unknown engine, device or dtype, missing package).
    """
    files = read_model_files(config.model.path)
    if worker.engine == "transformers":
        from rollbook.rollout.transformers_engine import TransformersEngine

        return TransformersEngine(
            files, device=worker.device, dtype=worker.dtype, max_model_len=worker.max_model_len, threads=worker.threads
        )
    if worker.engine == "vllm":
        from rollbook.rollout.vllm_engine import VllmEngine

        return VllmEngine(files, worker, seed=config.run.seed % 2**31)
    raise ConfigError(f"engine = {worker.engine!r}: 'transformers' or 'vllm'")
