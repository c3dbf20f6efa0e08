"""Client of the crossdock LLM service: stubs and `crossdock.client`. Needs grpcio and protobuf only."""

__version__ = "0.1.0"
