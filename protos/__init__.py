"""The wire: message schemas, one file per concern, every field annotated with its exposure class."""
