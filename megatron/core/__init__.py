"""The parts: devices, data, models, sharding, optimizers, checkpoints. They do not depend on the
training loop.
"""
