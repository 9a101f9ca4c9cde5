"""The hospital daemon."""

import privacy.environment  # noqa: F401 before any library reads the process's environment
