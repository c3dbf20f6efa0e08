"""Functions fit on a screen, and files hold one noun."""

import ast

FUNCTION_LINES_MAX = 70
FILE_LINES_MAX = 400


def test_no_function_is_longer_than_a_screen(all_sources):
    long = [
        f"{source.at(node)}: {node.name} has {lines} lines"
        for source in all_sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert long == []


def test_no_file_is_longer_than_its_limit(all_sources):
    long = [
        f"{source.path} has {lines} lines"
        for source in all_sources
        if (lines := len(source.text.splitlines())) > FILE_LINES_MAX
    ]
    assert long == []


def test_every_module_says_what_it_is(sources):
    silent = [
        source.path for source in sources if source.text.strip() and ast.get_docstring(source.tree) is None
    ]
    assert silent == []
