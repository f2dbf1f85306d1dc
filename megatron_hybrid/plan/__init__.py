"""The planner: a run's memory and the time of its steps, before it runs."""
