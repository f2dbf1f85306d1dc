"""The models, built of the transformer's parts."""
