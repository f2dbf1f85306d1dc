"""Drawing with matplotlib. No other package of the report imports it."""
