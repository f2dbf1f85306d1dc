"""What a checkpoint holds: the tensors of a model, its optimizer and a trainer, under canonical
keys.
"""
