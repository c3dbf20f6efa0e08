"""What an operator may set: one frozen class per kind of process, and the one reader of the environment.

Commands call `load`; processes are given the result and never change it. What is learnt at start-up (how
many blocks fit, which port was free) is another type of another module. Nothing here starts, opens or probes
anything.
"""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    SecretBytes,
    SecretStr,
    model_validator,
)

from service import flags, units
from service.core_board import SEATS_MAX

ENVIRONMENT_PREFIX = "CROSSDOCK_"

Dtype = Literal["auto", "float32", "bfloat16"]
KVDtype = Literal["auto", "float32", "bfloat16", "int8", "fp8"]
Port = Annotated[int, Field(ge=0, le=65535)]
Tokens = Annotated[int, BeforeValidator(units.parse_count), Field(ge=1)]
Bytes = Annotated[int, BeforeValidator(units.parse_bytes), Field(ge=1)]
BytesOrNone = Annotated[int, BeforeValidator(units.parse_bytes), Field(ge=0)]
Address = Annotated[str, AfterValidator(units.check_address)]
Device = Annotated[str, AfterValidator(units.check_device)]
Addresses = Annotated[tuple[Address, ...], BeforeValidator(units.parse_list)]
KVEndpoint = Annotated[str, AfterValidator(units.check_kv_endpoint)]
KVEndpoints = Annotated[tuple[KVEndpoint, ...], BeforeValidator(units.parse_list)]
KVAdvertised = Annotated[
    tuple[Annotated[str, AfterValidator(units.check_kv_advertised)], ...], BeforeValidator(units.parse_list)
]
KVTransports = Annotated[tuple[Literal["auto", "gloo", "nccl"], ...], BeforeValidator(units.parse_list)]
MetricsNames = Annotated[tuple[Literal["native", "vllm"], ...], BeforeValidator(units.parse_list)]
Cores = Annotated[tuple[Annotated[int, Field(ge=0)], ...], BeforeValidator(units.parse_cores)]
Weights = Annotated[tuple[units.Weight, ...], BeforeValidator(units.parse_weights)]
Names = Annotated[tuple[str, ...], BeforeValidator(units.parse_list)]
Key = Annotated[SecretBytes, BeforeValidator(units.parse_key)]
Secret = Annotated[SecretStr, BeforeValidator(units.parse_secret)]

RANKS_MAX = 64

DEFAULT_MODEL = "smollm2-135m-instruct"


class Options(BaseModel):
    """What every process takes."""

    model_config = ConfigDict(frozen=True, extra="forbid", hide_input_in_errors=True)

    log_level: Literal["debug", "info", "warning", "error"] = Field("info", description="least level logged")
    log_format: Literal["text", "json"] = Field("text", description="one line per event, as text or JSON")
    shutdown_timeout: float = Field(
        10.0, ge=0, description="seconds that running requests are given after SIGTERM"
    )
    allow_wildcard_bind: bool = Field(False, description="let a server listen on every interface")
    allow_insecure: bool = Field(False, description="let other machines reach a server without TLS")
    ssl_certfile: Path | None = Field(
        None, description="certificate of the servers, PEM; with it they speak TLS"
    )
    ssl_keyfile: Path | None = Field(None, description="its key, PEM")
    ssl_ca_certs: Path | None = Field(
        None, description="authorities, PEM; with them every client needs a certificate of theirs"
    )
    die_with_parent: bool = Field(
        False, description="exit as soon as whoever holds the other end of standard input is gone"
    )


class ModelOptions(BaseModel):
    """Which model, and under what name."""

    model: str = Field(
        DEFAULT_MODEL, min_length=1, description="built-in name, Hugging Face folder or GGUF file"
    )
    served_model_name: str | None = Field(
        None, min_length=1, max_length=256, description="name that clients use; default: from --model"
    )


class EngineOptions(ModelOptions):
    """One engine on one device. Names as vLLM users know them."""

    device: Device = Field(
        "auto",
        description="auto: cpu; the kernels for cuda have not run on a GPU yet; cuda:N is one GPU, "
        "with several ranks the first of theirs; `serve` deals the GPUs that there are where it is cuda",
    )
    dtype: Dtype = Field("auto", description="of weights and activations")
    kv_cache_dtype: KVDtype = Field(
        "auto",
        description="of cached keys and values: as --dtype, int8, or fp8 (on cuda); auto: as the weights",
    )
    quantization: Literal["auto", "none", "stored", "int8", "int4"] = Field(
        "auto",
        description="of weights: stored (as GGUF, AWQ and GPTQ files have them), int8 or int4 in groups of 32; "
        "auto: stored where --dtype is auto, else none",
    )
    max_model_len: Tokens | None = Field(
        None, description="tokens of a request, prompt and answer; default: the model's"
    )
    max_num_seqs: int = Field(64, ge=1, description="sequences in one step")
    max_num_batched_tokens: Tokens = Field(256, description="tokens in one step")
    block_size: int = Field(16, ge=1, le=256, description="positions in one KV block")
    num_gpu_blocks_override: int | None = Field(
        None, ge=1, description="KV blocks, instead of what memory allows"
    )
    gpu_memory_utilization: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the free memory for KV blocks, over all workers of `serve`; "
        "default: a quarter for each, at most 2GiB; on a GPU: share of its whole memory for all that is there, "
        "over all workers on it; default: nine tenths",
    )
    kv_cache_memory_bytes: Bytes | None = Field(None, description="bytes for KV blocks, for example 2GiB")
    swap_space: BytesOrNone = Field(
        0, description="bytes of host memory for sequences whose blocks are needed, for example 4GiB; 0: none"
    )
    enable_prefix_caching: bool = Field(True, description="keep computed prefixes for later requests")
    async_scheduling: bool | None = Field(
        None,
        description="begin a step before what the last one drew is read; default: on a GPU, with one rank",
    )
    enforce_eager: bool = Field(
        False, description="on a GPU, launch each kernel of a decode step by itself: no CUDA graphs"
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="cores that one worker computes on; default: its --cores, of which `serve` deals each its share",
    )
    tensor_parallel_size: int = Field(
        1,
        ge=1,
        le=RANKS_MAX,
        description="ranks: processes that share the model of one worker, on cuda each with a GPU",
    )
    seed: int = Field(0, description="of everything random that a request does not seed")


class WorkerOptions(EngineOptions, Options):
    """One worker process."""

    listen: Address = Field(description="gRPC address of this worker: host:port or unix:path")
    kv_transports: KVTransports = Field(
        (),
        description="ways of KV blocks, tried before auto: gloo, nccl; default: auto (shared memory, ipc, tcp)",
    )
    kv_group_address: str = Field(
        "127.0.0.1", description="IP address of this machine that gloo listens on for KV blocks"
    )
    kv_key_folder: Path | None = Field(
        None, description="keys for KV blocks over tcp, as `crossdock keys` makes them; with it tcp is CURVE"
    )
    kv_shared_memory: bool = Field(
        True, description="hand KV blocks over through shared memory between workers on this host"
    )
    allow_insecure_kv: bool = Field(
        False, description="let other machines send KV blocks over tcp without keys"
    )
    worker_id: str = Field(
        min_length=1, max_length=64, pattern=r"^[A-Za-z0-9._-]+$", description="name of this worker"
    )
    ticket_key: Key = Field(description="key of the tickets, hexadecimal or @file; best in the environment")
    queue_requests_max: int = Field(512, ge=1, description="requests that may wait here")
    cores: Cores | None = Field(None, description="cores to run on, for example 0,1 or 0-3")
    core_board: Path | None = Field(
        None,
        description="where `serve` has the workers of a machine say whether their cores are free for others",
    )
    core_seat: int = Field(0, ge=0, lt=SEATS_MAX, description="number of this worker on the --core-board")
    host_memory_share: float = Field(
        1.0,
        gt=0,
        le=1,
        description="of the host memory that is free at the start, what this worker may promise; `serve` deals it out "
        "to workers on GPUs, whose every KV block has a place there",
    )

    def kv_backends(self) -> tuple[str, ...]:
        """The backends of torch.distributed that were asked for, best first."""
        return tuple(way for way in dict.fromkeys(self.kv_transports) if way != "auto")


class DecodeWorkerOptions(WorkerOptions):
    """One decode worker process: it must be reachable for KV blocks."""

    kv_listen: KVEndpoints = Field(min_length=1, description="endpoints that take KV blocks")
    kv_advertise: KVAdvertised = Field(
        (), description="tcp endpoints by which others reach those of --kv-listen: behind NAT, in containers"
    )


class RankOptions(EngineOptions, Options):
    """One process that follows the first rank of a worker, which starts it; nobody else does."""

    worker_id: str = Field(min_length=1, max_length=64, description="name of the worker")
    rank: int = Field(ge=1, lt=RANKS_MAX, description="its number among the ranks")
    endpoint: KVEndpoint = Field(description="where the first rank tells it what to do")
    memory: int = Field(ge=0, description="descriptor of the memory of whole KV blocks")
    rendezvous: int = Field(ge=0, description="descriptor of the file where the ranks find each other")
    cores: Cores | None = Field(None, description="cores to run on, for example 0,1 or 0-3")
    nice: int = Field(0, ge=0, description="how far it makes way for others of its machine")


class FrontOptions(Options):
    """The gateway's face, as `serve` and `gateway` both take it."""

    grpc_host: str = Field("127.0.0.1", min_length=1, description="interface of the gRPC server")
    grpc_port: Port = Field(50051, description="port of the gRPC server; 0: any free one")
    http_host: str = Field("127.0.0.1", min_length=1, description="interface of the HTTP server")
    http_port: Port = Field(8000, description="port of the HTTP server; 0: any free one")
    grpc_max_message_bytes: Bytes = Field(
        4 << 20, le=1 << 30, description="largest request, over HTTP as well"
    )
    grpc_max_connection_age: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="seconds after which a gRPC client has to connect anew for new calls, so that dns:/// clients find "
        "gateways that came later; running calls go on; default: never",
    )
    queue_requests_max: int = Field(1024, ge=1, description="requests that may be live at the gateway")
    queue_tokens_max: Tokens = Field(
        16_000_000, description="tokens that these may cost, prompts and answers at their longest"
    )
    queue_bytes_max: Bytes = Field(
        4 << 30, description="bytes that the gateway keeps of them, if nobody reads an answer before its end"
    )
    tenant_weights: Weights = Field(
        (),
        description="shares of tenants when there is a queue, for example acme=4,batch=0.5; default: 1 each",
    )
    api_keys: Path | None = Field(
        None, description="file of API keys, as `crossdock keys --api` makes it; default: none are needed"
    )
    control_token: Secret | None = Field(
        None,
        description="credential of the control service, or @file; default: `serve` deals one to its user, and a "
        "gateway by itself has no operator",
    )
    control_identities: Names = Field(
        (), description="names in clients' certificates that may use the control service"
    )
    enable_reflection: bool = Field(True, description="gRPC server reflection")
    metrics_names: MetricsNames = Field(
        ("native", "vllm"), description="under which names /metrics shows its numbers: native, vllm"
    )
    drain_window: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which new calls are still taken while health says NOT_SERVING, so that a "
        "balancer can notice; part of --shutdown-timeout",
    )


class GatewayOptions(ModelOptions, FrontOptions):
    """One gateway process."""

    share_grpc_port: bool = Field(
        False,
        description="let other gateways of this machine listen on the same gRPC port; each gets a share of calls",
    )
    prefill_workers: Addresses = Field(min_length=1, description="gRPC addresses of the prefill workers")
    decode_workers: Addresses = Field(min_length=1, description="gRPC addresses of the decode workers")
    worker_ssl_ca_certs: Path | None = Field(
        None,
        description="authorities of the workers' certificates, PEM; with them workers are dialled over TLS",
    )
    worker_ssl_certfile: Path | None = Field(None, description="our certificate for workers, PEM")
    worker_ssl_keyfile: Path | None = Field(None, description="its key, PEM")
    ticket_key: Key = Field(description="key of the tickets, hexadecimal or @file; best in the environment")


class ServeOptions(EngineOptions, FrontOptions):
    """Everything on this machine. Each pool's engine is resolved: what it does not override is shared."""

    prefill: int = Field(1, ge=1, description="prefill workers")
    decode: int = Field(1, ge=1, description="decode workers")
    gateways: int = Field(
        1,
        ge=1,
        le=64,
        description="gateways on one gRPC port; HTTP is on --http-port and the ports that follow",
    )
    cores: Cores | None = Field(
        None, description="cores dealt to the workers, for example 0,1 or 0-3; default: all of this process"
    )
    lend_cores: bool = Field(
        True, description="let a worker compute with the cores of those that rest as well"
    )
    prefill_engine: EngineOptions = Field(json_schema_extra={flags.PREFIX: "prefill"})
    decode_engine: EngineOptions = Field(json_schema_extra={flags.PREFIX: "decode"})

    @model_validator(mode="before")
    @classmethod
    def _share(cls, values: dict[str, Any]) -> dict[str, Any]:
        shared = {name: values[name] for name in EngineOptions.model_fields if name in values}
        pools = ("prefill_engine", "decode_engine")
        return values | {
            pool: values[pool] if isinstance(values.get(pool), BaseModel) else shared | values.get(pool, {})
            for pool in pools
        }


_Model = TypeVar("_Model", bound=BaseModel)


def load(
    model_class: type[_Model], argv: Sequence[str], environ: Mapping[str, str], *, prog: str = "crossdock"
) -> _Model:
    """Flags over CROSSDOCK_* over the --config file over defaults.

    Raises flags.ConfigError with every unknown key and every bad value, one line each. `--help` prints and
    exits.
    """
    settable = {
        name.removeprefix(ENVIRONMENT_PREFIX): value
        for name, value in environ.items()
        if name.startswith(ENVIRONMENT_PREFIX)
    }
    return flags.load(model_class, argv, settable, known=_known_flags(), prefix=ENVIRONMENT_PREFIX, prog=prog)


def environment() -> Mapping[str, str]:
    """The environment of this process."""
    return os.environ


def child_environment(environ: Mapping[str, str], secrets: Mapping[str, str]) -> dict[str, str]:
    """What a child process inherits: no setting of ours except the secrets, which must not stand on a
    command line. secrets: field name -> text."""
    kept = {name: value for name, value in environ.items() if not name.startswith(ENVIRONMENT_PREFIX)}
    ours = {ENVIRONMENT_PREFIX + name.upper(): value for name, value in secrets.items()}
    return kept | ours | {"GRPC_ENABLE_FORK_SUPPORT": "0", "PYTHONUNBUFFERED": "1"}


def to_argv(options: BaseModel) -> list[str]:
    """The flags that `load` reads back as these options, without secrets."""
    return flags.to_argv(options)


def _known_flags() -> frozenset[str]:
    models: tuple[type[BaseModel], ...] = (ServeOptions, GatewayOptions, DecodeWorkerOptions)
    return frozenset(flag.name for model in models for flag in flags.flags_of(model))
