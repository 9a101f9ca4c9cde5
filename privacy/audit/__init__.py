"""Whether evidence is what was signed."""
