"""Matrix products on a CPU, of float and int8 weights, groups and low rank, in panels."""
