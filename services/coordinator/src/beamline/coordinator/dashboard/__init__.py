"""The live dashboard: a page on the loopback interface that shows a run, live or ended, and updates by itself.

A run's folder is the source (`run_files`), and while the run lives its bus beside it (`watch`). Both become a board:
panels of plain JSON, charts as the report draws them (`board`). What changed of the board since a page last heard of it
is sent as one small event (`change`); `app` serves it, `access` keeps everybody else out.
"""
