"""Each case of a fake device is a case of `make gpu-test`, too: which one; some need no device."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RUNTIME = ROOT / "tests" / "runtime"

ENGINE, STEPS = "gpu/test_cuda_engine.py", "gpu/test_graph_steps.py"
WARM_UP, TIERS, FAKE = "gpu/test_cuda_warm_up.py", "gpu/test_cuda_tiers.py", "gpu/test_fake_gpu.py"
ON_GPU = (ENGINE, STEPS, WARM_UP, TIERS, FAKE)

#: It has the same name there.
SAME = ""
#: It is about options, numbers or the fake itself, and needs no device.
HOST = None

#: By module and test of a fake device: the module and the test of a GPU.
CASES: dict[str, dict[str, tuple[str, str] | None]] = {
    "runner/test_graphs.py": {
        "test_sizes_lie_closer_where_they_are_small": HOST,
        "test_steps_are_padded_to_the_next_size_and_give_the_same_tokens": (STEPS, SAME),
        "test_a_plan_with_too_much_work_runs_without_a_graph": (STEPS, SAME),
        "test_mixed_steps_have_no_graph_where_plans_are_of_decoding_steps": HOST,
        "test_small_mixed_steps_are_replayed_where_plans_take_them": (STEPS, SAME),
        "test_tokens_are_chosen_in_graphs_as_outside": (STEPS, SAME),
        "test_tokens_of_drafts_are_chosen_in_graphs": (STEPS, SAME),
        "test_the_kernels_choose_by_columns_that_are_in_place": (
            STEPS, "test_tokens_are_chosen_in_graphs_as_outside",
        ),
        "test_rows_that_a_graph_has_no_logits_for_get_them_outside": (STEPS, SAME),
        "test_a_graphs_tokens_outlast_the_next_replay": (STEPS, SAME),
        "test_prompt_logprobs_come_from_a_graph_too": (STEPS, SAME),
        "test_sizes_of_mixed_steps_lie_above_those_of_decoding": HOST,
        "test_one_pool_and_the_largest_first": (
            ENGINE, "test_graphs_and_overlap_give_the_tokens_without",
        ),
        "test_capturing_is_bounded_in_memory_and_time": (
            STEPS, "test_capturing_is_bounded_in_memory",
        ),
        "test_ranks_capture_the_same_sizes": HOST,
        "test_options_are_checked": HOST,
        "test_graphs_where_there_can_be_none_are_refused": HOST,
        "test_the_triton_backend_replays_forks_beams_and_trees": (
            ENGINE, "test_graphs_and_overlap_give_the_tokens_without",
        ),
    },
    "gpu/test_fake_gpu.py": {
        "test_one_transfer_takes_a_batch_over_and_the_model_waits_for_nothing": (FAKE, SAME),
        "test_rules_and_choice_of_tokens_wait_for_nothing": (FAKE, SAME),
        "test_what_would_wait_is_noticed": HOST,
    },
    "runner/test_warm_up.py": {
        "test_the_choice_of_tokens_compiles_nothing_after_its_warm_up": (
            WARM_UP, "test_requests_of_every_kind_compile_nothing_after_the_start",
        ),
        "test_requests_of_every_kind_compile_nothing_after_the_start": (WARM_UP, SAME),
        "test_products_compile_nothing_after_few_and_many_rows": (
            WARM_UP, "test_deterministic_and_flashinfers_steps_compile_nothing_after_the_start",
        ),
        "test_the_kinds_of_steps": HOST,
        "test_a_plan_names_the_spare_page_only_and_is_valid": HOST,
    },
    "gpu/test_triton_engine.py": {
        "test_every_kind_of_request_gets_the_cpu_backends_tokens": (
            ENGINE, "test_float32_gives_the_cpus_tokens",
        ),
        "test_deterministic_is_handed_to_the_backend_and_the_projections": HOST,
        "test_deterministic_answers_have_the_bits_of_a_cold_lone_request": (
            ENGINE, "test_deterministic_answers_do_not_depend_on_hits",
        ),
        "test_an_8_bit_cache_is_near_the_whole_one": (
            ENGINE, "test_bfloat16_is_as_near_to_float32_as_on_the_cpu",
        ),
        "test_an_8_bit_cache_is_refused_by_name": HOST,
    },
    "gpu/test_flashinfer_engine.py": {
        "test_every_kind_of_request_gets_the_reference_backends_tokens": (
            ENGINE, "test_bfloat16_is_as_near_to_float32_as_on_the_cpu",
        ),
        "test_a_step_plans_once_for_all_layers": HOST,
        "test_drafts_change_no_token": (
            ENGINE, "test_flashinfers_drafts_give_the_tokens_without",
        ),
        "test_a_model_without_kernels_is_refused_by_name": HOST,
        "test_graphs_replay_with_shared_levels_and_without": (
            ENGINE, "test_flashinfers_graphs_of_mixed_steps_give_the_tokens_without",
        ),
        "test_small_steps_with_prompts_are_replayed_by_our_kernels": (
            ENGINE, "test_flashinfers_graphs_of_mixed_steps_give_the_tokens_without",
        ),
    },
    "engine/test_tier_streams.py": {
        "test_no_page_is_read_or_overwritten_too_early": (TIERS, SAME),
        "test_what_is_left_out_is_noticed": HOST,
    },
}  # fmt: skip


def names_of(module: str) -> set[str]:
    tree = ast.parse((RUNTIME / module).read_text())
    names = {each.name for each in tree.body if isinstance(each, ast.FunctionDef)}
    return {name for name in names if name.startswith("test_")}


@pytest.mark.parametrize("module", CASES)
def test_each_case_of_a_fake_device_is_one_of_a_gpu(module):
    assert names_of(module) == set(CASES[module])
    for name, found in CASES[module].items():
        if found is not None:
            there, same = found
            assert there in ON_GPU
            assert (same or name) in names_of(there)


def test_gpu_test_runs_them_all():
    command = ["make", "-n", "-C", ROOT, "gpu-test", "GPU_PYTHON=python3"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    words = told.split()
    assert "tests/kernels" in words
    assert {f"tests/runtime/{module}" for module in ON_GPU} <= set(words)
