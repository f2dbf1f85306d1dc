"""What draws with matplotlib. No other room of the report imports it."""
