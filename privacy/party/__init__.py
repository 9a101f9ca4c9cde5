"""What every party's programs share."""
