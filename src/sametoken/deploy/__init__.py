"""Deployment over several hosts: checks of the hosts, start commands, and shutdown."""
