"""The longest cases of tests that run over many models or seeds: left to ``make long``.

`make test` keeps cases of every such test; here are the variants that take longest and add least.
Of tests over all combinations of some parameters it keeps each value of each parameter. And the
files that come first.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

# Models of the zoo that take longest and are much like others.
_OTHERS = r"(transformer|t5|bart|whisper|clip|bert|distilbert|mamba|resnet\w*|llama|vit)\b"

_CASES = (
    r"diagnostics/test_real_runs\.py::test_the_right_rank",
    r"tests/test_rng\.py::test_one_kernel_keeps",
    r"heartbeat/test_watch\.py::test_a_rank_that_cannot",
    r"training_run/test_one_writer\.py::test_a_process_that_wakes",
    r"verification/test_sharded_equality\.py::test_evaluation_and",
    r"interop/test_engines\.py::test_option_names\S+unlike_copies",
    r"runtime/test_partial_batches\.py::test_dropout_draws",
    r"test_soak\.py::test_steps_leave\S+pipeline",
    r"heartbeat/test_disagreements\.py::test_every_rank\S+reads",
    r"schedule/test_registered_schedules\.py::test_diff",
    r"verification/test_single_process\.py::test_without_dropout",
    r"planner/test_context_parallelism\.py::test_generation",
    r"runtime/test_shared_memory\.py::test_many_steps",
    r"passes/test_autocast_devices\.py::test_recorded",
    r"profiling/test_memory\.py::test_what_a_process",
    r"fuzz/test_readers_fuzzed\.py::test_changed_files\[(annotations-toml|checkpoint-headers|nccl|paddle|program-manifest|recording-compared)",
    r"costmodels/test_registered_models\.py::test_an_installed",
    r"integrations/test_(accelerate|transformers)\.py::test_(what_the_loop|two_ranks)",
    r"launch/test_start\.py::test_a_second_interrupt",
    r"objective/test_objective\.py::test_(a_graph_of_one_size|\w+\[(distillation|masked_pixels|rows_then_batch)\])",
    r"passes/test_(experts_lowered|prepare_zoo|propagate_laws)\.py::test_(mixtral_over_gloo|batch_statistics|laws)",
    r"planner/test_constraints\.py::test_each_constraint_is_kept_or_refused\[tensor",
    r"planner/test_context_parallelism\.py::test_(a_plan_applied|constraints_on|sequences_as|over_gloo)",
    r"planner/test_context_parallelism\.py::test_(in_this_process\[gpt2-context 4|estimates_agree)",
    r"planner/test_(degrees|plan_laws)\.py::test_(no_mesh_given\S+|more_memory)",
    r"planner/test_expert_parallelism\.py::test_experts_are_distributed",
    r"planner/test_planning_laws\.py::test_a_case_of_unequal_links",
    r"planner/test_recompute_plans\.py::test_a_fixed_mode\S+\[selective",
    r"planner/test_replicated_stages\.py::test_(never_slower\S+kinds0|what_if_says)",
    r"planner/test_stage_graphs\.py::test_numbers_over_gloo\[branches",
    r"pricing/test_placements\.py::test_(problems_are|the_zoo_runs)",
    r"profiling/test_(memory|unevenness)\.py::test_what_(a_process\S+True-128|was_lost\S+uneven0)",
    r"profiling/test_(processes|session)\.py::test_(ranks_die|the_second_time)",
    r"repository/test_examples\.py::test_the_recommender_learns",
    r"asynchronous/test_stream_ranks\.py::test_a_rank_that_drains",
    r"heartbeat/test_calls\.py::test_a_busy_process",
    r"heartbeat/test_watch\.py::test_a_stopped_rank\S+\[True",
    r"queues/test_(ranks|tied_parameters)\.py::test_(the_numbers\S+counts0|sparse)",
    r"runtime/test_failures\.py::test_a_(killed\S+\[False|stopped\S+\[True)",
    r"runtime/test_large_tables\.py::test_a_table\S+\[dp",
    r"runtime/test_sparse_rows\.py::test_gloo\[data-False",
    r"runtime/test_tensor_statistics\.py::test_(modules|statistics\S+pipeline)",
    r"runtime/test_token_generation\.py::test_(a_model_of|every_layout\S+pipeline)",
    r"runtime/test_weight_average\.py::test_over_gloo\[zero",
    r"training_run/test_(kept_ranks|one_writer)\.py::test_(a_rank\S+stash-1|the_launcher_has)",
    r"training_run/test_signals\.py::test_a_second\S+SIGHUP",
    r"schedule/test_verify\.py::test_verdict_is",
    r"solver/test_recompute\.py::test_more_modes",
    r"topology/test_orders\.py::test_two_hundred\S+\[0",
    r"verification/test_sharded_equality\.py::test_over_gloo\[recommender",
    r"verification/test_single_process\.py::test_over_gloo\[mixtral",
    r"planner/test_recompute_plans\.py::test_only_stages_that",
    r"cli/test_models\.py::test_(training_on_two|a_process_that)",
    r"runtime/test_compiled\.py::test_inductor",
    r"heartbeat/test_watch\.py::test_short_pauses",
    r"runtime/test_run_loggers\.py::test_ranks_write",
    r"planner/test_expert_parallelism\.py::test_never_slower",
    r"training_run/test_lost_disk\.py::test_a_launcher",
    r"planner/test_replicated_stages\.py::test_slow_ones",
    r"profiling/test_processes\.py::test_a_hanging",
    r"profiling/test_rehearsals\.py::test_plans_of_one",
    r"test_soak\.py::test_a_planted_leak_is_found\[objects\]",
    r"planner/test_context_parallelism\.py::test_(generation_through|reported)",
    r"schedule/test_registered_schedules\.py::test_package",
    r"repository/test_contributing_diffs\.py::test_the_diff_adds_a_cost",
    r"test_token_generation\.py::test_every_layout\w+\[(tensor|zero 3)\]",
    r"test_tensor_statistics\.py::test_statistics_are_those\w+\[(tensor|zero 1)\]",
    r"test_metrics\.py::test_metrics_are_those\w+\[data\]",
    r"test_context_parallelism\.py::test_(long_sequences|estimates\S*\[2|over_gloo\[pipeline)",
    r"test_context_parallelism\.py::test_in_this_process\[mixtral-(?!context 2\])",
    r"test_context_parallelism\.py::test_in_this\w+\[gpt2-(context 2|zero|data 2 x context 2\])",
    r"runtime/test_stand_in\.py::test_every_program_like_the_cpu",
    r"\[densenet121(-\w+)?\]",  # in every test over the zoo
    # Of what is asked of each model of the zoo, these take longest and are much like others.
    r"(codegen|costmodels|profiling|passes|pricing|runtime)/\S+\[(transformer|bart|whisper)\]",
    r"test_replay\.py::\S+\[(transformer|bart|whisper)\]",
    r"test_calls_in_stream\.py::test_a_call_in_the_stream_is_one_after_a_flush\[spectrain\]",
    r"test_capture_zoo\.py::test_evaluation\w+\[(transformer|bart|whisper|mixtral|mamba)\]",
    r"verification/test_single_process\.py::test_(in_one_process|over_gloo)\[(transformer|vit|llama|bert|mamba)-2\]",
    r"verification/test_sharded_equality\.py::test_in_this_process\[(t5|mixtral|bert|llama|vit|resnet50)-",
    r"verification/test_sharded_equality\.py::test_over_gloo\[(t5|mixtral|bert|llama|vit)-",
    r"verification/test_sharded_equality\.py::test_in_float64\[(t5|bert|llama|vit)-",
    r"verification/test_single_process\.py::test_in_one_process\[(t5|clip|whisper|bart)-2\]",
    r"verification/test_single_process\.py::test_without_dropout\[t5\]",
    r"test_prepare_zoo\.py::test_every_bit\[(t5|bart|transformer)\]",
    r"test_split_models\.py::test_all_models\[(t5|transformer)\]",
    r"test_evaluation\.py::test_zoo\[t5\]",
    r"test_blocks\.py::test_models\[(t5|resnet50)\]",
    r"test_stages\.py::test_every_stage_of_a_model_is_timed\[(t5|unet|side_mask)\]",
    r"test_replay\.py::test_the_zoo_with_as_much_repeated_as_can_be\[(clip|mixtral|mamba|t5)\]",
    r"test_measured\.py::test_little_time_is_of_no_class\[(t5|bart|transformer)\]",
    r"test_schedules_equality\.py::test_whole_zoo\[(t5|transformer|clip)\]",
    r"test_compiled\.py::test_equal_layers_share_a_graph\[(recompute|split|data|tensor)",
    r"test_stage_boundaries\.py::test_(training|predicted)\S+\[(mixtral|vit|gpt2)",
    r"test_stage_boundaries\.py::test_the_hidden\S+\[(mixtral|vit)-4",
    r"test_kernel_counts\.py::\S+\[(llama|mixtral|gpt2)\]",
    r"test_group_experts\.py::test_models\[NemotronH",
    r"test_experts_lowered\.py::test_mixtral_over_gloo\[dp=2,ep=2-",
    r"test_published\.py::test_the_best_of_all_assignments\S*\[op_resnet50_inference\]",
    r"test_rehearsals\.py::test_a_plan_that_cannot_be_run_is_left_out_and_told",
    r"cli/test_profile\.py::test_unlike_devices_under_torchrun",
    r"test_bench\.py::test_under_torchrun",
    r"test_random_splits\.py::test_more_exact",
    r"test_real_runs\.py::test_the_right_rank_is_named\[kill-1",
    r"repository/test_examples\.py::test_all_axes_under_torchrun",
    r"interop/test_engine_readers\.py::test_plan_from_prices",
    r"report/test_page_script\.py::test_nothing_overlaps\S*\[1280",
    r"report/test_page_script\.py::test_blocks_of_large",
    r"runtime/queues/test_ranks\.py::test_the_command_line_goes_on_without_a_killed_rank",
    r"runtime/queues/test_ranks\.py::test_a_killed_copy_is_missed_by_nobody\[[23]",
    r"runtime/queues/test_auc\.py",
    r"test_lower\.py::test_many_random_programs",
    r"test_memory_saved\.py::test_many_random_models",
    r"verification/test_random_programs\.py::test_more_",
    r"test_crowd\.py::test_against_a_machine_at_length",
    r"weights/test_zoo\.py::\S*\[(transformer|llama|mamba|bert)\]",
    r"test_stream_ranks\.py::test_every_mode_has_the_emulators_bits\[(4-mlp|2-gpt|4-gpt)\]",
    r"training_run/test_one_writer\.py::test_commands_started_together",
    r"test_soak\.py::test_a_planted_leak_is_found\[(threads|descriptors)\]",
    r"emulator/test_traces\.py::test_the_emulator_follows\[\S+-[28]\]",
    r"emulator/test_modes\.py::test_gpt\[\S+-[23]-\d-",
    r"emulator/test_modes\.py::test_mlp\[\S+-3-\d-",
    r"emulator/test_modes\.py::test_(nadam|double)\w+\[gpt-[23]-",
    r"elastic/test_runs\.py::test_a_(rank|machine)_that",
    r"heartbeat/test_restarts\.py::test_two_restarts\[(own|standalone)\]",
    r"verification/test_sharded_equality\.py::test_over_gloo\[resnet50-",
    r"emulator/test_cli\.py::test_the_page_shows_what_its_commands_print",
    r"test_planned\.py::test_every_stage\S+\[gpt2-constraints[46]\]",
    r"test_published\.py::test_any_is_never\S+\[(op_bert_l-6|layer_resnet50)_",
    r"test_published\.py::test_the_best_of_all\S+\[layer_bert24_",
    r"test_session\.py::test_the_best_plan_is_known_as_a_whole\[tp=2\]",
    r"test_readers_fuzzed\.py::test_changed_files\[(.+-5000|reproducer-pipeline-\S+)\]",
    r"test_placements\.py::test_the_zoo_runs_with_what_is_chosen_under_tight_memory\[llama\]",
    r"chaos/test_streams\.py::test_kills_change_no_number\[mlp-pipeline4-async-2\]",
    r"chaos/test_steps\.py::test_kills_change_no_number\[gpt-pipeline4-sync-0\]",
    r"test_disagreements\.py::test_every\w+\[(drop|updates|saves|determ|failing|fits|evaluates)",
    r"test_disagreements\.py::test_an_exception\w+\[(trains|failing optimizer, sharded)",
    r"planner/test_constraints\.py::\S+\[(virtual stages|searched mesh|faster of both)\]",
    r"elastic/test_runs\.py::test_(an_asynchronous_run_scaled|a_number_without)",
    r"heartbeat/test_restarts\.py::test_two_restarts\[c10d\]",
    r"test_one_plan\.py::test_(where_rank_0_owns|static_rendezvous)",
    r"profiling/test_session\.py::test_(without_time|crowding)",
    r"test_coverage\.py::test_every_op_of_the_zoo_has_a_rule\[(mixtral|llama|mamba|t5|bart)\]",
    r"verification/test_single_process\.py::test_in_one_process\[(gpt2|mixtral|distilbert|resnet50|unet)-2\]",
    r"verification/test_single_process\.py::test_in_one_process\[(t5|bart|whisper)-4\]",
    r"test_objective\.py::test_sums_of_losses",
    r"fuzz/test_readers_fuzzed\.py::test_changed_files\[(reproducer|profile-rows)-250\]",
    r"fuzz/test_hostile_files\.py::test_under_an_audit_hook\[300-",
    r"test_measured\.py::test_little_time_is_of_no_class\[(clip|mamba|resnet50|llama)\]",
    r"codegen/test_precision\.py::test_the_zoo_under_autocast\[transformer\]",
    r"diagnostics/test_real_runs\.py::test_the_right_rank_is_named\[stop-2",
    r"runtime/test_nccl_order\.py::test_every_(schedule_on_eight|schedule_in_proc|asynchronous)",
    r"runtime/test_nccl_order\.py::test_queues",
    # What is asked of every model of the zoo is asked of GPT-2, Mixtral, a UNet, an LSTM and
    # the small models; of the others only that they are captured and train in one process.
    rf"(codegen|costmodels|profiling|passes|planner|pricing|report|runtime)/\S+\[(\S+-|chain_)?{_OTHERS}",
    rf"capture/test_replay\.py::\S+\[{_OTHERS}",
    rf"capture/test_capture_zoo\.py::test_evaluation\w+\[{_OTHERS}",
    rf"verification/test_single_process\.py::test_(without_dropout|over_gloo|clipping\w+)\[{_OTHERS}",
    r"verification/test_single_process\.py::test_in_one_process\[(resnet50|clip|transformer|mamba)-4\]",
    r"verification/test_single_process\.py::test_in_one_process\[(bert|distilbert|llama)-4\]",
    r"test_coverage\.py::test_flops_of_the_zoo_can_be_cut",
    r"test_step_time\.py::test_every_report\S+\[(chain_[^l]|unlike|mesh_(data|experts|zero_[02-9])|free_)",
    r"test_group_experts\.py::test_models\[(Glm|GptOss|Qwen|Ernie)",
    r"test_models_without_data\.py::test_the_large_ones\S+\[gpt3",
    r"capture/test_examples\.py::test_transformers\[T5",
    # Profiling on processes: one session, trial run, stage and probe of each kind remain.
    r"test_rehearsals\.py::test_profiling_runs_the_plans_that_may_be_best",
    r"test_session\.py::test_(contention_of_several|under_a_quota)",
    r"test_forms\.py::test_a_session_measures_replicas",
    r"test_planned\.py::test_every_stage\S+\[(unet|gpt2-constraints[1-9])",
    r"test_(waking|unevenness)\.py::test_a_ring_of_processes",
    r"test_unevenness\.py::test_what_was_lost_is_found\[uneven[12]",
    r"test_bench\.py::test_on_this_machine",
    r"cli/test_profile\.py::test_the_stages_of_a_plan",
    r"profiling/test_memory\.py::test_what_a_process\S+\[False",
    r"profiling/test_processes\.py::test_the_rank_that_failed_first\S+\[(slowly|raise)",
    # Faults on real processes: one of each kind remains.
    r"chaos/test_steps\.py",
    r"cli/test_models\.py::test_(processes_that_fail|verify_a_mesh)",
    r"cli/test_run\.py::test_a_signal_to_the_launcher",
    r"test_kept_ranks\.py::test_a_rank_that_is_killed\[epochs",
    r"test_failures\.py::test_a_killed_rank_ends_the_others\[True",
    r"heartbeat/test_restarts\.py::test_two_restarts\[static",
    r"test_disagreements\.py::test_every\w+\[catches",
    r"test_disagreements\.py::test_an_exception\w+\[failing optimizer\]",
    r"heartbeat/test_watch\.py::test_(a_stopped_rank\S+\[False|a_rank_that_fails_alone)",
    r"test_one_plan\.py::test_started_again",
    r"queues/test_ranks\.py::test_a_killed_copy",
    r"test_real_runs\.py::test_the_right_rank_is_named\[(raise|script)",
    r"test_heap\.py::test_a_rank_that_keeps",
    r"test_hostile_files\.py::test_under_an_audit_hook\[plan",
    r"launch/test_start\.py::test_a_signal_is_passed_on",
    r"test_torchrun\.py::test_the_wrong_number",
    # Variants of one test.
    r"test_sparse_rows\.py::test_tables\S+\[[^\]]+-False",
    r"test_sparse_rows\.py::test_tables\S+\[(data and|rows sent,)",
    r"test_sharded_equality\.py::test_evaluation_and_checkpoints\[(pipeline|zero)",
    r"planner/test_constraints\.py::\S+\[(free|asynchronous on|virtual stages on|split)",
    r"test_random_splits\.py::test_any_models_are_equal",
    # Of loops of other tools a run in one process and one on two ranks remain.
    r"integrations/test_transformers\.py::test_(arg|the_best|check|drop|a_loss|eval|bfl|two_ranks_t|ranks)",
    r"integrations/test_accelerate\.py::test_(the_loop|states|two_ranks)",
    r"integrations/test_lightning\.py::test_(losses\S+value|check|drop|two_ranks)",
    r"integrations/test_(peft|example_scripts)\.py::test_(adapters|the_)",
    r"test_weight_average\.py::test_(equals\S*\[(one|tensor|zero 1|zero 3)|over_gloo\[pipe)",
    r"interop/test_pipelining\.py::test_the_example_learns",
    r"test_overlay\.py::test_many_ranks",
    r"test_branch_solvers\.py::test_every_kind_has_its_best_graph",
    r"test_lanes_recompute\.py::test_bits_of_whole_backwards\S+\[zero3",
    r"test_joint_tensor\.py::test_more_layers",
    r"pricing/test_sums_ranks\.py::test_packed_gradients",
    r"test_lower\.py::test_random_programs",
    r"chaos/test_streams\.py",
    r"test_capture_zoo\.py::test_training\w+\[(transformer|clip|whisper|bart|distilbert)\]",
    r"test_experts_lowered\.py::test_mixtral\[(data|one axis)( and (inner|expert))?-True",
    r"test_experts_lowered\.py::test_mixtral\[data-False",
    r"test_placements\.py::test_what_is_chosen\S+\[(layer|attention|fused)-dp",
    r"codegen/test_blocks\.py::test_models\[gpt2",
    r"test_forms\.py::test_forms\S+\[dp=2-(mixtral|gpt2)",
    r"queues/test_queues\.py::\S+\[(counts[0134]-lose|[0-9]+-([3579]|1[0-9])\])",
    r"queues/test_tied_parameters\.py::\S+\[(2-counts|[0-9.]+-counts[1-4]|None-counts[234]|[1-9]+-\d+\])",
    r"planner/test_degrees\.py::test_no_mesh_given\S+\[(1e-06-100000000\.0|0\.03)",
    r"test_replicated_stages\.py::test_never_slower\S+\[kinds[12]",
    r"test_stage_graphs\.py::test_(branches|numbers_in_one)\S+\[branches",
    r"test_step_simulation\.py::test_a_plan_is_simulated\S+\[gpipe",
    r"test_kept_alone\.py::test_a_run_that_was_(killed|stopped)\S+\[(workers|delayed|early|cycle|plateau)",
    r"test_position\.py::test_it_goes_on\[(1|3|5|8)-workers",
    r"test_rounding\.py::test_other_models\S+\[dtype1",
    r"test_schedules_equality\.py::test_every_schedule\[gpt2-(gpipe|breadth|1f1b)",
    r"test_resharding\.py::test_lanes_take\S+-sgd\]",
    r"test_readers_fuzzed\.py::test_changed_files\[(\w+-(arrays|dictionaries|constants|index|offsets|rest|csv))-",
    r"test_orders\.py::test_two_hundred\S+\[[1-9]",
    r"test_joint_dp\.py::test_five_hundred\S+\[[1-3]",
    r"test_measured\.py::test_little_time",
    r"test_branch_solvers\.py::test_(the_best_of_all\[\d\d|eight)",
    r"test_portfolio\.py::test_large_problems\S+\[[^\]]*[1-3]\]",
    r"cli/test_trace\.py::test_on_processes",
    r"test_copies_lost_machine\.py::test_a_run_goes_on_from_memory",
    r"profiling/test_(meeting|stages)\.py::test_(processes_meet|sizes_without\S+\[gpt2)",
    r"profiling/test_rehearsals\.py::test_plans_that_are_held",
    r"test_emit\.py::test_another_process",
    r"elastic/test_runs\.py::test_killed_scaled",
    r"queues/test_ranks\.py::test_a_run_of_the_command_line",
    r"test_sharded_equality\.py::test_in_float64\[gpt2",
    r"planner/test_constraints\.py::\S+\[asynchronous\]",
    r"test_one_plan\.py::test_what_rank_0_cannot_plan",
    r"repository/test_examples\.py::test_all_axes_trains",
    r"test_replay\.py::test_rows_and_lengths_free",
    r"test_unequal_copies\.py::test_no_round_deadlocks\[\d{2,}",
    r"test_versions\.py::test_memory_is_that_of_the_table\[\S+-4-[0-2]",
    r"emulator/test_modes\.py::test_(gpt|mlp)\[\S+-4-2-adamw",
    r"test_solvers_agree\.py::test_(five|three)_hundred\S+\[[12]",
    r"capture/test_examples\.py::test_transformers\[(BertFor(Tok|Seq|Pre)|GPT2Model|ViTModel)",
    r"test_sparse_rows\.py::test_kinds_of_bags\[\S+-options[12]",
    r"test_html\.py::test_large_plans\S+\[(64|128)",
    r"test_resharding\.py::test_lanes_take\S+\[(zero-1|zero-3|tp|dp|pipeline)-adamw",
    r"test_split_models\.py::test_all_models\[mixtral",
    r"queues/test_(memory|checkpoints)\.py::test_(no_copy\S+\[2|another_goes_on\S+-[03]-)",
    # Plans that take longest: `golden_plans.py --check` and `make long` compare all.
    r"test_golden_plans\.py::\S+\[(unlike_wide|free_wide_two_hosts|free_gpt2|mesh_experts)",
    r"test_step_time\.py::test_every_report\S+\[(async_free|mesh_bf16|like_copies|forbidden_data)",
    r"test_replicated_stages\.py::test_wishes\S+\[wish[023]",
    r"test_replicated_stages\.py::test_copies_are_left_alone",
    r"planner/test_constraints\.py::test_each\S+\[(data parallel|one rank per stage)\]",
    r"planner/test_degrees\.py::test_no_mesh_given\S+\[1e-06-10000000000",
    # Larger models where small ones take the same way.
    r"test_sharded_equality\.py::test_(over_gloo\[gpt2|in_this_process\[gpt2-others)",
    r"test_schedules_equality\.py::test_whole_zoo\[(mixtral|vit)",
    r"test_stage_boundaries\.py::test_the_hidden\S+\[(gpt2-2|mixtral|vit)",
    r"test_single_process\.py::test_in_one_process\[(vit|unet|mixtral)-4",
    r"capture/test_capture_zoo\.py::test_training\w+\[(bert|llama)",
    r"capture/test_capture_zoo\.py::test_names\w+\[(transformer|distilbert|bart)",
    r"capture/test_replay\.py::\S+\[vit",
    r"test_forms\.py::test_forms_of_the_zoo\S+\[dp=2,tp=2-mixtral",
    r"codegen/test_blocks\.py::test_models\[lstm",
    r"test_group_experts\.py::test_models\[Mixtral-options1",
    r"test_autocast_devices\.py::test_recorded\S+\[(vit|mixtral)",
    r"test_huggingface\.py::test_trained_at_two_ranks\S+\[1073741824",
    r"test_large_tables\.py::test_a_table_that_no\S+\[(tp=2)?\]",
    r"planner/test_stage_graphs\.py::test_numbers_over_gloo\[towers",
    r"repository/test_examples\.py::test_all_axes_is_what_it_says",
    # A second case of what one case shows.
    r"planner/test_context_parallelism\.py::test_(zero_over\S+\[2|keys_that\S+-True\]|fixed\S+\[0\.0)",
    r"planner/test_context_parallelism\.py::test_in_this_process\[gpt2-data 2 x context 2, zero 3",
    r"planner/test_degrees\.py::test_far_meshes\S+\[options[12]",
    r"planner/test_expert_parallelism\.py::test_what_the_plan_reports",
    r"planner/test_plan_laws\.py::test_(reported_decisions|no_mesh_is)\S+\[6\]",
    r"test_stream_ranks\.py::test_basis_rotation\S+\[False",
    r"test_capture_zoo\.py::test_(names\w+\[(t5|clip)|inputs\w+\[(transformer|resnet50))",
    r"test_weight_average\.py::test_an_average_of_a_skipped_first_update_over_gloo",
    r"solver/test_solvers_agree\.py::test_many_unequal_devices",
    r"test_joint_ilp\.py::test_forty_blocks",
    r"test_joint_dp\.py::test_large_models\S+\[devices3",
    r"runtime/test_slow_ranks\.py::test_pauses",
    r"passes/test_(prepare_zoo|mark_gradients)\.py::test_(every_bit|gradients_and\w+)\[mixtral",
    r"report/test_(html|step_time)\.py::\S+\[(2-9000|async_nadam|fixed_layout)",
    r"pricing/test_(memory_peak|joint_tensor)\.py::test_(the_peak\S+\[full|a_block\S+\[gpt2-4)",
    r"interop/test_pipelining\.py::test_torchs\S+\[vision",
    r"test_calls_in_stream\.py::test_a_call\S+\[pipemare",
    r"profiling/test_processes\.py::test_the_rank_that_failed_first\S+\[die",
    r"emulator/test_modes\.py::test_double\S+\[2bw-gpt",
    r"planner/test_time_to_loss\.py::test_the_choice\S+\[steps1",
    r"test_kept_alone\.py::test_a_run_that_was_killed\S+\[plain",
    # Processes: one of each kind remains.
    r"test_one_plan\.py::test_under_torchrun",
    r"test_soak\.py::\S+\[(data|memory)",
    r"test_partial_batches\.py::test_dropout_draws\S+\[3",
)
# Of tests over all combinations of some parameters, those that take longest.
# Tests over many alike cases: of these every third remains.
_SAMPLED = (
    r"fuzz/test_readers_fuzzed\.py::test_changed_files",
    r"objective/test_objective\.py::test_(microbatches_and|coupled_rows_of|graphs_of_one|accumulated)",
    r"verification/test_single_process\.py::test_(over_gloo|in_one_process)",
    r"planner/test_context_parallelism\.py::test_(in_this_process|fixed_length|stripes|strided)",
    r"capture/test_capture_zoo\.py::test_(training_mode|names_and|inputs_describe|evaluation_mode)",
    r"report/test_step_time\.py::test_every_report",
    r"collectives/test_group\.py::test_(a_wait|primitives)",
    r"runtime/test_schedules_equality\.py::",
    r"solver/test_portfolio\.py::test_(the_time_limit|large_problems)",
    r"training_run/test_kept_(alone|ranks)\.py::test_a_(run|signal)",
    r"passes/test_experts_lowered\.py::test_mixtral\[",
    r"capture/test_replay\.py::test_the_zoo",
    r"capture/test_(models_without_data|examples)\.py::test_(a_meta|transformers)",
    r"profiling/test_stages\.py::test_every_stage",
    r"codegen/test_(evaluation|blocks|split_models|precision)\.py::test_(zoo|small_models|all_models|the_zoo)",
    r"solver/schedule/test_schedule_search\.py::test_never_worse",
    r"pricing/test_placements\.py::test_(what_is_chosen|never_worse)",
    r"passes/test_(seen|group_blocks|propagate|complex_writes|state_writes)\.py::test_\w*(captured|zoo|ranks)",
    r"verification/test_random_layouts\.py::test_few",
    r"runtime/test_sparse_rows\.py::test_(gloo|kinds|tables)",
    r"runtime/weights/test_zoo\.py::",
    r"solver/\S+::test_(the_best_of_all|five_hundred|two_hundred|large_models)",
    r"runtime/test_layouts\.py::test_stages_alone",
    r"emulator/test_modes\.py::test_double",
    r"maxload/\S+::test_(one_second|equal_runs)",
    r"runtime/test_partial_batches\.py::test_(sums|training)",
    r"planner/test_(schedule_selection|recompute_plans)\.py::test_a_(requested|fixed)",
    r"rules/test_coverage\.py::test_every_op",
    r"runtime/queues/test_options\.py::test_recomputed",
    r"runtime/test_(zero|several_optimizers|mixed_dtypes|nccl_order)\.py::test_(gloo|trains|replicas|meshes)",
    r"pricing/test_memory_saved\.py::test_every_stage",
)

_COMBINATIONS = (
    r"capture/test_kept_tensors\.py::test_compile_leaves_them",
    r"capture/test_replay_values\.py::test_values_that_leave",
    r"emulator/test_modes\.py::test_(gpt|mlp)$",
    r"emulator/test_late_optimizers\.py::test_every_mode",
    r"objective/test_objective\.py::test_(graphs|coupled_rows)_of_one_size",
    r"passes/test_complex_writes\.py::test_several_ranks",
    r"passes/test_fold_attention_mask\.py::test_causal",
    r"passes/test_state_writes\.py::",
    r"planner/test_recompute_plans\.py::test_a_fixed_mode",
    r"planner/test_replicated_plans\.py::test_the_numbers_of_one",
    r"pricing/test_joint\.py::test_one_rank_for_a_stage",
    r"runtime/asynchronous/test_stream_(checkpoints|instances|refused|ranks)\.py::",
    r"runtime/checkpointing/test_resharding\.py::",
    r"runtime/queues/test_(tied_parameters|options|checkpoints)\.py::",
    r"passes/test_experts_lowered\.py::test_mixtral$",
    r"runtime/test_(accumulation|cuda_graphs|frozen_layers|overlap|virtual_stages|zero)\.py::",
    r"runtime/test_schedules_equality\.py::test_every_schedule",
    r"runtime/training_run/test_position\.py::",
    r"runtime/weight_prediction/test_memory\.py::",
    r"runtime/weight_prediction/test_error_feedback\.py::test_the_oracle",
    r"runtime/weights/test_streams\.py::test_mlp",
    r"verification/test_single_process\.py::test_over_gloo",
    r"verification/test_supported\.py::test_outcome",
    r"runtime/test_ambient\.py::",
    r"runtime/test_divisors\.py::",
    r"runtime/test_layouts\.py::",
    r"runtime/test_mixed_dtypes\.py::",
    r"runtime/test_module_watch\.py::",
    r"runtime/test_nccl_order\.py::test_every_schedule",
    r"runtime/test_optimizer_(instances|probe|ranks|schedules)\.py::",
    r"runtime/test_partial_batches\.py::test_sums_over_counted",
    r"runtime/test_sparse_rows\.py::",
)
_LONG = re.compile("|".join(_CASES))
_THIRDS = re.compile("|".join(_SAMPLED))
_COMBINED = re.compile("|".join(_COMBINATIONS))

# Files that take longest come first, so that both workers of `make test` end together; those that
# start many processes between those that do not.
_FIRST = (
    "verification/test_sharded_equality.py",
    "passes/objective/test_objective.py",
    "planner/test_golden_plans.py",
    "repository/test_readme.py",
    "capture/test_capture_zoo.py",
    "passes/rules/test_soundness.py",
    "cli/test_models.py",
    "runtime/test_partial_batches.py",
    "planner/test_replicated_stages.py",
    "runtime/heartbeat/test_watch.py",
    "verification/test_single_process.py",
    "capture/test_replay.py",
    "runtime/test_sparse_rows.py",
    "cli/test_profile.py",
    "planner/test_constraints.py",
    "pricing/test_placements.py",
    "runtime/queues/test_options.py",
    "codegen/test_precision.py",
    "runtime/queues/test_queues.py",
    "profiling/test_processes.py",
    "runtime/test_schedules_equality.py",
    "runtime/test_stand_in.py",
    "planner/test_planning_laws.py",
    "planner/test_recompute_plans.py",
    "runtime/test_soak.py",
    "passes/test_experts_lowered.py",
)
_TURNS = {f"tests/{name}": number for number, name in enumerate(_FIRST)}


def is_long(case: str) -> bool:
    """Whether a test case, by its full name, is one of the longest."""
    return _LONG.search(case) is not None


def repeated_combinations(cases: Iterable[tuple[str, Any]]) -> Iterator[str]:
    """Yield cases of some tests all of whose parameters' values are in the cases that remain.

    cases: the full names with the values by parameter, None without parameters, as collected. First
    remain those with new values only, then those with a new value. One of the longest cases by its
    name does not count.
    """
    tests: defaultdict[str, list[tuple[str, set[tuple[str, Any]]]]] = defaultdict(list)
    for case, values in cases:
        test = case.partition("[")[0]
        if values and len(values) > 1 and _COMBINED.search(test) and not is_long(case):
            tests[test].append((case, {(name, _identify(value)) for name, value in values.items()}))
    for together in tests.values():
        seen: set[tuple[str, Any]] = set()
        kept = set()
        for case, values in together:
            if seen.isdisjoint(values):
                seen |= values
                kept.add(case)
        for case, values in together:
            if not seen >= values:
                seen |= values
                kept.add(case)
        yield from (case for case, _ in together if case not in kept)


def left_of_samples(cases: Iterable[str]) -> Iterator[str]:
    """Yield the cases, by full name as collected, that ``make test`` leaves of sampled tests."""
    counts: defaultdict[str, int] = defaultdict(int)
    for case in cases:
        test = case.partition("[")[0]
        if _THIRDS.search(case) and not is_long(case):
            if counts[test] % 3:
                yield case
            counts[test] += 1


def _identify(value: Any) -> Any:
    """Return what is equal for equal values of a parameter: the value itself or its id."""
    return value if isinstance(value, (str, int, float, type(None))) else id(value)


def turn(case: str) -> int:
    """When a test case's file comes: the longest first, all others as they are found."""
    return _TURNS.get(case.partition("::")[0], len(_TURNS))
