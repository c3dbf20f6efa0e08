"""Moves KV blocks between workers: tickets, wire format, transfers, transports. Knows no gRPC and no role."""
