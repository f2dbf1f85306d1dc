"""Models that read images and text."""
