"""A simulated cluster for `router.py`: workloads, replicas with real trees, others' rules."""
