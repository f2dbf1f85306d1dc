"""A run as one HTML page, made from the files that the run leaves."""
