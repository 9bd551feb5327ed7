"""What several benchmarks share: options, rows of JSON, and the workloads of the tree."""
