"""Journals, bundles and exchanges without daemons."""
