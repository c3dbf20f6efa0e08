"""How a client connects and who it says it is. Opens channels; makes no call."""

from dataclasses import dataclass, field

import grpc

from crossdock.targets import Target, dialling


@dataclass(frozen=True, slots=True, kw_only=True)
class Credentials:
    """key: an API key or a control token, "" for none. ca: authorities of the server's certificate, PEM; with them
    the connection is TLS. certificate, private_key: our own, where the server asks for one. Raises ValueError for a
    part of these: nobody who thinks of TLS sends a key without it."""

    key: str = field(default="", repr=False)
    ca: bytes | None = None
    certificate: bytes | None = None
    private_key: bytes | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.private_key is None):
            raise ValueError("a certificate and its private_key go together")
        if self.certificate is not None and self.ca is None:
            raise ValueError("a certificate needs ca, the authorities of the server's")

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """What each call brings."""
        return (("authorization", f"Bearer {self.key}"),) if self.key else ()

    def channel(self, target: Target) -> grpc.Channel:
        """For plain code. Raises RequestError for a target that is none."""
        how = dialling(target)
        if self.ca is None:
            return grpc.insecure_channel(how.target, options=how.options)
        return grpc.secure_channel(how.target, self._tls(), options=how.options)

    def aio_channel(self, target: Target) -> grpc.aio.Channel:
        """To be called in the event loop that uses it. Raises RequestError for a target that is none."""
        how = dialling(target)
        if self.ca is None:
            return grpc.aio.insecure_channel(how.target, options=how.options)
        return grpc.aio.secure_channel(how.target, self._tls(), options=how.options)

    def _tls(self) -> grpc.ChannelCredentials:
        return grpc.ssl_channel_credentials(self.ca, self.private_key, self.certificate)


NOBODY = Credentials()
"""No key and no TLS, as for a gateway on this machine."""
