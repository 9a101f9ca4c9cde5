"""Rounds, from the first update's header to the aggregate."""
