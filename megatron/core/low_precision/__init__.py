"""Matrix products of 8- and 4-bit operands: recipes, their scales and casts, and a linear layer."""
