"""The longest cases of tests that run over many models or seeds: left to ``make long``.

`make test` keeps cases of every such test; here are the variants that take longest and add least.
And the files that come first.
"""

from __future__ import annotations

import re

_CASES = (
    r"\[densenet121(-\w+)?\]",  # in every test over the zoo
    # All of the zoo is captured, and trained in one process; of what else is asked of each of its
    # models, these take longest and are much like others.
    r"(codegen|costmodels|profiling|passes|pricing|runtime)/\S+\[(transformer|bart|whisper)\]",
    r"test_replay\.py::\S+\[(transformer|bart|whisper)\]",
    r"test_capture_zoo\.py::test_evaluation\w+\[(transformer|bart|whisper|mixtral|mamba)\]",
    r"verification/test_single_process\.py::test_(in_one_process|over_gloo)\[(transformer|vit|llama|bert|mamba)-2\]",
    r"verification/test_sharded_equality\.py::test_in_this_process\[(t5|mixtral|bert|llama|vit|resnet50)\]",
    r"verification/test_sharded_equality\.py::test_over_gloo\[(t5|mixtral|bert|llama|vit)\]",
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
    r"runtime/queues/test_ranks\.py::test_the_command_line_goes_on_without_a_killed_rank",
    r"runtime/queues/test_ranks\.py::test_a_killed_copy_is_missed_by_nobody\[[23]",
    r"runtime/queues/test_auc\.py",
    r"test_lower\.py::test_many_random_programs",
    r"test_memory_saved\.py::test_many_random_models",
    r"verification/test_random_programs\.py::test_more_random_programs",
    r"test_crowd\.py::test_against_a_machine_at_length",
    r"weights/test_zoo\.py::\S*\[(transformer|llama|mamba|bert)\]",
    r"test_stream_ranks\.py::test_every_mode_has_the_emulators_bits\[(4-mlp|2-gpt|4-gpt)\]",
    r"test_soak\.py::test_a_planted_leak_is_found\[(threads|descriptors)\]",
    r"emulator/test_modes\.py::test_gpt\[\S+-[23]-\d-",
    r"emulator/test_modes\.py::test_mlp\[\S+-3-\d-",
    r"emulator/test_modes\.py::test_(nadam|double)\w+\[gpt-[23]-",
    r"elastic/test_runs\.py::test_a_(rank|machine)_that",
    r"heartbeat/test_restarts\.py::test_two_restarts\[(own|standalone)\]",
    r"verification/test_sharded_equality\.py::test_over_gloo\[resnet50\]",
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
    r"fuzz/test_readers_fuzzed\.py::test_changed_files\[(reproducer|profile-rows)-1000\]",
    r"test_measured\.py::test_little_time_is_of_no_class\[(clip|mamba|resnet50|llama)\]",
    r"codegen/test_precision\.py::test_the_zoo_under_autocast\[transformer\]",
    r"diagnostics/test_real_runs\.py::test_the_right_rank_is_named\[stop-2",
    r"runtime/test_nccl_order\.py::test_every_(schedule_on_eight|schedule_in_proc|asynchronous)",
    r"runtime/test_nccl_order\.py::test_queues",
)
_LONG = re.compile("|".join(_CASES))

# Files that take longest come first, so that both workers of `make test` end together; those that
# start many processes between those that do not.
_FIRST = (
    "chaos/test_steps.py",
    "passes/rules/test_soundness.py",
    "verification/test_sharded_equality.py",
    "chaos/test_streams.py",
    "capture/test_capture_zoo.py",
    "profiling/test_rehearsals.py",
    "verification/test_single_process.py",
    "runtime/heartbeat/test_restarts.py",
    "fuzz/test_readers_fuzzed.py",
    "cli/test_models.py",
    "fuzz/test_hostile_files.py",
    "diagnostics/test_real_runs.py",
    "codegen/test_random_splits.py",
    "elastic/test_runs.py",
    "runtime/test_schedules_equality.py",
    "profiling/test_forms.py",
    "passes/rules/test_coverage.py",
    "profiling/test_session.py",
    "planner/test_stage_graphs.py",
    "runtime/test_failures.py",
    "capture/test_replay.py",
    "cli/test_profile.py",
    "runtime/test_compiled.py",
    "cli/test_run.py",
    "repository/test_examples.py",
    "repository/test_readme.py",
)
_TURNS = {f"tests/{name}": number for number, name in enumerate(_FIRST)}


def is_long(case: str) -> bool:
    """Whether a test case, by its full name, is one of the longest."""
    return _LONG.search(case) is not None


def turn(case: str) -> int:
    """When a test case's file comes: the longest first, all others as they are found."""
    return _TURNS.get(case.partition("::")[0], len(_TURNS))
