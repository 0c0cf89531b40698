"""Which public threads apply, which test covers each, and which defect shows that the test would have caught it."""

from __future__ import annotations

from mutants.thread_rows import (
    HANGS,
    LEDGER,
    LOST_OR_DOUBLED,
    NODES,
    QUEUES,
    REWARDS,
    SANDBOXES,
    TOO_OLD,
    Row,
)

CODE_AND_SANDBOXES = (
    Row(
        ("rllm#710",),
        ((REWARDS + "rllm_710_an_episode_that_is_cut_is_not_a_finished_one", "a_cut_is_logged_as_an_end"),),
    ),
    Row(
        ("rllm#915",),
        ((SANDBOXES + "rllm_915_no_zombie_is_left_by_checks_that_were_killed", "what_was_killed_is_not_waited_for"),),
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
                SANDBOXES + "verl_7853_a_program_that_raises_earns_nothing_where_nothing_is_expected",
                "an_exception_with_exit_code_0_answers_nothing_rightly",
            ),
        ),
    ),
    Row(
        ("verl#3478", "verl#6978"),
        (
            (SANDBOXES + "verl_3478_jobs_beyond_the_slots_wait_for_their_turn", "a_full_sandbox_refuses"),
            (REWARDS + "verl_6978_a_tools_broken_sandbox_is_not_text_for_the_model", "a_tools_failure_is_its_answer"),
        ),
    ),
    Row(
        ("SvS#3", "code-r1#7"),
        ((SANDBOXES + "svs_3_a_check_that_ignores_every_signal_is_killed", "checks_are_never_killed"),),
    ),
    Row(
        ("open-r1#546",),
        ((SANDBOXES + "open_r1_546_a_run_out_of_time_says_so", "a_timeout_is_ok"),),
    ),
    Row(
        ("evalplus#5",),
        ((SANDBOXES + "evalplus_5_a_wall_clock_that_ran_out_on_a_busy_host_fails_no_program", "every_timeout_is_the_programs"),),
    ),
    Row(
        ("SWE-smith#24", "SWE-bench#620"),
        (
            (REWARDS + "swe_smith_24_tests_that_did_not_run_are_not_passed", "none_of_none_is_all"),
            (SANDBOXES + "swe_bench_620_a_printed_line_is_no_passed_test", "a_printed_line_is_believed"),
        ),
    ),
    Row(
        ("codewars.com#3083", "codewars.com#2448", "codewars-runner-cli#279", "codewars-runner#321"),
        (
            (SANDBOXES + "codewars_2448_an_object_that_equals_everything_is_wrong", "an_objects_own_comparison_decides"),
            (SANDBOXES + "codewars_runner_321_leaving_early_passes_nothing", "exit_code_0_is_success"),
        ),
    ),
    Row(
        ("agent-os#2372", "rbx#807"),
        (
            (SANDBOXES + "agent_os_2372_a_run_ended_by_its_memory_limit_is_not_ok", "out_of_memory_is_ok"),
            (SANDBOXES + "rbx_807_memory_wins_whichever_limit_was_polled_first", "the_limit_polled_first_wins"),
        ),
    ),
    Row(
        ("verifiers#399", "verifiers#1920", "verifiers#1750", "verifiers#1412"),
        (
            (SANDBOXES + "verifiers_399_closing_a_sandbox_ends_what_runs_in_it", "jobs_outlive_their_sandbox"),
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
            (SANDBOXES + "autocodebenchmark_1_a_sandbox_server_is_replaced_before_it_grows", "one_server_for_ever"),
            (SANDBOXES + "codex_38909_a_chain_of_forks_ends_at_the_process_limit", "processes_are_not_counted"),
        ),
    ),
    Row(
        ("firejail#1956", "firejail#380", "bubblewrap#313", "bubblewrap#798"),
        (
            (SANDBOXES + "firejail_1956_a_backend_that_does_not_contain_is_never_taken", "installed_is_good_enough"),
            (SANDBOXES + "bubblewrap_313_a_program_is_not_root_inside", "programs_run_as_who_started_them"),
            (
                SANDBOXES + "bubblewrap_798_a_bound_that_cannot_be_set_blames_no_program",
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
        ((SANDBOXES + "slime_1582_a_hiccup_of_the_sandbox_costs_neither_the_run_nor_the_verdict", "a_hiccup_is_final"),),
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
