"""A grader's module that ends its process."""

import os

os._exit(3)
