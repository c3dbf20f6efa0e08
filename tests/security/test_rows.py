"""Which test is which row of the list of what went wrong elsewhere (SEC-01 to SEC-23), so that none is lost."""

import ast

import pytest

ROWS = {
    "SEC-01": ["tidy/test_words.py::test_nothing_runs_code_that_came_as_bytes"],
    "SEC-02": [
        "e2e/test_hostile_bytes.py::test_the_pickles_of_the_attack_would_run_their_command",
        "e2e/test_hostile_bytes.py::test_hostile_bytes_at_every_socket_of_serve_are_noticed_by_nobody",
        "e2e/test_hostile_bytes.py::test_hostile_bytes_at_every_port_of_separate_processes_are_noticed_by_nobody",
    ],
    "SEC-03": [
        "kvtransfer/test_hostile_peer.py::test_the_handshake_names_what_differs",
        "kvtransfer/test_hostile_peer.py::test_only_the_right_block_from_the_right_peer_is_placed",
        "kvtransfer/test_wire.py::test_a_message_over_its_limits_is_refused_on_the_way_out_and_on_the_way_in",
    ],
    "SEC-04": [
        "e2e/test_hostile_bytes.py::test_serve_listens_where_it_says_and_in_a_folder_of_its_own",
        "e2e/test_hostile_bytes.py::test_processes_started_one_by_one_listen_on_their_addresses_only",
        "service/test_bind_rules.py::test_what_other_machines_reach_needs_tls_or_a_word",
    ],
    "SEC-05": [
        "kvtransfer/test_curve.py::test_a_stranger_is_refused_before_any_message_and_others_go_on",
        "kvtransfer/test_curve.py::test_a_worker_cannot_greet_under_the_name_of_another",
    ],
    "SEC-06": [
        "security/test_intrusion.py::test_peers_that_connect_and_never_read_cost_little_and_disturb_nobody",
        "e2e/test_hostile_bytes.py::test_peers_of_workers_that_never_read_cost_little_and_disturb_nobody",
        "service/test_worker_rim.py::test_a_gateway_that_does_not_read_is_cut_off_and_dropped",
    ],
    "SEC-07": [
        "security/test_every_call.py::test_every_method_without_a_right_to_it_is_unauthenticated",
        "security/test_every_call.py::test_every_path_without_a_key_is_an_error_object",
        "security/test_every_call.py::test_a_tenants_key_opens_no_control_method_and_no_worker",
    ],
    "SEC-08": [
        "security/test_intrusion.py::test_no_field_over_http_steers_us_anywhere",
        "security/test_intrusion.py::test_no_metadata_and_no_unknown_field_steers_us_anywhere",
    ],
    "SEC-09": [
        "kvtransfer/test_ticket.py::test_every_flipped_bit_is_refused",
        "kvtransfer/test_desk.py::test_a_ticket_for_something_else_is_refused_by_reason",
        "kvtransfer/test_hostile_peer.py::test_a_ticket_is_refused_for_its_own_reason",
        "kvtransfer/test_hostile_peer.py::test_a_spent_ticket_stays_spent",
    ],
    "SEC-10": [
        "security/test_tenants.py::test_a_tenant_finds_its_own_prefixes_and_nobody_elses",
        "security/test_tenants.py::test_the_salt_of_another_tenant_opens_nothing",
        "security/test_tenants.py::test_another_tenants_prefix_costs_what_a_new_one_costs",
    ],
    "SEC-11": [
        "engine/test_prefix_cache.py::test_a_field_does_not_run_into_the_next_one",
        "engine/test_prefix_cache.py::test_each_token_changes_its_link_and_all_after_it_and_none_before",
        "engine/test_cache_mutants.py::test_the_indexs_machine_notices_when",
    ],
    "SEC-12": ["engine/test_poisoned_memory.py::test_the_memory_of_freed_blocks_is_never_read"],
    "SEC-13": [
        "gateway/test_ranges.py::test_each_number_and_each_length_in_a_request_has_limits_or_a_reason_to_have_none",
        "gateway/test_ranges.py::test_what_is_asked_is_taken_up_to_each_border_and_refused_beyond_it",
        "gateway/test_validation.py::test_numbers_are_held_to_their_range",
        "e2e/test_borders.py::test_what_is_beyond_a_border_of_the_contract_is_refused_by_name_over_the_wire",
        "e2e/test_bad_input.py::test_every_invalid_field_is_named_with_its_limit_and_reaches_no_worker",
        "e2e/test_bad_input.py::test_what_is_just_inside_its_limits_is_served",
    ],
    "SEC-14": [
        "e2e/test_bad_input.py::test_what_the_pool_can_never_hold_is_refused_with_the_numbers",
        "e2e/test_bad_input.py::test_what_fills_the_pool_to_its_last_token_is_served_exactly",
    ],
    "SEC-15": [
        "e2e/test_bad_input.py::test_what_grpc_itself_refuses_has_its_status_and_hurts_nobody",
        "e2e/test_bad_input.py::test_an_http_head_without_end_is_cut_off_at_its_limit",
        "gateway/test_validation.py::test_lists_texts_and_prompts_are_held_to_their_limits",
    ],
    "SEC-16": [
        "gateway/test_chat.py::test_a_hostile_or_broken_template_is_refused_and_reaches_nothing",
        "service/test_guide_compiler.py::test_what_cannot_be_followed_is_refused_in_one_short_line",
        "service/test_guide_compiler.py::test_an_answer_whose_masks_take_too_long_cannot_go_on_and_says_why",
        "gateway/test_guide_check.py::test_a_guide_that_takes_for_ever_is_refused_with_the_limit_and_the_next_is_checked",
        "e2e/test_guided.py::test_what_strangers_write_is_refused_or_answered_and_disturbs_nobody",
    ],
    "SEC-17": [
        "e2e/test_borders.py::test_what_is_beyond_a_border_of_the_contract_is_refused_by_name_over_the_wire",
        "e2e/test_bad_input.py::test_every_invalid_field_is_named_with_its_limit_and_reaches_no_worker",
        "service/test_ranges.py::test_an_order_is_taken_up_to_each_border_and_refused_beyond_it",
        "e2e/test_hostile_orders.py::test_wild_orders_and_forged_tickets_are_refused_and_nobody_else_notices",
    ],
    "SEC-18": [
        "e2e/test_bad_input.py::test_every_mistake_over_http_is_an_error_object_that_names_field_and_limit",
        "gateway/test_validation.py::test_refusals_name_fields_and_limits_and_never_contents",
    ],
    "SEC-19": [
        "gateway/test_chat.py::test_a_hostile_or_broken_template_is_refused_and_reaches_nothing",
        "gateway/test_chat.py::test_an_endless_text_is_cut_off_at_the_limit",
        "gateway/test_chat.py::test_a_template_that_does_much_and_says_nothing_is_ended_too",
        "engine/test_model_files.py::test_truncated_safetensors",
        "engine/test_model_files.py::test_a_gguf_header_that_lies",
    ],
    "SEC-20": ["security/test_intrusion.py::test_no_field_over_http_steers_us_anywhere"],
    "SEC-21": [
        "security/test_tenants.py::test_a_key_that_is_nearly_right_takes_as_long_as_any_other",
        "security/test_tenants.py::test_the_search_for_timing_finds_a_comparison_that_stops_early",
    ],
    "SEC-22": ["security/test_rotation.py::test_a_key_is_replaced_under_load_without_a_failed_call"],
    "SEC-23": [
        "security/test_intrusion.py::test_libraries_with_known_holes_are_not_in_use",
        "security/test_intrusion.py::test_no_slow_fallback_stands_in_for_a_library",
    ],
}


def test_there_is_a_row_for_each_number():
    assert list(ROWS) == [f"SEC-{number:02}" for number in range(1, 24)]


@pytest.mark.parametrize("row", ROWS)
def test_the_tests_of_a_row_are_there(row, pytestconfig):
    for name in ROWS[row]:
        path, _, function = name.partition("::")
        tree = ast.parse((pytestconfig.rootpath / "tests" / path).read_text(encoding="utf-8"))
        functions = {
            node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        }
        assert function in functions, name
