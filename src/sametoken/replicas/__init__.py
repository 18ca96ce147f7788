"""Data parallelism: several engines of one model behind one port, with routing, forwarding and restarts."""
