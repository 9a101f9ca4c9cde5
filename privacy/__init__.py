"""What may leave a hospital, and the proof of what did."""

import privacy.environment  # noqa: F401 before any library reads the process's environment
