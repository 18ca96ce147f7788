"""foretoken: speculative decoding end to end."""
