"""Parts of a training objective: batches, an unrolled forward, losses. Torch only."""
