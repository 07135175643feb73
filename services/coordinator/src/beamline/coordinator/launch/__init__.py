"""Starting a run and keeping it alive: checks, the run's folder, processes, restarts, progress, and a clean end."""
