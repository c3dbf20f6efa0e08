"""How the endpoint of a torch.distributed pair is written: backend+carrier, as in gloo+tcp://10.0.0.7:7001.

The carrier is the ZeroMQ endpoint that headers and signals travel over; payloads go between the two ends of
the group. Knows no socket and no torch."""

BACKENDS = ("gloo", "nccl")
CARRIERS = ("tcp", "ipc")


def split(endpoint: str) -> tuple[str, str] | None:
    """(backend, carrier endpoint), or None for an endpoint of another kind."""
    backend, separator, carrier = endpoint.partition("+")
    if not separator or backend not in BACKENDS or carrier.partition("://")[0] not in CARRIERS:
        return None
    return backend, carrier


def offered(backends: tuple[str, ...], carriers: tuple[str, ...]) -> tuple[str, ...]:
    """Every backend over every carrier that can carry one, best first."""
    endpoints = (f"{backend}+{carrier}" for backend in backends for carrier in carriers)
    return tuple(endpoint for endpoint in endpoints if split(endpoint) is not None)
