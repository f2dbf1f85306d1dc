"""The planner: what a run will take and how long its steps will be, before it runs."""
