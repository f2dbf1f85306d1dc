"""The arithmetic of Adam over flat arrays: on the host in C++ or in torch, on a GPU in Triton."""
