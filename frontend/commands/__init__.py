"""The command line: a module for each command, and `main.main`, which runs them.

Other folders use `options` only: the defaults of the commands.
"""
