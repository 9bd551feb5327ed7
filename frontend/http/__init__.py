"""What the routes of every HTTP API need: bodies, keys and limits, errors, logs, descriptions.

Each API is a folder beside this one. It declares `Route`s, reads requests with `JsonBodies`, and
finds what is known about a request under the key `NOTE`.
"""
