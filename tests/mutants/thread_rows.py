"""Public threads about rollouts that are lost, doubled, too old or stuck in a queue; what a line of the survey is.

Owns the form of a line and the files that tests stand in. ``threads`` has the rest of the table and is what is asked.
"""

from __future__ import annotations

from dataclasses import dataclass

RESUME = "tests/threads/test_resume_threads.py::test_"
STALENESS = "tests/threads/test_staleness_threads.py::test_"
LEDGER = "tests/threads/test_ledger_threads.py::test_"
LEARNER = "tests/threads/test_learner_threads.py::test_"
REWARDS = "tests/threads/test_reward_threads.py::test_"
SANDBOXES = "tests/threads/test_sandbox_threads.py::test_"
FEEDER = "tests/threads/test_feeder_threads.py::test_"
HANGS = "tests/threads/test_hang_threads.py::test_"
NODES = "tests/threads/test_node_threads.py::test_"


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the survey: threads of the same bug, with pairs (test, mutant), or the reason why it does not apply."""

    threads: tuple[str, ...]
    cases: tuple[tuple[str, str], ...] = ()
    reason: str = ""


LOST_OR_DOUBLED = (
    Row(
        ("verl#4199",),
        ((RESUME + "verl_4199_in_flight_rollouts_survive_the_death_of_the_server", "in_flight_rollouts_are_forgotten"),),
    ),
    Row(
        ("verl#7579",),
        (
            (RESUME + "verl_7579_a_recycled_place_never_holds_the_bytes_of_another_sample", "a_freed_index_is_used_again"),
            (RESUME + "verl_7579_a_writer_of_an_old_epoch_changes_nothing", "a_loser_goes_on"),
            (RESUME + "verl_7579_what_was_acknowledged_is_durable_before_the_answer", "acknowledged_before_commit"),
        ),
    ),
    Row(
        ("verl#7759", "verl#7762"),
        ((RESUME + "verl_7759_prompts_issued_again_count_against_the_budget_they_had", "prompts_issued_again_are_not_counted"),),
    ),
    Row(
        ("verl#7037",),
        ((RESUME + "verl_7037_a_prompt_issued_again_has_all_its_fields_however_often", "issuing_again_wipes_fields"),),
    ),
    Row(
        ("verl#7401",),
        ((FEEDER + "verl_7401_a_resume_at_the_edge_of_an_epoch_skips_nothing", "a_resume_at_an_epoch_edge_skips_an_epoch"),),
    ),
    Row(
        ("OpenRLHF#1322",),
        ((RESUME + "openrlhf_1322_finished_rollouts_that_wait_are_trained_after_the_restart", "the_buffer_is_not_restored"),),
    ),
    Row(
        ("NeMo-RL#3599", "NeMo-RL#3820"),
        (
            (RESUME + "nemo_rl_3599_the_cursor_never_stands_beyond_what_is_stored", "the_cursor_moves_before_the_groups"),
            (LEARNER + "nemo_rl_3820_weights_data_and_position_come_back_together", "weights_without_their_position"),
        ),
    ),
    Row(
        ("NeMo-RL#3594",),
        ((RESUME + "nemo_rl_3594_a_long_rollout_goes_on_from_its_finished_turns", "a_rollout_begins_again_from_nothing"),),
    ),
    Row(
        ("NeMo-RL#3480",),
        ((RESUME + "nemo_rl_3480_a_finished_group_that_is_not_trained_has_a_reason", "finished_groups_vanish_without_a_reason"),),
    ),
    Row(
        ("trl#5911",),
        (
            (
                RESUME + "trl_5911_prompts_issued_ahead_of_training_are_not_skipped_at_resume",
                "prompts_ahead_of_training_are_skipped",
            ),
        ),
    ),
    Row(("trl#7274", "trl#7294"), ((RESUME + "trl_7274_a_dropped_group_holds_nothing_back", "a_dropped_group_is_not_an_end"),)),
    Row(
        ("open-instruct#1523",),
        ((FEEDER + "open_instruct_1523_a_restarted_feeder_issues_nothing_twice", "the_stream_begins_again"),),
    ),
    Row(
        ("miles#2254",),
        (
            (RESUME + "miles_2254_a_late_result_is_matched_with_its_reservation_after_the_restart", "receipts_live_in_memory"),
            (RESUME + "miles_2254_a_result_nobody_reserved_is_refused", "a_result_needs_no_reservation"),
        ),
    ),
    Row(
        ("NeMo-RL#3923",),
        (
            (RESUME + "nemo_rl_3923_finished_siblings_stay_and_an_old_attempt_is_fenced", "a_lost_sibling_restarts_its_group"),
            (RESUME + "nemo_rl_3923_finished_siblings_stay_and_an_old_attempt_is_fenced", "an_old_attempt_passes"),
        ),
    ),
    Row(("NeMo-RL#3924",), ((LEARNER + "nemo_rl_3924_a_configured_checkpoint_is_written", "the_interval_is_only_tried"),)),
    Row(
        ("SkyRL#2010",),
        ((LEARNER + "skyrl_2010_a_ledger_older_than_the_checkpoint_is_refused", "the_data_position_is_not_looked_at"),),
    ),
    Row(
        ("trl#6804",),
        (
            (
                RESUME + "trl_6804_a_trained_sample_is_never_trained_again_when_new_ones_are_missing",
                "trained_groups_are_served_again",
            ),
        ),
    ),
    Row(("torchforge#362",), ((RESUME + "torchforge_362_a_run_resumes_from_its_first_step_on", "every_restart_is_a_new_run"),)),
    Row(
        ("torchtitan#3751",),
        ((LEARNER + "torchtitan_3751_a_stop_leaves_a_checkpoint_of_the_step_it_found", "a_stop_saves_nothing"),),
    ),
    Row(
        ("ms-swift#9935",),
        ((LEARNER + "ms_swift_9935_the_random_generators_go_on_where_they_were", "the_random_state_begins_again"),),
    ),
    Row(
        ("open-r1#450", "trl#3247"),
        ((LEARNER + "open_r1_450_every_metric_after_a_resume_is_the_unbroken_runs", "the_optimizer_begins_again"),),
    ),
)
"""Samples lost or trained twice, and runs that did not resume."""

TOO_OLD = (
    Row(
        ("AReaL#1388",),
        ((STALENESS + "areal_1388_the_staleness_bound_holds_after_a_restart", "capacity_counts_from_the_restart_on"),),
    ),
    Row(
        ("miles#2835",), ((STALENESS + "miles_2835_the_policy_version_goes_on_where_it_was", "the_version_counter_begins_again"),)
    ),
    Row(
        ("cosmos-rl#503",),
        (
            (
                STALENESS + "cosmos_rl_503_rollouts_of_the_version_before_the_restart_are_admitted",
                "the_version_counter_begins_again",
            ),
            (STALENESS + "cosmos_rl_503_a_step_that_lacks_samples_says_how_many", "starvation_is_silent"),
        ),
    ),
    Row(
        ("verl#7938", "verl#7940"),
        (
            (
                STALENESS + "verl_7938_a_finished_rollout_counts_once_however_often_it_is_reported",
                "finished_groups_are_counted_twice",
            ),
        ),
    ),
    Row(
        ("prime-rl#1901", "prime-rl#1902"),
        (
            (STALENESS + "prime_rl_1901_a_group_exactly_at_the_bound_is_trained", "lag_one_too_large"),
            (STALENESS + "prime_rl_1901_a_group_one_beyond_the_bound_is_not_trained", "lag_one_too_small"),
            (STALENESS + "prime_rl_1902_capacity_is_the_most_that_no_step_can_find_too_old", "capacity_one_step_too_large"),
        ),
    ),
    Row(
        ("prime-rl#2812",), ((STALENESS + "prime_rl_2812_the_configured_lag_is_the_one_that_holds", "lag_target_is_a_constant"),)
    ),
    Row(
        ("prime-rl#2957", "prime-rl#2960"),
        (
            (STALENESS + "prime_rl_2957_what_a_drop_throws_away_is_counted", "waste_is_not_recorded"),
            (
                STALENESS + "prime_rl_2960_a_long_rollout_that_outlives_its_lease_is_kept",
                "a_result_after_its_turn_is_thrown_away",
            ),
        ),
    ),
    Row(
        ("tinker-cookbook#822",),
        (
            (
                STALENESS + "tinker_cookbook_822_the_length_of_what_is_dropped_is_kept_beside_what_is_trained",
                "waste_is_not_recorded",
            ),
        ),
    ),
    Row(
        ("rllm#622",),
        ((STALENESS + "rllm_622_the_version_a_rollout_began_under_decides_its_lag", "versions_stamped_at_completion"),),
    ),
    Row(
        ("slime#1800",),
        ((STALENESS + "slime_1800_no_worker_is_fast_enough_to_run_ahead_of_the_bound", "capacity_without_a_bound"),),
    ),
    Row(
        ("SkyRL#1315",),
        ((LEARNER + "skyrl_1315_the_default_correction_sees_the_log_probs_of_the_sampler", "old_log_probs_are_the_new_ones"),),
    ),
    Row(
        ("vllm#54443",),
        ((STALENESS + "vllm_54443_every_token_has_the_version_that_sampled_it", "one_version_for_a_whole_request"),),
    ),
)
"""Staleness and policy versions."""

QUEUES = (
    Row(
        ("river#1302",),
        ((LEDGER + "river_1302_a_rescue_never_touches_a_slot_that_was_filled_meanwhile", "the_rescuer_looks_at_an_old_picture"),),
    ),
    Row(("river#1258",), ((LEDGER + "river_1258_everything_a_dead_worker_held_comes_back", "nobody_rescues_the_dead"),)),
    Row(
        ("procrastinate#1518",),
        (
            (LEDGER + "procrastinate_1518_a_new_process_of_the_same_name_is_another_worker", "a_worker_is_known_by_its_name"),
            (LEDGER + "procrastinate_1518_a_worker_row_outlives_its_leases", "worker_rows_are_pruned_first"),
        ),
    ),
    Row(
        ("oban#1488", "oban-py#32"),
        (
            (LEDGER + "oban_1488_a_server_that_lost_its_role_writes_and_answers_nothing", "a_server_believes_it_still_leads"),
            (LEDGER + "oban_py_32_two_processes_of_one_host_are_two_holders", "leadership_by_host_name"),
        ),
    ),
    Row(
        ("oban#532",), ((LEDGER + "oban_532_the_slower_of_two_attempts_changes_nothing", "the_slower_attempt_has_the_last_word"),)
    ),
    Row(
        ("hexpm#1825", "pg-boss#238"),
        ((LEDGER + "hexpm_1825_a_long_rollout_keeps_its_lease_as_long_as_its_worker_beats", "heartbeats_renew_nothing"),),
    ),
    Row(
        ("pg-boss#436",),
        (
            (
                LEDGER + "pg_boss_436_a_successor_gives_back_what_its_predecessor_held_at_once",
                "a_crash_waits_for_the_full_timeout",
            ),
        ),
    ),
    Row(
        ("solid_queue#761", "solid_queue#589"),
        (
            (
                LEDGER + "solid_queue_761_a_worker_given_up_frees_nothing_of_its_successor",
                "a_stale_end_releases_the_lock_of_another",
            ),
            (LEDGER + "solid_queue_589_a_rollout_ends_once", "a_filled_slot_can_still_fail"),
        ),
    ),
    Row(("dbos-transact-py#759",), ((LEDGER + "dbos_759_an_empty_id_is_refused_and_never_a_key", "an_empty_id_passes"),)),
    Row(
        ("dbos-transact-py#818",), ((LEDGER + "dbos_818_a_learner_that_was_overtaken_takes_no_further_step", "a_loser_goes_on"),)
    ),
    Row(
        ("dbos-transact-java#493", "dbos-transact-java#491"),
        (
            (
                LEDGER + "dbos_java_493_a_start_leaves_alone_what_was_granted_in_the_same_instant",
                "a_start_takes_over_what_was_granted_this_instant",
            ),
        ),
    ),
    Row(
        ("MailFathom#1989", "mlflow#25199", "temporal documentation#2050"),
        ((LEDGER + "mlflow_25199_a_clock_that_is_set_neither_ends_a_lease_nor_keeps_one", "leases_follow_the_wall_clock"),),
    ),
    Row(
        ("jepsen Bufstream 0.1.0", "KAFKA-17754"),
        ((LEDGER + "bufstream_a_delayed_commit_is_not_applied_to_the_next_step", "a_delayed_commit_ends_the_step_that_is_open"),),
    ),
    Row(
        ("nats-server#7564",), ((LEDGER + "nats_7564_the_disk_has_what_was_acknowledged", "acknowledged_before_the_disk_has_it"),)
    ),
    Row(
        ("reverb#103",),
        ((LEDGER + "reverb_103_a_restored_limiter_lets_new_work_in", "trained_groups_fill_the_restored_limiter"),),
    ),
    Row(
        ("temporal#459",),
        (
            (
                LEDGER + "temporal_459_a_request_whose_answer_was_lost_gets_the_same_grants_after_a_restart",
                "a_repeated_request_is_a_new_one",
            ),
        ),
    ),
    Row(
        ("verl#6387",),
        ((FEEDER + "verl_6387_a_feeder_that_dies_has_not_reached_the_end_of_the_data", "a_crash_sends_the_end_of_the_data"),),
    ),
    Row(
        ("meta-pytorch/data#1437", "datasets#7447"),
        ((FEEDER + "data_1437_a_state_taken_at_the_edge_of_an_epoch_is_not_the_end", "an_epoch_edge_is_the_end"),),
    ),
    Row(
        ("KempnerForge#102", "pytorch-lightning#688", "pytorch-lightning#19970"),
        ((LEARNER + "kempnerforge_102_a_checkpoint_has_its_row_only_when_it_is_whole", "the_mark_moves_before_the_files"),),
    ),
    Row(("TransferQueue#164",), reason="there is no storage process of its own that could wait for CPUs of a cluster"),
    Row(("river#1358", "procrastinate#1425"), reason="no database notifications are used: waiting verbs look at the rows again"),
    Row(("greptimedb#7670", "leoflow#1199"), reason="leadership is a row with an epoch, never an advisory lock of a connection"),
    Row(("taskbroker#778",), reason="one writing connection: two batches cannot deadlock on the same rows"),
    Row(("akash-network/console#2739", "PgQue#80", "PgQue#61"), reason="rows are inserted, not updated; a question of speed"),
    Row(
        ("redis#6199", "redis#10756", "redis#13956"),
        reason="nothing trims entries that are pending: a lease row ends with its slot",
    ),
    Row(
        ("pytorch#183878", "pytorch#144752"),
        reason="checkpoints are safetensors files synced one by one, not DCP on a remote store",
    ),
    Row(("OpenViking#4303",), reason="covered where storage faults are tested: a full disk keeps its cause and writes resume"),
)
"""Job queues, durable execution and stores of other kinds."""
