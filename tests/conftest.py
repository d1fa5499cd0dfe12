"""What all tests share: examples that are the same in every run, on a machine of any speed."""

from hypothesis import settings

settings.register_profile("same everywhere", derandomize=True, deadline=None)
settings.load_profile("same everywhere")
