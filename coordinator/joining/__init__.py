"""Enrolling hospitals and setting up a coordinator."""
