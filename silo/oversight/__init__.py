"""What the data protection officer looks at."""
