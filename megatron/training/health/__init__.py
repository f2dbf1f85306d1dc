"""How a run is watched: exit codes, events, the watchdog and fault injection."""
