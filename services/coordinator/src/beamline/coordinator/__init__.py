"""The coordinator: data cursor, ledger, phases, advantages, batches, evaluation, and the command line."""
