"""A hospital's data, plans and trained models in small."""
