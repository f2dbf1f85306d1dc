"""Packaging. Everything declarative stands in pyproject.toml."""

from setuptools import setup

setup()
