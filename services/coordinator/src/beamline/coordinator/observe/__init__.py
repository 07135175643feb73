"""Looking at a run, live or ended: its spans, metrics, logs and waits, and the views made of them."""
