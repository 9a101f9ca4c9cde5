"""Whole runs of real daemons, and what must be true of each."""
