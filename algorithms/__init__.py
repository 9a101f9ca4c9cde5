"""The federated methods, one file each, both halves side by side."""

import privacy.environment  # noqa: F401 before any library reads the process's environment
