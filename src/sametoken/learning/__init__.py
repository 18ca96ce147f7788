"""Parts of a training objective: batches, unrolled forward, losses. Depends on torch only."""
