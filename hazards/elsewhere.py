"""Hazards that tenterhook's own tests show better than a table of tools: what goes wrong, and the tests for it.

A name ends in a test function, or in a check that two processes run together. A test checks that all of them exist.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["ELSEWHERE", "Elsewhere"]


class Elsewhere(NamedTuple):
    """A hazard, and the tests for it."""

    section: str
    sentence: str
    tests: tuple[str, ...]


def _all(section: str, *rows: tuple[str, tuple[str, ...]]) -> list[Elsewhere]:
    return [Elsewhere(section, *row) for row in rows]


ELSEWHERE = [
    *_all(
        "Values",
        (
            "`vmap` passes batched tensors to hooks, which cannot be used outside of it",
            (
                "tests/pytorch/test_transforms.py::test_vmap_records_all_examples_along_the_first_dimension",
                "tests/pytorch/test_transforms.py::test_a_change_in_place_inside_vmap_does_not_reach_the_tape",
            ),
        ),
        (
            "`torch.export`, `torch.jit.trace`, `torch.fx` and `make_fx` hand hooks fake or traced tensors",
            (
                "tests/engine/test_refuse_tracing.py::test_an_edit_is_never_traced",
                "tests/engine/test_refuse_tracing.py::test_a_recording_of_an_export_is_refused",
            ),
        ),
        (
            "a value may be a tensor, tuple, list, dict, named tuple, dataclass, `ModelOutput`, or any nesting of them",
            ("tests/record/test_kept_value.py::test_a_structure_is_kept_with_its_own_types_and_detached",),
        ),
    ),
    *_all(
        "Gradients",
        (
            "`register_hook` on a view that was changed through an alias can end the process",
            (
                "tests/record/test_recorded_gradients.py::test_a_view_whose_base_changes_has_the_gradient_of_the_memory_it_shows",
            ),
        ),
        (
            "a hook that changes its gradient in place reaches the branches that share it",
            (
                "tests/edit/test_gradient.py::test_changing_the_gradient_in_place_is_refused_because_others_may_share_it",
                "tests/record/test_recorded_gradients.py::test_a_gradient_that_a_later_hook_changes_in_place_is_not_passed_off_as_what_flowed",
            ),
        ),
        (
            "a tensor hook whose closure reaches its own tensor is never collected",
            (
                "tests/record/test_gradients_no_leak.py::test_whatever_is_done_nothing_is_left",
                "tests/record/test_gradients_no_leak.py::test_a_thousand_steps_each_with_its_session_leave_nothing",
            ),
        ),
        (
            "hooks of a node do not run where `autograd.grad` asks for that node's own output",
            (
                "tests/record/test_recorded_gradients.py::test_autograd_grad_is_caught_also_where_the_point_itself_is_asked_for",
            ),
        ),
        (
            "`backward()` computes the gradients of all parameters where only those of points are wanted",
            ("tests/record/test_tape_backward.py::test_nothing_is_computed_further_back_than_the_first_point",),
        ),
        (
            "keeping a gradient, or giving a value a place of its own in the graph, alters the sums of autograd",
            (
                "tests/record/test_alias_sums.py::test_a_kept_gradient_does_not_change_the_layout_of_the_sums_that_autograd_makes_of_it",
                "tests/record/test_alias_sums.py::test_the_gradients_of_a_value_that_is_passed_on_are_summed_in_the_same_order",
            ),
        ),
        (
            "DDP's hooks of parameters see gradients before they are averaged",
            ("tests/distributed/checks.py::check_that_ddp_shows_gradients_of_parameters_before_they_are_averaged",),
        ),
        (
            "FSDP2's parameters are shards outside their module's call",
            (
                "tests/distributed/checks.py::check_that_fsdp_shows_a_parameter_as_a_dtensor_or_gathered",
                "tests/distributed/checks.py::check_that_an_edit_of_a_parameter_under_fsdp_gets_the_whole_one",
            ),
        ),
    ),
    *_all(
        "Recomputation",
        (
            "activation checkpointing calls forward hooks a second time",
            (
                "tests/engine/test_recompute.py::test_what_is_recorded_is_not_recorded_again",
                "tests/engine/test_recompute.py::test_the_call_indices_of_a_recomputation_are_those_of_the_first_run",
            ),
        ),
        (
            "a recomputation under `no_grad` first, or one that ends early: which run has the gradient, and how often",
            (
                "tests/record/test_gradients_recomputed.py::test_every_point_has_the_gradient_of_the_run_without_checkpoints",
                "tests/record/test_gradients_recomputed.py::test_edits_of_gradients_are_made_exactly_once",
            ),
        ),
        (
            "a Hugging Face model with gradient checkpointing, edited",
            ("tests/engine/test_recompute.py::test_a_hugging_face_model_with_gradient_checkpointing",),
        ),
    ),
    *_all(
        "Compiled models",
        (
            "hooks that are present when a model is compiled are traced in, or break its graph",
            (
                "tests/compiled/test_trace.py::test_every_kind_of_point_is_recorded_in_one_full_graph",
                "tests/compiled/test_trace.py::test_an_edit_that_cannot_be_traced_is_named",
            ),
        ),
        (
            "gradients inside a compiled region",
            ("tests/compiled/test_traced_gradients.py::test_gradients_are_those_of_the_plain_run",),
        ),
        (
            "a stop inside a compiled region",
            (
                "tests/compiled/test_trace.py::test_a_stop_makes_the_graph_end_there",
                "tests/compiled/test_graph_breaks.py::test_a_stop_in_a_compiled_function_leaves_its_graph",
            ),
        ),
        (
            "a first call under a dispatch mode leaves the code uncompiled",
            ("tests/compiled/test_trace.py::test_a_first_call_inside_a_session_leaves_nothing_uncompiled",),
        ),
        (
            "what CUDA graphs give out is overwritten by their next replay",
            (
                "tests/compiled/test_inductor.py::test_cuda_graphs_do_not_rewrite_what_was_recorded",
                "tests/compiled/test_packed_outputs.py::test_every_kind_of_point_is_what_it_was",
            ),
        ),
        (
            "what cannot be part of a whole graph is found out in the middle of a run",
            ("tests/compiled/test_fullgraph_check.py::test_it_is_reported_at_the_start",),
        ),
        (
            "code that was compiled under hooks stays when they are gone",
            ("tests/compiled/test_trace.py::test_a_plan_is_compiled_once_and_closing_goes_back_to_the_earlier_code",),
        ),
    ),
    *_all(
        "Life cycle",
        (
            "the `state_dict` of a hooked module, and shared memory",
            ("tests/test_model_copies.py::test_the_state_dict_and_shared_memory_know_nothing_of_a_session",),
        ),
        (
            "a stop that never came is said",
            ("tests/engine/test_stop.py::test_a_stop_that_never_came_is_reported",),
        ),
        (
            "hooks that are always called do not see a stop; a model's own `except` swallows one",
            (
                "tests/engine/test_stop.py::test_hooks_that_are_always_called_are_called_from_the_inside_out",
                "tests/engine/test_stop.py::test_a_model_that_swallows_exceptions_cannot_swallow_a_stop",
            ),
        ),
        (
            "`DataParallel`'s replicas share hooks, and an overridden `forward` stays bound to the original",
            ("tests/distributed/test_offloaded.py::test_data_parallel_with_replicas_is_refused",),
        ),
        (
            "a stop inside FSDP2 leaves parameters whole",
            ("tests/distributed/checks.py::check_that_a_stop_under_fsdp_leaves_no_parameter_gathered",),
        ),
        (
            "a stop in one stage of a pipeline leaves the next waiting",
            ("tests/distributed/checks.py::check_that_a_stop_in_a_pipeline_says_that_it_cannot_and_nobody_waits",),
        ),
        (
            "under tensor parallelism hooks see `DTensor`s, shards, or results that are still on their way",
            ("tests/distributed/checks.py::check_that_tensor_parallel_points_show_what_the_plan_says",),
        ),
    ),
    *_all(
        "Variables inside `forward`",
        (
            "decorators, closures, `super()`, `+=`, walrus, tuple targets, `a = b =`, loops, comprehensions, `try`",
            (
                "tests/sites/test_rewrite.py::test_every_form_of_binding_and_call_is_recorded",
                "tests/sites/test_rewrite.py::test_a_decorated_forward_is_entered_through_its_decorators",
                "tests/sites/test_rewrite.py::test_inherited_and_shared_forwards_are_distinguished_by_module",
            ),
        ),
        (
            "source that is not there: typed at a prompt, from stdin, `exec`, `.pyc` alone, C, a wrapper that hides it",
            (
                "tests/sites/test_rewrite.py::test_a_forward_without_source_says_so",
                "tests/sites/test_rewrite.py::test_what_is_read_from_stdin_or_typed_at_a_prompt_says_that_it_has_no_source",
                "tests/sites/test_rewrite.py::test_a_module_of_which_there_is_only_compiled_code_says_so",
                "tests/sites/test_rewrite.py::test_a_forward_that_is_no_python_function_says_so",
                "tests/sites/test_rewrite.py::test_calls_inside_a_forward_without_source_are_found_as_they_are_made",
                "tests/sites/test_rewrite.py::test_a_wrapper_that_hides_what_it_wraps_is_refused",
            ),
        ),
        (
            "tracebacks, debuggers and coverage must show the file and the line that the user wrote",
            (
                "tests/sites/test_rewrite.py::test_a_traceback_shows_the_users_own_lines",
                "tests/sites/test_debuggers.py::test_the_debugger_stops_where_it_does_without_a_session",
                "tests/sites/test_debuggers.py::test_pdb_run_from_the_command_line_stops_on_the_users_line_and_prints_a_local",
                "tests/sites/test_debuggers.py::test_coverage_counts_the_lines_that_it_counts_without_a_session",
                "tests/sites/test_rewrite.py::test_a_warning_names_the_users_own_line",
            ),
        ),
        (
            "a file that changed on disk since it was imported",
            ("tests/sites/test_rewrite.py::test_a_file_that_changed_since_it_was_imported_is_refused",),
        ),
    ),
]
