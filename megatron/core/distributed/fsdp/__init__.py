"""Sharded data parallelism on flat buffers: layouts, placements, buffers."""
