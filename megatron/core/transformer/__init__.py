"""The transformer's parts: plain `nn.Module`s that know nothing of sharding, optimizers or
checkpoints.
"""
