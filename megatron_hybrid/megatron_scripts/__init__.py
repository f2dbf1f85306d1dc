"""Launch scripts of Megatron-LM's: their flags, and what becomes of them here."""
