"""The parts of `load.py`: its clients, the bare engine, and what is read from /proc."""
