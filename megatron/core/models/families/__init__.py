"""Families: one table for each architecture of the transformers library that computes what a GPT
here computes.
"""
