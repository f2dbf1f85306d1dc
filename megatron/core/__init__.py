"""The parts: devices, data, models, sharding, optimizers, checkpoints. None of them knows the
training loop.
"""
