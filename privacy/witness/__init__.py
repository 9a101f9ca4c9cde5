"""Witnesses: who cosigns the checkpoints of journals, and never two histories of one."""
