"""Which public threads apply, which test covers each, and which defect shows that the test would have caught it."""

from __future__ import annotations

from dataclasses import dataclass

RESUME = "tests/threads/test_resume_threads.py::test_"
STALENESS = "tests/threads/test_staleness_threads.py::test_"
LEDGER = "tests/threads/test_ledger_threads.py::test_"
LEARNER = "tests/threads/test_learner_threads.py::test_"
REWARDS = "tests/threads/test_reward_threads.py::test_"
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

CODE_AND_SANDBOXES = (
    Row(
        ("rllm#710",),
        ((REWARDS + "rllm_710_an_episode_that_is_cut_is_not_a_finished_one", "a_cut_is_logged_as_an_end"),),
    ),
    Row(
        ("rllm#915",),
        ((REWARDS + "rllm_915_no_zombie_is_left_by_checks_that_were_killed", "what_was_killed_is_not_waited_for"),),
    ),
    Row(
        ("NeMo-RL#2207",),
        ((REWARDS + "nemo_rl_2207_a_member_without_a_verdict_leaves_the_baseline_alone", "no_verdict_counts_as_zero"),),
    ),
    Row(
        ("NeMo-Gym#2611", "NeMo-Gym#2015"),
        (
            (
                REWARDS + "nemo_gym_2611_an_environment_can_say_that_infrastructure_failed",
                "an_environment_that_failed_gives_zero",
            ),
            (REWARDS + "nemo_gym_2015_an_exception_while_grading_is_no_reward", "an_exception_is_zero"),
        ),
    ),
    Row(
        ("OpenEnv#1025", "OpenEnv#965"),
        (
            (REWARDS + "openenv_1025_a_missing_reward_file_is_an_error", "a_missing_reward_is_zero"),
            (REWARDS + "openenv_965_a_reward_that_is_being_given_outlives_its_lease", "the_outer_clock_drops_the_reward"),
        ),
    ),
    Row(
        ("verl#5635", "trl#5281"),
        ((REWARDS + "verl_5635_a_score_asked_for_in_another_thread_is_the_same", "an_alarm_bounds_the_score"),),
    ),
    Row(
        ("verl#1331",),
        ((REWARDS + "verl_1331_judging_leaves_the_alarm_signal_alone", "the_alarm_is_left_to_its_default"),),
    ),
    Row(
        ("verl#6673",),
        ((REWARDS + "verl_6673_a_score_that_hangs_ends_and_holds_up_no_other", "scores_have_no_limit"),),
    ),
    Row(
        ("verl#7853",),
        (
            (
                REWARDS + "verl_7853_a_program_that_raises_earns_nothing_where_nothing_is_expected",
                "an_exception_with_exit_code_0_answers_nothing_rightly",
            ),
        ),
    ),
    Row(
        ("verl#3478", "verl#6978"),
        (
            (REWARDS + "verl_3478_jobs_beyond_the_slots_wait_for_their_turn", "a_full_sandbox_refuses"),
            (REWARDS + "verl_6978_a_tools_broken_sandbox_is_not_text_for_the_model", "a_tools_failure_is_its_answer"),
        ),
    ),
    Row(
        ("SvS#3", "code-r1#7"),
        ((REWARDS + "svs_3_a_check_that_ignores_every_signal_is_killed", "checks_are_never_killed"),),
    ),
    Row(
        ("open-r1#546",),
        ((REWARDS + "open_r1_546_a_run_out_of_time_says_so", "a_timeout_is_ok"),),
    ),
    Row(
        ("evalplus#5",),
        ((REWARDS + "evalplus_5_a_wall_clock_that_ran_out_on_a_busy_host_fails_no_program", "every_timeout_is_the_programs"),),
    ),
    Row(
        ("SWE-smith#24", "SWE-bench#620"),
        (
            (REWARDS + "swe_smith_24_tests_that_did_not_run_are_not_passed", "none_of_none_is_all"),
            (REWARDS + "swe_bench_620_a_printed_line_is_no_passed_test", "a_printed_line_is_believed"),
        ),
    ),
    Row(
        ("codewars.com#3083", "codewars.com#2448", "codewars-runner-cli#279", "codewars-runner#321"),
        (
            (REWARDS + "codewars_2448_an_object_that_equals_everything_is_wrong", "an_objects_own_comparison_decides"),
            (REWARDS + "codewars_runner_321_leaving_early_passes_nothing", "exit_code_0_is_success"),
        ),
    ),
    Row(
        ("agent-os#2372", "rbx#807"),
        (
            (REWARDS + "agent_os_2372_a_run_ended_by_its_memory_limit_is_not_ok", "out_of_memory_is_ok"),
            (REWARDS + "rbx_807_memory_wins_whichever_limit_was_polled_first", "the_limit_polled_first_wins"),
        ),
    ),
    Row(
        ("verifiers#399", "verifiers#1920", "verifiers#1750", "verifiers#1412"),
        (
            (REWARDS + "verifiers_399_closing_a_sandbox_ends_what_runs_in_it", "jobs_outlive_their_sandbox"),
            (REWARDS + "verifiers_1412_an_episode_that_failed_is_not_scored", "failed_episodes_are_scored"),
        ),
    ),
    Row(
        ("SkyRL#1613",),
        ((REWARDS + "skyrl_1613_one_failed_rollout_leaves_its_step_to_the_others", "one_failure_ends_its_group"),),
    ),
    Row(
        ("tinker-cookbook#497",),
        ((REWARDS + "tinker_cookbook_497_a_failed_score_is_tried_again_in_a_fresh_process", "a_failed_score_is_dropped"),),
    ),
    Row(
        ("trl#5775", "compose-rl#87"),
        (
            (REWARDS + "trl_5775_a_group_without_any_verdict_has_no_statistics_and_poisons_none", "an_empty_group_has_no_mean"),
            (REWARDS + "compose_rl_87_a_check_out_of_time_is_sent_as_a_failure", "a_check_out_of_time_is_sent_as_zero"),
        ),
    ),
    Row(
        ("AutoCodeBenchmark#1", "codex#38909"),
        (
            (REWARDS + "autocodebenchmark_1_a_sandbox_server_is_replaced_before_it_grows", "one_server_for_ever"),
            (REWARDS + "codex_38909_a_chain_of_forks_ends_at_the_process_limit", "processes_are_not_counted"),
        ),
    ),
    Row(
        ("firejail#1956", "firejail#380", "bubblewrap#313", "bubblewrap#798"),
        (
            (REWARDS + "firejail_1956_a_backend_that_does_not_contain_is_never_taken", "installed_is_good_enough"),
            (REWARDS + "bubblewrap_313_a_program_is_not_root_inside", "programs_run_as_who_started_them"),
            (
                REWARDS + "bubblewrap_798_a_bound_that_cannot_be_set_blames_no_program",
                "a_setup_that_failed_is_the_programs_error",
            ),
        ),
    ),
    Row(
        ("crewAI#5802",),
        ((REWARDS + "crewai_5802_a_tool_with_effects_is_not_called_twice", "every_tool_may_run_again"),),
    ),
)
"""Model-written code, its sandboxes and verdicts, and tools."""

FAILED_AS_ZERO = (
    Row(
        ("NeMo-Gym#1351", "NeMo-Gym#2552", "NeMo-Gym#2750"),
        ((REWARDS + "nemo_gym_1351_failures_are_counted_and_seen_and_no_reward_is_made_up", "failures_leave_no_row"),),
    ),
    Row(
        ("NeMo-RL#3589",),
        ((REWARDS + "nemo_rl_3589_a_rollout_that_failed_is_no_sample", "an_exception_is_an_empty_row"),),
    ),
    Row(
        ("NeMo-RL#431",),
        ((REWARDS + "nemo_rl_2207_a_member_without_a_verdict_leaves_the_baseline_alone", "no_verdict_counts_as_zero"),),
    ),
    Row(
        ("NeMo-RL#2305", "NeMo-RL#2394"),
        ((REWARDS + "nemo_rl_2305_an_environment_that_keeps_dying_stops_the_run", "dying_environments_are_replaced_for_ever"),),
    ),
    Row(
        ("trl#6427", "trl#6430"),
        ((REWARDS + "trl_6427_a_reward_function_that_abstains_gives_no_zero", "abstaining_is_zero"),),
    ),
    Row(
        ("AReaL#1541", "AReaL#1651", "miles#3221"),
        ((REWARDS + "areal_1541_a_score_out_of_time_has_a_status_and_no_value", "a_score_out_of_time_is_zero"),),
    ),
    Row(
        ("ToRL#27",),
        ((REWARDS + "torl_27_a_rising_share_of_sandbox_errors_opens_the_breaker", "sandbox_errors_alarm_nobody"),),
    ),
    Row(
        ("verl#6362", "verl#6452"),
        ((REWARDS + "verl_6362_a_rejected_sample_does_not_move_the_baseline", "rejected_samples_move_the_mean"),),
    ),
    Row(
        ("verl-omni#366",),
        ((REWARDS + "verl_omni_366_a_scorer_that_fails_once_is_asked_again", "a_scorers_error_is_final"),),
    ),
    Row(
        ("slime#1582",),
        ((REWARDS + "slime_1582_a_hiccup_of_the_sandbox_costs_neither_the_run_nor_the_verdict", "a_hiccup_is_final"),),
    ),
    Row(
        ("agentcore-rl-toolkit#122",),
        ((REWARDS + "agentcore_122_an_empty_completion_is_not_padded_into_a_sample", "nothing_is_padded_to_one_token"),),
    ),
    Row(
        ("prime-rl#1563", "prime-rl#3015"),
        ((REWARDS + "prime_rl_3015_a_run_whose_every_rollout_fails_stops_loudly", "it_waits_for_ever"),),
    ),
)
"""Failed rewards that became a number; threads that stand above as well are listed there only."""

HANGS_AND_SILENCE = (
    Row(
        ("SkyRL#1173",),
        ((HANGS + "skyrl_1173_a_role_that_hangs_is_ended_with_its_cause_and_its_stacks", "nobody_watches_the_loop"),),
    ),
    Row(
        ("SkyRL#1986",),
        ((REWARDS + "skyrl_1613_one_failed_rollout_leaves_its_step_to_the_others", "one_failure_ends_its_group"),),
    ),
    Row(
        ("NeMo-RL#3238",),
        ((HANGS + "nemo_rl_3238_a_straggler_has_spent_its_attempts_also_after_a_restart", "attempts_are_never_spent"),),
    ),
    Row(
        ("NeMo-RL#3938",),
        ((HANGS + "nemo_rl_3938_a_prompt_that_always_fails_is_taken_out_and_the_run_goes_on", "attempts_are_never_spent"),),
    ),
    Row(("NeMo-RL#3488",), ((HANGS + "nemo_rl_3488_a_helper_that_died_ends_its_role", "a_dead_helper_is_not_missed"),)),
    Row(("NeMo-RL#2368",), ((HANGS + "nemo_rl_2368_the_first_cause_is_kept_and_told", "the_last_cause_is_told"),)),
    Row(
        ("NeMo-RL#2717",),
        (
            (
                HANGS + "nemo_rl_2717_weights_that_do_not_come_end_the_wait_with_a_cause",
                "weights_are_waited_for_without_a_bound",
            ),
        ),
    ),
    Row(
        ("SkyRL#1691",),
        (
            (
                HANGS + "skyrl_1691_an_engine_that_dies_ends_its_worker_and_frees_what_it_held",
                "a_dead_engine_gives_nothing_for_ever",
            ),
        ),
    ),
    Row(
        ("verl#7155",),
        ((HANGS + "verl_7155_a_hung_engine_keeps_its_slots_no_longer_than_its_bound", "a_hung_engine_keeps_its_slots"),),
    ),
    Row(("verl#6395",), ((HANGS + "verl_6395_a_run_that_lacks_steps_is_not_reported_as_a_success", "a_failure_is_a_success"),)),
    Row(
        ("verl#7611",),
        (
            (
                HANGS + "verl_7611_a_version_that_comes_in_the_middle_of_a_batch_waits_for_its_end",
                "a_sync_in_the_middle_crashes",
            ),
        ),
    ),
    Row(
        ("verl-omni#433",),
        ((HANGS + "verl_omni_433_a_process_that_ended_in_the_middle_is_no_success", "every_code_of_zero_is_a_success"),),
    ),
    Row(
        ("verl#7180", "ms-swift#6962"),
        ((HANGS + "verl_7180_a_silent_run_is_told_with_the_stacks_of_every_role", "stacks_are_not_kept"),),
    ),
    Row(
        ("verl#5327", "verl#5668"),
        reason="there is no rate limiter with an owner: each worker bounds the calls of its own environment processes",
    ),
    Row(
        ("prime-rl#1801",),
        reason="evaluation is a command of its own with its own environment processes; it shares no task with training",
    ),
    Row(
        ("prime-rl#1546", "prime-rl#3139", "prime-rl#3140"),
        ((LEDGER + "river_1258_everything_a_dead_worker_held_comes_back", "nobody_rescues_the_dead"),),
    ),
    Row(
        ("prime-rl#1609",),
        (
            (
                HANGS + "prime_rl_1609_a_spent_budget_ends_the_whole_run_with_the_first_cause",
                "a_spent_budget_ends_a_background_task",
            ),
        ),
    ),
    Row(
        ("prime-rl#2574", "prime-rl#2577"),
        ((HANGS + "prime_rl_2574_what_a_crashed_supervisor_left_is_ended_before_anything_starts", "zombies_are_left_alone"),),
    ),
    Row(
        ("prime-rl#2912",),
        ((HANGS + "prime_rl_2912_the_end_of_a_run_waits_for_nobody_longer_than_its_grace", "what_does_not_drain_is_left"),),
    ),
    Row(
        ("trl#3433", "trl#6628"),
        (
            (
                HANGS + "trl_3433_health_turns_red_when_the_loop_hangs_and_green_when_it_moves",
                "a_process_that_exists_is_alive",
            ),
        ),
    ),
    Row(
        ("slime#1484", "slime#1487", "slime#2176", "slime#2350"),
        (
            (
                HANGS + "slime_2350_an_engine_that_stands_still_is_noticed_though_it_was_at_work",
                "what_is_stopped_is_at_work",
            ),
        ),
    ),
    Row(
        ("cosmos-rl#736",),
        reason="no mesh is rebuilt while a run lives: what replaces a lost process takes its role under a new epoch",
    ),
)
"""Hangs, and failures that were not told; threads that stand above as well are listed there only."""

DEATHS_AND_LEFTOVERS = (
    Row(
        ("verl#1314",),
        ((NODES + "verl_1314_a_node_that_dies_with_everything_on_it_is_recovered_from", "in_flight_rollouts_are_forgotten"),),
    ),
    Row(
        ("verl#429", "verl#439", "verl#2987", "verl#4921"),
        (
            (NODES + "verl_429_a_role_that_is_killed_is_named_with_its_cause_and_started_again", "a_death_has_no_name"),
            (NODES + "verl_4921_a_kill_for_want_of_memory_is_told_apart", "want_of_memory_is_not_looked_for"),
        ),
    ),
    Row(
        ("verl#402", "verl#5079"),
        (
            (
                NODES + "verl_402_saving_a_checkpoint_takes_no_second_copy_of_it_in_memory",
                "a_checkpoint_is_built_in_memory_first",
            ),
        ),
    ),
    Row(
        ("trl#3408",),
        (
            (
                NODES + "trl_3408_workers_go_on_with_the_learner_that_replaces_a_dead_one",
                "a_dead_holder_is_waited_for",
            ),
        ),
    ),
    Row(
        ("NeMo-RL#3592",),
        ((NODES + "nemo_rl_3592_a_restarted_worker_works_as_much_as_before", "a_crash_waits_for_the_full_timeout"),),
    ),
    Row(
        ("NeMo-RL#3591",),
        reason="a matter of these tests themselves: what could not run is listed in their last line and never counted as passed",
    ),
    Row(
        ("NeMo-RL#3613", "NeMo-RL#3187", "NeMo-RL#4178"),
        ((NODES + "nemo_rl_3613_whatever_dies_together_comes_back_together", "a_dead_holder_is_waited_for"),),
    ),
    Row(("prime-rl#2028",), ((NODES + "prime_rl_2028_nothing_outlives_its_supervisor", "orphans_live_on"),)),
    Row(
        ("training-gym#307",),
        ((NODES + "training_gym_307_a_cold_engine_is_neither_killed_nor_called_dead", "a_compiling_engine_hangs"),),
    ),
    Row(
        ("sglang#8115",),
        ((NODES + "sglang_8115_health_asks_the_database_and_says_what_is_wrong", "health_is_always_200"),),
    ),
    Row(("SkyRL#284",), ((NODES + "skyrl_284_a_port_is_taken_again_after_a_crash_and_never_shared", "ports_are_shared"),)),
    Row(
        ("SkyRL#1216",),
        ((NODES + "skyrl_1216_what_an_engine_has_started_ends_with_its_worker", "engines_outlive_their_worker"),),
    ),
    Row(
        ("EasyR1#97",),
        (
            (
                NODES + "easyr1_97_every_attempt_has_a_name_of_its_own_and_knows_whom_it_replaces",
                "attempts_share_their_name",
            ),
        ),
    ),
)
"""Nodes and processes that die, and what they leave behind."""

THREADS = (
    LOST_OR_DOUBLED + TOO_OLD + QUEUES + CODE_AND_SANDBOXES + FAILED_AS_ZERO + HANGS_AND_SILENCE + DEATHS_AND_LEFTOVERS
)


def tests_of(mutant: str) -> list[str]:
    """The tests that must catch a mutant."""
    return [test for row in THREADS for test, name in row.cases if name == mutant]


def mutants_used() -> list[str]:
    """Every mutant of the table, once."""
    return list(dict.fromkeys(name for row in THREADS for _, name in row.cases))
