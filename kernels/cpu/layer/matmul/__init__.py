"""Matrix products on a CPU, of float and int8 weights and of low rank, in panels of a weight."""
