"""The commands about machines: one that is simulated, measured, or planned for."""
