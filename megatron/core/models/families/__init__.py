"""Families: one table for each architecture of the transformers library that computes the same as a
GPT here computes.
"""
