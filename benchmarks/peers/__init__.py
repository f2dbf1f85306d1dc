"""The end-to-end comparison with other projects: the sides, each a job of ranks that trains the
same GPT in a separate environment, and the protocol between a benchmark and the jobs.
"""
