"""The parts of `cpu_peers.py`: workloads, a worker for each engine, and the least possible time."""
