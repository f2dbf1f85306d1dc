"""The end-to-end comparison with other projects: the sides, each a job of ranks that trains the
same GPT in an environment of its own, and how a benchmark talks to them.
"""
