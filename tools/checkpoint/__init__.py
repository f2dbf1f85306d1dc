"""The checkpoint tool: list, show, verify, diff and convert. Nothing else imports it."""
