"""verl: its bucket wire, a checkpoint-engine backend and a worker extension. Nothing here is imported before it is named."""
