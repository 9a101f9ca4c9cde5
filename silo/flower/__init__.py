"""A door on the wire for Flower apps: between a hospital's SuperNode and the server, as the only way out."""
