"""The parts of `gpu.py` and `kernels_gpu.py`: what they measure, and the process that measures."""
