"""Programs that stand in for a daemon: with faults, clocks, hosts or endings of their own."""
