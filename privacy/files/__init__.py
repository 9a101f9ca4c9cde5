"""Durable files, canonical JSON and strict YAML."""
