"""A plan of memory and speed: sizes as people write them, the table and the JSON."""
