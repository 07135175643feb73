"""A grader's module that cannot be imported."""

raise RuntimeError("planted at import")
