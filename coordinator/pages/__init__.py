"""What the operator looks at."""
