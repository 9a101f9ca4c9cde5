"""Joining a federation, and whether this machine is ready to."""
