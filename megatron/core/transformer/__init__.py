"""The transformer's parts: plain `nn.Module`s, independent of sharding and checkpoints."""
