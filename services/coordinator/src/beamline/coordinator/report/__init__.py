"""The run's report: one page that needs nothing but itself, made from `summary.json` and the evaluation dumps."""
