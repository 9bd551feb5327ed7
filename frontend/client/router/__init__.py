"""Which of many replicas gets a request: the one at which it is expected to be answered first.

`policy` decides; benchmarks and an ingress use it.
"""
