"""Deployments over several hosts: what each must have, the commands that start them, and how they end."""
