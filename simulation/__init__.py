"""The same methods with no network: many silos in one process."""

import privacy.environment  # noqa: F401 before any library reads the process's environment
