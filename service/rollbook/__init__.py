"""Rollbook: a fault-tolerant, asynchronous actor-learner service for reinforcement learning of language models.

The SQL ledger is the write-ahead log of training: rollouts are written once, trained once and never lost.
Packages, lowest layer first (a module imports its own layer or lower ones; a test checks):

``core``       rules without I/O: records, staleness law, idempotency, configuration, errors, ports
``observe``    metrics, logs, failpoints
``ledger``     the truth, in SQL; only the ledger server imports it
``rpc``        gRPC, translation only
``tasks``      task sources, rewards, the feeder
``sandbox``    isolation of model-written code
``rollout``    worker loop, engines, weight loading, spool
``learner``    loop, objectives, checkpoints, publishing, replay
``supervise``  starts, watches and restarts the roles
``report``     run report and plots
``cli``        one module per command group
"""

__version__ = "0.1.0"
