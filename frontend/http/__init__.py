"""What every HTTP route needs: bodies, keys and limits, ids, logs, the description of routes."""
