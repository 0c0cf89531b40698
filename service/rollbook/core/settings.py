"""Sections of the configuration: one dataclass per TOML table, every field documented where it is declared.

Owns defaults. Never reads a file and never checks what goes together (``config_checks``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from rollbook.core.config_checks import check_sampling


@dataclass(frozen=True, slots=True)
class RunConfig:
    """Identity of the run and where its files live."""

    id: str
    """Name of the run; primary keys in the ledger begin with it."""
    dir: str
    """Run directory: checkpoints, versions, logs, spools. Relative paths start at the configuration file's folder."""
    steps: int
    """Optimizer steps to make in all; running again with more is an accepted revision."""
    seed: int = 0
    """Seed of everything: task order, per-sample seeds, learner RNG."""
    chaos_allowed: bool = False
    """Drills, and failpoints of ``[chaos]``, refuse a run that does not say true here."""
    health_port: int = 0
    """First port on loopback for ``/livez``, ``/readyz`` and ``/progressz`` of the roles: the ledger server's, then the feeder's,
    the learner's, and one for each worker in order; 0 = off. A role command's ``--health-port`` goes before it."""
    metrics_port: int = -1
    """First port on loopback for ``/metrics`` of the roles, counted as for ``health_port``; 0 = a free one for each, -1 = none.
    Each process announces its address in the run directory; the ledger server's ``/sd`` lists the living ones for Prometheus."""
    log_format: str = "text"
    """``text``, or ``json`` for one object per line; people at a terminal get text. ``ROLLBOOK_LOG`` goes before it."""
    mirror: tuple[str, ...] = ()
    """Where ``rollbook run`` also writes the metrics of finished steps, under ``mirror/`` in the run directory: ``tensorboard``,
    ``wandb`` (offline). The package must be installed: ``rollbook[mirror]``."""


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The policy's starting point."""

    path: str
    """Local Hugging Face directory (config.json, safetensors, tokenizer)."""
    chat_template: bool = False
    """Render prompts through the tokenizer's chat template as one user message."""


@dataclass(frozen=True, slots=True)
class TaskConfig:
    """Where prompts come from and how completions are judged."""

    source: str
    """``jsonl``, ``parquet``, ``reasoning_gym``, or ``environment`` (the one of ``[environment]`` brings its tasks)."""
    path: str = ""
    """Task file (jsonl, parquet)."""
    name: str = ""
    """Dataset name (reasoning_gym)."""
    settings: dict = field(default_factory=dict)
    """Settings passed to the procedural dataset (reasoning_gym), for example {min_terms = 2}."""
    size: int = 1000
    """Tasks per epoch of a procedural source."""
    prompt_template: str = "{prompt}"
    """Prompt text; fields of the task in braces."""
    answer_field: str = "answer"
    """Field of a task file that holds the expected answer; dots lead into tables (``reward_model.ground_truth``)."""
    answer_pattern: str = ""
    """Regular expression whose first group extracts the answer from the *task's* answer field; empty = all of it."""
    completion_pattern: str = ""
    """Regular expression whose last match's first group is the completion's answer; empty = the whole completion."""
    reward: str = "rollbook.tasks.rewards:exact_match"
    """Reward function as ``module:attribute`` or ``file.py:attribute``."""
    heldout_path: str = ""
    """Task file for greedy evaluation, never trained on; procedural sources use a disjoint seed when empty."""
    heldout_size: int = 200
    """Held-out tasks to evaluate."""
    lookahead_groups: int = 0
    """Unopened groups the feeder keeps waiting; 0 = twice the groups of a step."""
    epochs: int = 0
    """Passes over the tasks, each in its own order; 0 = as many as the steps need."""


@dataclass(frozen=True, slots=True)
class EnvironmentConfig:
    """The user's environment and the process it runs in."""

    name: str = ""
    """``module:attribute``, ``file.py:attribute``, the name of an entry point of group ``rollbook.environments``, or an adapter:
    ``trl:…``, ``verl:…``, ``rg:…``, ``verifiers:…``; empty = ``task.reward`` judges single-turn completions."""
    settings: dict = field(default_factory=dict)
    """Keyword arguments of the environment."""
    turns_max: int = 8
    """Most turns of the model in one episode."""
    tool_s: float = 30.0
    """Longest tool call; then its process is killed."""
    score_s: float = 60.0
    """Longest judgement; then its process is killed."""
    processes: int = 1
    """Environment processes beside each worker."""
    attempts_max: int = 3
    """Attempts of a score or of a pure tool's call after infrastructure failed, before the rollout has no verdict."""


@dataclass(frozen=True, slots=True)
class SandboxConfig:
    """Where model-written code runs."""

    backend: str = "auto"
    """``auto`` takes the first of ``zygote``, ``bubblewrap``, ``landlock`` that contains the attack suite here; a name takes that
    one or refuses; ``unsafe`` contains nothing and is shown wherever the run is."""
    slots: int = 2
    """Jobs at a time in each environment process; two are the least, since tests that assert run beside the candidate."""
    cpu_s: float = 4.0
    """Processor time of a job."""
    wall_s: float = 10.0
    """Wall time of a job."""
    memory_mb: int = 512
    """Memory of a job, all its processes together."""
    processes: int = 8
    """Processes and threads of a job."""
    output_kb: int = 1024
    """Output of a job."""
    disk_mb: int = 32
    """Scratch space of a job."""


@dataclass(frozen=True, slots=True)
class ScheduleConfig:
    """Which version samples what."""

    kind: str = "bounded"
    """``bounded`` (newest loaded version, lag at most max_lag_versions) or ``fixed`` (exactly lag_versions behind)."""
    max_lag_versions: int = 2
    """Staleness bound of the bounded schedule (P5)."""
    lag_versions: int = 1
    """Lag of the fixed schedule; 0 = synchronous, 1 overlaps generation with training."""


@dataclass(frozen=True, slots=True)
class SamplingConfig:
    """How tokens are drawn. Anything that changes the distribution without the trainer knowing is refused."""

    temperature: float = 1.0
    """Logits are divided by it, in the engine and in the trainer."""
    max_new_tokens: int = 16
    """Longest completion."""
    ignore_eos: bool = False
    """Go on after end of sequence (masks nothing, so log-probs stay right)."""
    top_p: float = 1.0
    """Only 1.0: the engine would renormalise over a set the trainer does not know."""
    top_k: int = 0
    """Only 0 (off), for the same reason."""
    min_p: float = 0.0
    """Only 0.0, for the same reason."""
    min_tokens: int = 0
    """Only 0: it masks end of sequence and renormalises."""
    repetition_penalty: float = 1.0
    """Only 1.0."""
    presence_penalty: float = 0.0
    """Only 0.0."""
    frequency_penalty: float = 0.0
    """Only 0.0."""

    def __post_init__(self) -> None:
        check_sampling(self)


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """One kind of rollout worker; ``[[workers]]`` may stand several times."""

    engine: str
    """``transformers`` or ``vllm``."""
    count: int = 1
    """Processes of this kind."""
    slots: int = 64
    """Slots leased, generated and submitted together."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "float32"
    """Forward dtype: float64 (batch-independent on CPU), float32 or bfloat16."""
    threads: int = 1
    """CPU threads of the process; more than one per process spins on shared cores."""
    max_model_len: int = 512
    """Longest prompt plus completion, in tokens."""
    gpu_memory_fraction: float = 0.35
    """Share of the GPU the vLLM engine may take."""
    kv_cache_gib: int = 1
    """KV cache of the vLLM engine on CPU, GiB."""
    enforce_eager: bool = True
    """vLLM without graph capture: quicker start, slower decoding."""
    batch_invariant: bool = False
    """vLLM on CUDA with batch-invariant kernels: a rollout is a function of its key."""
    probe_tolerance: float = 1e-3
    """Largest mean absolute log-prob difference between the engine and the trainer on the version's probe (R18)."""


@dataclass(frozen=True, slots=True)
class LearnerConfig:
    """The optimizer step."""

    groups_per_step: int
    """Groups (prompts) a step trains on."""
    group_size: int
    """Rollouts per group; unit of the advantage."""
    minibatches: int = 1
    """Optimizer updates per step, on disjoint parts shuffled by the checkpointed RNG."""
    micro_batch_size: int = 0
    """Sequences per forward; 0 = a whole minibatch, with several ranks a rank's share of it. Changes memory, not the loss."""
    objective: str = "decoupled"
    """Name in ``learner.objectives``."""
    clip_low: float = 0.2
    """Lower clip of the policy ratio."""
    clip_high: float = 0.28
    """Upper clip of the policy ratio."""
    correction: str = "token_tis"
    """Weights on pi_old / mu: ``token_tis``, ``none``, … in ``learner.corrections``."""
    rho_max: float = 2.0
    """Cap of the truncated importance weights."""
    advantage: str = "group_mean_centred"
    """Name in ``learner.advantages``."""
    lr: float = 1e-4
    """Peak learning rate."""
    lr_schedule: str = "constant"
    """``constant``, ``linear`` or ``cosine`` after the warm-up, down to ``lr_min_ratio`` at the last step."""
    lr_min_ratio: float = 0.1
    """Final learning rate as a share of ``lr``."""
    warmup_steps: int = 5
    """Steps of linear warm-up."""
    beta1: float = 0.9
    """AdamW."""
    beta2: float = 0.95
    """AdamW."""
    eps: float = 1e-8
    """AdamW."""
    weight_decay: float = 0.0
    """AdamW."""
    grad_clip: float = 1.0
    """Largest gradient norm."""
    device: str = "cpu"
    """``cpu`` or ``cuda``."""
    dtype: str = "float32"
    """Dtype of the master weights and the forward; logits and log-probs are float32 always."""
    autocast: str = ""
    """``bfloat16`` runs the forward under autocast; empty = off."""
    publish_dtype: str = ""
    """Dtype of published weights; empty = ``dtype``."""
    gradient_checkpointing: bool = False
    """Recompute activations in the backward pass."""
    threads: int = 1
    """CPU threads of the process."""
    deterministic: bool = True
    """Deterministic kernels: what makes replay bitwise (P4)."""
    ranks: int = 1
    """Processes that share the micro-batches of a step, one per GPU with ``device = "cuda"``; all live or all start again. They
    are part of the arithmetic: gradients are added up by rank."""
    rank_timeout_s: float = 300.0
    """Longest that one rank may let the others wait within a step; then the learner names it and ends."""
    on_divergence: str = "stop"
    """When a replay after a crash gives other weights than the recorded ones: ``stop``, right where arithmetic is bitwise
    and a difference is a fault, or ``fork``, which trains the recorded plans under a new lineage (R7)."""
    fork_tolerance: float = 1e-4
    """Largest ||replayed - recorded|| / ||recorded|| of published weights up to which a fork keeps samples of versions behind
    it as if nothing had happened."""
    keep_orphans: bool = False
    """Keep those samples beyond the tolerance as well, at the lag of the path through the fork, instead of dropping them."""


@dataclass(frozen=True, slots=True)
class CheckpointConfig:
    """When training state becomes durable."""

    every_steps: int | str = 10
    """Steps between checkpoints, the most that are replayed after a crash; ``"auto"`` chooses where saving and replaying
    together cost least (Young, Daly), from what the learner measures and ``mtbf_s``."""
    mtbf_s: float = 14_400.0
    """Mean time between crashes of the learner that ``"auto"`` reckons with."""
    keep: int = 3
    """Committed checkpoints kept; at least 2."""


@dataclass(frozen=True, slots=True)
class LedgerConfig:
    """The ledger server and its database."""

    url: str = ""
    """``sqlite:///FILE`` or ``postgresql+psycopg://…``; empty = ``ledger.sqlite`` in the run directory."""
    password_file: str = ""
    """File that holds the database password and nothing else, read at every new connection; ``ledger.url`` must not hold one.
    Empty = none, or what PGPASSWORD or PGPASSFILE say."""
    address: str = "127.0.0.1:0"
    """host:port to listen on; port 0 picks a free one and writes it to the run directory. Beyond loopback only with
    ``security.tokens`` and ``security.certificate``."""
    addresses: tuple[str, ...] = ()
    """host:port of every ledger server, the one with index K at position K, for runs whose servers have fixed places; takes the
    place of ``address``, and clients go round it. Empty: each server listens as ``address`` says and tells the run directory."""
    standbys: int = 0
    """Ledger servers that wait for the holder of the run's role to vanish. Anywhere on PostgreSQL; on the same machine on SQLite,
    where the file's lock decides and a holder that is merely stopped must be killed first (a supervisor does)."""
    lease_ttl_s: float = 30.0
    """A slot whose worker is silent this long is leased again."""
    heartbeat_s: float = 5.0
    """Interval of worker heartbeats."""
    role_ttl_s: float = 15.0
    """Term of a fenced role; a standby takes over this long after the holder's last sign of life."""
    attempts_max: int = 3
    """Attempts of one slot before its verdict."""
    survivors_min: int = 0
    """Fewest usable members of a group that is still trained; 0 = max(2, ceil(group_size / 2))."""
    late_submit: str = "salvage"
    """``salvage`` accepts a late sample whose slot is still empty; ``strict`` fences it."""
    straggler: str = "wait"
    """``wait`` (bounded) or ``drop`` for opened groups that would be too stale at the next step."""
    straggler_wait_s: float = 60.0
    """Bound of that wait."""
    infra_failures_max: float = 0.5
    """Share of infrastructure failures among the newest ``infra_window`` outcomes at which the circuit breaker opens: nothing is
    leased but probes, nothing is planned, until probes succeed."""
    infra_window: int = 64
    """Outcomes (samples and failures) the breaker looks at, fewer where few slots are in flight; it opens as soon as the share of
    so many has failed."""
    breaker_pause_s: float = 600.0
    """An open breaker pauses the run for the operator after this long."""
    status_address: str = "127.0.0.1:0"
    """host:port of the read-only status page, whose URL is written to ``status.address`` in the run directory; port 0 picks a
    free one, empty = no page. Asks for an observer's token where ``security.tokens`` is set; beyond loopback only with that
    and ``security.certificate``."""
    metrics_port: int = 0
    """Port on loopback where the server shows Prometheus metrics, its own and the run's; 0 = as ``run.metrics_port`` says."""
    group_commit_max: int = 128
    """Operations that share one durable commit."""
    payload_bytes_max: int = 33_554_432
    """Largest sample accepted."""
    ordinals_per_partition: int = 100_000
    """Width of a PostgreSQL partition."""


@dataclass(frozen=True, slots=True)
class SecurityConfig:
    """Who reaches the ledger server, and how much of it one client may take. Paths only: no secret stands in a configuration."""

    certificate: str = ""
    """The server's certificate with its chain (PEM); with it the server speaks TLS and nothing else. Read when it starts."""
    key: str = ""
    """Private key of ``certificate`` (PEM)."""
    ca: str = ""
    """Certificate of the authority (PEM) by which clients know the server, and the server its clients where it asks for them."""
    require_client_certificate: bool = False
    """Mutual TLS: clients without a certificate signed by ``ca`` are turned away before they can send anything."""
    client_certificate: str = ""
    """Certificate with its chain (PEM) that clients show."""
    client_key: str = ""
    """Private key of ``client_certificate`` (PEM)."""
    tokens: str = ""
    """The server's file of token digests, ``SHA256 ROLE [RUN]`` a line; with it nobody calls without a token. Read when it
    starts."""
    token_dir: str = ""
    """Folder with a file ``ROLE.token`` for each role on this machine; ROLLBOOK_TOKEN_FILE and ROLLBOOK_TOKEN come first."""
    reflection: bool = False
    """gRPC server reflection, for tools like grpcurl; never together with ``tokens``."""
    message_bytes_max: int = 67_108_864
    """Largest message either side accepts."""
    calls_per_s_max: float = 2000.0
    """Calls of one client (connection) a second, a second's worth at once; further ones are told when to come again."""
    calls_open_max: int = 64
    """Calls one client may have open; further ones are told when to come again."""
    calls_waiting_max: int = 256
    """Calls of all clients that may wait for a thread of the server; further ones are told when to come again."""


@dataclass(frozen=True, slots=True)
class RetentionConfig:
    """How long rows are kept. A run keeps all of them unless this is enabled; what is gone cannot be replayed or explained."""

    enabled: bool = False
    """Let go of groups that are finished at or below the second-newest committed checkpoint, oldest first."""
    every_s: float = 60.0
    """The ledger server looks this often for what may go."""
    groups: int = 1000
    """Groups that go together on SQLite; on PostgreSQL it is a partition (``ledger.ordinals_per_partition``)."""
    events_s: float = 86_400.0
    """Events of groups that are gone stay this long."""
    receipts_s: float = 86_400.0
    """Receipts of leases and appends stay this long; a call repeated later than that is taken for a new one."""
    batch_rows: int = 2000
    """Rows that one transaction deletes at most."""


@dataclass(frozen=True, slots=True)
class SupervisorConfig:
    """Restarts on one machine."""

    restarts_max: int = 10
    """Deaths of one role within ``restarts_window_s`` after which the run stops with the first cause."""
    restarts_window_s: float = 600.0
    """Window of the restart budget; while no step is finished, older deaths count as well."""
    backoff_s: float = 0.5
    """First wait before a restart; doubles up to ``backoff_max_s``."""
    backoff_max_s: float = 15.0
    """Longest wait before a restart."""
    drain_s: float = 20.0
    """Grace of a graceful stop before SIGKILL."""
    stall_s: float = 600.0
    """No finished step for this long is reported loudly with a stack dump of every role."""
    startup_s: float = 900.0
    """Longest silence of a role that starts: imports, an engine that loads and compiles, a checkpoint that is restored. Beyond
    this and the two bounds below a role is taken for hung: its stacks are dumped, it is killed and started again."""
    busy_s: float = 900.0
    """Longest silence of a role at work, where every engine step, micro-batch and saved file is a sign of life."""
    idle_s: float = 120.0
    """Longest silence of a role that waits, for the ledger, a tool or the next call; at least 15, above one call's deadline."""


@dataclass(frozen=True, slots=True)
class ClusterConfig:
    """What roles reserve on a Ray cluster (``rollbook up --ray``), and how patient their supervisor is with its nodes."""

    workers: str = "config"
    """``config`` runs the workers of ``[[workers]]``; ``fill`` as many as fit, more when a node joins, fewer when one leaves."""
    worker_cpus: float = 0.0
    """CPUs of a worker; 0 = its ``threads``."""
    worker_gpus: float = 1.0
    """GPUs, or the share of one, of a worker with ``device = "cuda"``."""
    learner_cpus: float = 0.0
    """CPUs of each rank of the learner; 0 = its ``threads``."""
    learner_gpus: float = 1.0
    """GPUs of a learner with ``device = "cuda"``; with several ranks each has a whole one, all on one node."""
    server_cpus: float = 0.0
    """CPUs of the ledger server and of the feeder, each; with 0 they find a place on any node."""
    place_s: float = 15.0
    """A role that has waited this long for a place is told of; one without which nothing advances takes a worker's place."""
    wait_for_resources_s: float = 0.0
    """A run that cannot advance because its roles find no place ends after this long; 0 waits for nodes without end."""
    unreachable_s: float = 10.0
    """A role whose node has answered nothing for this long is lost, and is started elsewhere."""
    orphan_s: float = 60.0
    """A role whose supervisor has asked nothing for this long ends itself."""


@dataclass(frozen=True, slots=True)
class ChaosConfig:
    """Faults at named places, for drills; needs ``run.chaos_allowed = true``."""

    failpoints: str = ""
    """``NAME=ACTION[@K]`` or ``NAME=ACTION~P``, comma separated; ``rollbook doctor --failpoints`` lists the names. Actions:
    crash, raise, pause, delay:SECONDS, error:ENOSPC, error:EIO; K counts crossings within a process, P is a share of them."""
    once: bool = True
    """Each fires at most once over all processes of the run, by markers in ``chaos/`` of the run directory."""
