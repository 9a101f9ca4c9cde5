"""Masks that cancel in a sum, and the keys that make them."""
