"""The command line: a module for each command, and `main`, which runs the one that is named.

Other folders use only `options`, for the defaults of the commands.
"""
