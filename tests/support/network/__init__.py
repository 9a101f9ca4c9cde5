"""Proxies, recorders and raw clients between the daemons."""
