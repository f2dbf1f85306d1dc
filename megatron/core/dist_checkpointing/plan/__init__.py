"""Who holds and who writes which part of a tensor, and where it lies in a file. Integers only."""
