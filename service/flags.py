"""Turns a frozen options class into flags, and flags, environment and a file into one instance of it.

`service.config` calls it with its classes. It knows no setting by name, reads no environment by itself, and
reports everything that is wrong at once rather than the first mistake.
"""

import argparse
import difflib
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import yaml
from pydantic import BaseModel, SecretBytes, SecretStr, ValidationError
from pydantic.fields import FieldInfo

from service.startup import StartupError

PREFIX = "flag_prefix"  # key in json_schema_extra: a nested options class whose flags start with this word


class ConfigError(StartupError):
    """The settings cannot be used. lines: one per mistake, each naming the flag; the process exits with
    2."""

    def __init__(self, lines: Iterable[str]) -> None:
        self.lines = tuple(lines)
        super().__init__("\n".join(self.lines))


@dataclass(frozen=True, slots=True)
class Flag:
    """name: in kebab-case, without dashes. path: where the value stands in the options class."""

    name: str
    path: tuple[str, ...]
    field: FieldInfo

    @property
    def variable(self) -> str:
        return self.name.replace("-", "_").upper()


_Model = TypeVar("_Model", bound=BaseModel)


def flags_of(model_class: type[BaseModel]) -> tuple[Flag, ...]:
    """Every flag of an options class, those of nested classes with their prefix."""
    return tuple(_walk(model_class, "", ()))


def load(
    model_class: type[_Model],
    argv: Sequence[str],
    environ: Mapping[str, str],
    *,
    known: frozenset[str],
    prefix: str,
    prog: str,
) -> _Model:
    """environ: variables without their prefix. known: flags of any command of ours; only a variable that is
    none of these is a mistake, since processes may share an environment. Raises ConfigError."""
    flags = flags_of(model_class)
    mistakes: list[str] = []
    given, config_path = _read_argv(flags, argv, prog, mistakes)
    from_file = _read_file(flags, config_path, mistakes) if config_path is not None else {}
    from_environ = _read_environ(flags, environ, known, prefix, mistakes)
    sources: dict[str, str] = (
        dict.fromkeys(from_file, f" (from {config_path})")
        | {name: f" (from {prefix}{name.replace('-', '_').upper()})" for name in from_environ}
        | dict.fromkeys(given, "")
    )
    merged = from_file | from_environ | given
    try:
        options = model_class.model_validate(_nested(flags, merged))
    except ValidationError as error:
        mistakes.extend(_explain(flags, sources, error))
    if mistakes:
        raise ConfigError(mistakes)
    return options


def to_argv(options: BaseModel) -> list[str]:
    """The flags that give these options again. Secrets are left out: a command line is public."""
    argv: list[str] = []
    for flag in flags_of(type(options)):
        value: Any = options
        for name in flag.path:
            value = getattr(value, name)
        if value is None or isinstance(value, SecretBytes | SecretStr):
            continue
        if isinstance(value, bool):
            argv.append(f"--{flag.name}" if value else f"--no-{flag.name}")
        elif isinstance(value, tuple):
            argv.append(f"--{flag.name}={','.join(map(str, value))}")
        else:
            argv.append(f"--{flag.name}={value}")
    return argv


def _walk(model_class: type[BaseModel], prefix: str, path: tuple[str, ...]) -> Iterator[Flag]:
    for name, field in model_class.model_fields.items():
        extra = field.json_schema_extra
        if isinstance(extra, dict) and PREFIX in extra:
            assert isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
            yield from _walk(field.annotation, f"{extra[PREFIX]}-", (*path, name))
        else:
            yield Flag(prefix + name.replace("_", "-"), (*path, name), field)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError([message.removeprefix("argument ")])


def _read_argv(
    flags: tuple[Flag, ...], argv: Sequence[str], prog: str, mistakes: list[str]
) -> tuple[dict[str, Any], str | None]:
    parser = _Parser(
        prog=prog,
        usage="%(prog)s [flags]",
        epilog=_epilog(flags),
        allow_abbrev=False,
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="settings, as TOML or YAML")
    for flag in flags:
        _add(parser, flag)
    parsed, unknown = parser.parse_known_args(list(argv))
    mistakes.extend(_unknown_arguments(flags, unknown))
    given = vars(parsed)
    config_path = given.pop("config", None)
    return given, config_path


def _epilog(flags: tuple[Flag, ...]) -> str:
    prefixes = dict.fromkeys(flag.name.split("-", 1)[0] for flag in flags if len(flag.path) > 1)
    forms = " and ".join(f"--{prefix}-<engine flag>" for prefix in prefixes)
    return f"For one pool alone: {forms}." if forms else ""


def _add(parser: argparse.ArgumentParser, flag: Flag) -> None:
    default = flag.field.get_default()
    text = (flag.field.description or "").replace("%", "%%")
    if not flag.field.is_required() and default not in (None, ()):
        text += f" (default: {default})"
    options: dict[str, Any] = {
        "dest": flag.name,
        "help": text if len(flag.path) == 1 else argparse.SUPPRESS,
    }
    if flag.field.annotation in {bool, bool | None}:
        options["action"] = argparse.BooleanOptionalAction
    elif _takes_many(flag):
        options |= {"action": "append", "metavar": "A,B,..."}
    else:
        options["metavar"] = flag.path[-1].upper()
    parser.add_argument(f"--{flag.name}", **options)


def _takes_many(flag: Flag) -> bool:
    return "tuple[" in str(flag.field.annotation)


def _unknown_arguments(flags: tuple[Flag, ...], unknown: list[str]) -> Iterator[str]:
    after_flag = False
    for argument in unknown:
        if argument.startswith("-"):
            name = argument.split("=", 1)[0]
            yield f"{name}: unknown flag{_suggestion(flags, name.lstrip('-'))}"
            after_flag = "=" not in argument
        elif not after_flag:
            yield f"{argument}: unexpected argument"
        else:
            after_flag = False


def _suggestion(flags: tuple[Flag, ...], name: str) -> str:
    close = difflib.get_close_matches(name, [flag.name for flag in flags], n=1, cutoff=0.75)
    return f"; did you mean --{close[0]}?" if close else ""


def _read_file(flags: tuple[Flag, ...], path: str, mistakes: list[str]) -> dict[str, Any]:
    try:
        content = _parsed_file(Path(path))
    except (OSError, ValueError, yaml.YAMLError) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error).splitlines()[0]
        mistakes.append(f"--config: {path}: {reason}")
        return {}
    names = {flag.name for flag in flags}
    values: dict[str, Any] = {}
    for key, value in content.items():
        name = str(key).replace("_", "-")
        if name not in names:
            mistakes.append(f"{path}: {key}: unknown key{_suggestion(flags, name)}")
        elif value is not None:
            values[name] = value
    return values


def _parsed_file(path: Path) -> dict[Any, Any]:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".toml":
        return tomllib.loads(text)
    if path.suffix in (".yaml", ".yml"):
        content = yaml.safe_load(text)
        if content is None:
            return {}
        if isinstance(content, dict):
            return content
        raise ValueError("the file is not a list of settings")
    raise ValueError("the name ends in none of .toml, .yaml, .yml")


def _read_environ(
    flags: tuple[Flag, ...],
    environ: Mapping[str, str],
    known: frozenset[str],
    prefix: str,
    mistakes: list[str],
) -> dict[str, Any]:
    by_variable = {flag.variable: flag.name for flag in flags}
    known_variables = {name.replace("-", "_").upper() for name in known}
    values: dict[str, Any] = {}
    for variable, value in environ.items():
        if variable in by_variable:
            values[by_variable[variable]] = value
        elif variable not in known_variables:
            mistakes.append(f"{prefix}{variable}: unknown variable")
    return values


def _nested(flags: tuple[Flag, ...], values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for flag in flags:
        if flag.name in values:
            node = tree
            for name in flag.path[:-1]:
                node = node.setdefault(name, {})
            node[flag.path[-1]] = values[flag.name]
    return tree


def _explain(flags: tuple[Flag, ...], sources: Mapping[str, str], error: ValidationError) -> Iterator[str]:
    by_path = {flag.path: flag for flag in flags}
    details = error.errors(include_url=False, include_context=False, include_input=False)
    places = [tuple(map(str, mistake["loc"])) for mistake in details]
    for location, mistake in zip(places, details, strict=True):
        flag = by_path.get(location[:2]) or by_path.get(location[:1])
        if flag is None:
            continue
        if any(len(other) > len(location) and other[: len(location)] == location for other in places):
            continue  # an item of it is wrong, and what is said of the whole follows from that
        if len(flag.path) > 1 and flag.name not in sources:
            continue  # a shared setting is wrong, and is reported under its own name
        text = mistake["msg"].removeprefix("Value error, ")
        if mistake["type"] == "too_short":  # of a tuple, where pydantic speaks of tuples
            text = "at least one is needed"
        yield f"--{flag.name}{sources.get(flag.name, '')}: {text[:1].lower()}{text[1:]}"
