"""Hospitals train models together, and each can prove, byte for byte, what left its building."""

import medsilo.privacy.environment  # noqa: F401 before any library reads the process's environment
