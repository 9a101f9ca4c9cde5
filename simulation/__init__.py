"""The same methods with no network: many silos in one process."""
