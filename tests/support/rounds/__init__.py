"""Rounds of a coordinator, without gRPC."""
