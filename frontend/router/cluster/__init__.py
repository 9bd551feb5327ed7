"""Replicas and their ingress on Ray Serve.

`application.build` makes the Serve application, `start.serve_replicas` runs it for the command.
"""
