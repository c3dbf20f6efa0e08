"""Words that say nothing, words in the wrong place, and calls that must not be made."""

import ast
import re
from collections.abc import Iterator

import pytest

EMPTY_SUFFIX = re.compile(r"(Manager|Helpers?|Utils?|Info|Data|Obj|Impl|Base)$")
ROLE_WORD = re.compile(r"prefill|decode(?!r)", re.IGNORECASE)
# Verbs of text and wire codecs, which have nothing to do with a pool.
CODEC_WORDS = {"decode", "UnicodeDecodeError", "JSONDecodeError", "DecodeError"}
BELOW_ROLES = {"engine", "kvtransfer", "tensor_parallel"}

FORBIDDEN_MODULES = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle"}
FORBIDDEN_CALLS = {"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load", "yaml.full_load"}
FORBIDDEN_METHODS = {"recv_pyobj", "send_pyobj"}
WALL_CLOCK = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.datetime.now"}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv"}


def test_no_class_is_named_after_nothing(sources):
    assert [
        f"{source.at(node)}: {node.name}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef) and EMPTY_SUFFIX.search(node.name)
    ] == []


def test_nothing_below_the_workers_speaks_of_roles(sources):
    below = [source for source in sources if source.package in BELOW_ROLES]
    assert [
        f"{source.at(node)}: {name}"
        for source in below
        for node in ast.walk(source.tree)
        for name in _identifiers(node)
        if ROLE_WORD.search(name) and name not in CODEC_WORDS
    ] == []
    assert [source.path for source in below if ROLE_WORD.search(source.path)] == []


def test_the_engine_is_not_asynchronous(sources):
    assert [
        source.at(node)
        for source in sources
        if source.package == "engine"
        for node in ast.walk(source.tree)
        if isinstance(node, ast.AsyncFunctionDef | ast.Await | ast.AsyncFor | ast.AsyncWith)
    ] == []


def test_nothing_runs_code_that_came_as_bytes(all_sources):
    assert [
        f"{source.at(node)}: {what}"
        for source in all_sources
        for node in ast.walk(source.tree)
        for what in _dangers(node)
    ] == []


def test_logic_never_reads_the_wall_clock(sources):
    """A clock may be handed over, as whoever wires a process does; it is not to be asked."""
    calls = (
        (source, node) for source in sources for node in ast.walk(source.tree) if isinstance(node, ast.Call)
    )
    assert [source.at(node) for source, node in calls if ast.unparse(node.func) in WALL_CLOCK] == []


def test_only_the_configuration_reads_the_environment(sources):
    elsewhere = [source for source in sources if source.path != "service/config.py"]
    assert _uses(elsewhere, ENVIRONMENT) == []


def test_modules_print_only_in_commands(sources):
    libraries = [source for source in sources if source.package != "commands"]
    assert _uses(libraries, {"print"}) == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from marshal import loads",
        "torch.load(f)",
        "eval('1')",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_search_for_dangers_finds_them(code):
    assert [what for node in ast.walk(ast.parse(code)) for what in _dangers(node)] != []


def _identifiers(node: ast.AST) -> Iterator[str]:
    for field in ("name", "id", "attr", "arg", "asname"):
        value = getattr(node, field, None)
        if isinstance(value, str):
            yield value


def _dangers(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.split(".")[0] in FORBIDDEN_MODULES)
    if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in FORBIDDEN_MODULES:
        yield node.module or ""
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func)
        if name in FORBIDDEN_CALLS or name.rpartition(".")[2] in FORBIDDEN_METHODS:
            yield name
        yield from ("allow_pickle" for keyword in node.keywords if keyword.arg == "allow_pickle")


def _uses(sources, names: set[str]) -> list[str]:
    return [
        f"{source.at(node)}: {ast.unparse(node)}"
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute | ast.Name) and ast.unparse(node) in names
    ]
