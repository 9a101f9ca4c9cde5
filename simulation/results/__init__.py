"""From finished runs to tables, pictures and a page."""
