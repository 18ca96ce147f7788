"""How weights are stored: each format's arithmetic in plain torch is the truth, the compiled kernel its fast path."""
