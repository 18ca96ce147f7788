"""Configuration written for other servers, translated into ours: pure data in, settings and notes out."""
