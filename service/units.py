"""Values as people write them on a command line: 32k tokens, 2GiB, an address, a key in hexadecimal.

`service.config` uses these as validators. Nothing here knows a flag's name; each refusal is a ValueError
with one line for the operator.
"""

import re
from pathlib import Path
from typing import NamedTuple

_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgG]?)")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kKmMgGtT])(iB|B)?|B)?")
_HOST_PORT = re.compile(r"(?:\[[0-9A-Fa-f:.]+\]|[^\s:/\[\]]+):(\d{1,5})")
_IPC_ENDPOINT = re.compile(r"ipc://\S+")
_TCP = "tcp://"
_PORT_MAX = 65_535
_CORES = re.compile(r"(\d{1,4})-(\d{1,4})")
_CORES_MAX = 1024
_WEIGHT = re.compile(r"([A-Za-z0-9._-]{1,64})=(\d+(?:\.\d+)?)")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}
_KEY_BYTES_MIN = 16


def parse_count(value: object) -> object:
    """Tokens: 32768, "32k" (32,000) or "32K" (32,768), as vLLM reads them. All but text passes unchanged."""
    if not isinstance(value, str):
        return value
    match = _COUNT.fullmatch(value.strip())
    if match is None:
        raise ValueError("a count such as 32768, 32k or 32K")
    number, suffix = match.groups()
    return _scaled(number, suffix, binary=suffix.isupper())


def parse_bytes(value: object) -> object:
    """Bytes: 1073741824, "1GiB" or "1G" (binary), "1GB" or "1g" (decimal). All but text passes unchanged."""
    if not isinstance(value, str):
        return value
    match = _BYTES.fullmatch(value.strip())
    if match is None:
        raise ValueError("a size such as 2GiB, 2G or 2147483648")
    number, suffix, unit = match.groups()
    binary = unit == "iB" or (unit is None and (suffix or "").isupper())
    return _scaled(number, suffix or "", binary=binary)


def parse_list(value: object) -> object:
    """Items from text with commas, or from a flag that was given several times."""
    if isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        return value
    parts = [part for item in value for part in (item.split(",") if isinstance(item, str) else [item])]
    return tuple(part.strip() if isinstance(part, str) else part for part in parts if part != "")


def parse_cores(value: object) -> object:
    """Cores from text with commas and ranges, such as 0-3,8; else as `parse_list`."""
    listed = parse_list(value)
    if not isinstance(listed, tuple):
        return listed
    return tuple(core for item in listed for core in _range(item))


def _range(item: object) -> tuple[object, ...]:
    match = _CORES.fullmatch(item) if isinstance(item, str) else None
    if match is None:
        return (item,)
    first, last = map(int, match.groups())
    if not first <= last < first + _CORES_MAX:
        raise ValueError("a range of cores is first-last")
    return tuple(range(first, last + 1))


def check_device(value: str) -> str:
    """auto, cpu, cuda or cuda:N. Raises ValueError."""
    if not re.fullmatch("auto|cpu|cuda(:[0-9]{1,3})?", value):
        raise ValueError("a device is auto, cpu, cuda or cuda:N")
    return value


def check_address(value: str) -> str:
    """An address to listen on or to dial with gRPC: host:port, [v6]:port or unix:path."""
    if value.startswith("unix:") and len(value) > len("unix:"):
        return value
    if not _is_host_port(value):
        raise ValueError(f"an address is host:port, with a port up to {_PORT_MAX}, or unix:path")
    return value


def check_kv_endpoint(value: str) -> str:
    """A ZeroMQ endpoint for KV blocks: tcp://host:port or ipc://path."""
    tcp = value.startswith(_TCP) and _is_host_port(value.removeprefix(_TCP))
    if not (tcp or _IPC_ENDPOINT.fullmatch(value)):
        raise ValueError(f"an endpoint is tcp://host:port, with a port up to {_PORT_MAX}, or ipc://path")
    return value


def check_kv_advertised(value: str) -> str:
    """An endpoint that others dial: tcp://host:port, with a port that somebody listens on."""
    if not check_kv_endpoint(value).startswith(_TCP) or int(value.rpartition(":")[2]) == 0:
        raise ValueError("an endpoint that others dial is tcp://host:port")
    return value


class Weight(NamedTuple):
    """A name and a positive number, written name=number."""

    name: str
    number: float

    def __str__(self) -> str:
        return f"{self.name}={self.number}"


def parse_weights(value: object) -> object:
    """Names with numbers: "acme=4,batch=0.5", or a flag given several times."""
    items = parse_list(value)
    if not isinstance(items, tuple):
        return items
    return tuple(_weight(item) if isinstance(item, str) else item for item in items)


def parse_key(value: object) -> object:
    """A secret key from hexadecimal digits, or from a file that holds them ("@path"). Bytes pass."""
    if not isinstance(value, str):
        return value
    digits = _text_of(value).strip()
    try:
        key = bytes.fromhex(digits)
    except ValueError:
        raise ValueError("a key is hexadecimal digits or @path of a file that holds them") from None
    if len(key) < _KEY_BYTES_MIN:
        raise ValueError(f"a key has at least {_KEY_BYTES_MIN * 2} hexadecimal digits")
    return key


def parse_secret(value: object) -> object:
    """A secret text, or "@path" of a file that holds it."""
    if not isinstance(value, str):
        return value
    secret = _text_of(value).strip()
    if not secret:
        raise ValueError("a secret is not empty")
    return secret


def _is_host_port(value: str) -> bool:
    match = _HOST_PORT.fullmatch(value)
    return match is not None and int(match.group(1)) <= _PORT_MAX


def _weight(text: str) -> Weight:
    match = _WEIGHT.fullmatch(text)
    if match is None or float(match[2]) <= 0:
        raise ValueError("a weight is name=number, with a number above 0")
    return Weight(match[1], float(match[2]))


def _text_of(value: str) -> str:
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the file cannot be read: {type(error).__name__}") from None


def _scaled(number: str, suffix: str, *, binary: bool) -> int:
    unit = (1024 if binary else 1000) ** _POWERS.get(suffix.lower(), 0)
    scaled = float(number) * unit if "." in number else int(number) * unit
    if scaled != int(scaled):
        raise ValueError("not a whole number")
    return int(scaled)
